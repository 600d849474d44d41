"""Request, SLO and QoS class.

Times are seconds on the process's own monotonic clock; only durations are sent to other processes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

ClassWeight = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latency targets of a class.

    TTFT deadline `D = max(floor, multiplier × W)` seconds after arrival, where `W` is the predicted
    prefill time of the uncached tokens on an idle replica (Medha, section 6.1: multiplier 1.5).
    """

    ttft_floor_s: float = 0.5
    ttft_multiplier: float = 1.5
    tpot_s: float = 0.03

    def ttft_deadline_s(self, work_s: float) -> float:
        return max(self.ttft_floor_s, self.ttft_multiplier * work_s)


class SloClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """QoS class: targets, weight and reserved share.

    `when_infeasible` is `refuse` (429 at once) or `relegate` (accepted without a promise).
    """

    name: str = "default"
    slo: Slo = Slo()
    weight: ClassWeight = 1.0
    reserved: float = 0.0
    when_infeasible: str = "refuse"


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request as the scheduler sees it.

    `work_s` is W: predicted prefill seconds of the uncached tokens on an idle replica.
    `ttft_deadline_s` is D, seconds after `arrival_s`. `promised`: a router gave a promise for D;
    None until a router has decided. `beyond_share`: without a promise because its tenant has its
    share, so that the request runs after those of others.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    max_output_tokens: int = 1
    ttft_deadline_s: float = 0.5
    tpot_s: float = 0.03
    work_s: float = 0.0
    slo_class: str = "default"
    tenant: str = ""
    weight: float = 1.0
    promised: bool | None = None
    beyond_share: bool = False

    @property
    def due_s(self) -> float:
        """Due time of the first token."""
        return self.arrival_s + self.ttft_deadline_s

    @property
    def total_tokens(self) -> int:
        """Maximum length of the sequence."""
        return self.prompt_tokens + self.max_output_tokens
