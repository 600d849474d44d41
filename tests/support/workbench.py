"""The replica that benchmark rows are measured on, made on first use, and timing on its device."""

from __future__ import annotations

import gc
import pathlib
import time
from collections.abc import Callable

import torch
from tests.support.served import Served, Wish
from tests.support.sheet import Row

from medha.profile import Profile
from medha.request import Slo
from medha_worker.device import ComputeDevice
from medha_worker.model.checkpoint_writer import TinyModel

PAGE_TOKENS = 64


class Workbench:
    """The replica for measurements, made on first use, with one KV type at a time.

    `scale` divides lengths (1 on a GPU; larger for a dry run on a CPU). `patience_s` limits the
    expected time of a request.
    """

    def __init__(
        self,
        device: ComputeDevice,
        shape: TinyModel,
        folder: pathlib.Path,
        pool: int,
        profile: Profile,
        patience_s: float,
    ) -> None:
        self.device, self.model, self.folder, self.pool = device, shape, folder, pool
        self.profile, self.patience_s = profile, patience_s
        self.timed = device.at.type == "cuda"
        self.scale = 1 if self.timed else 64
        self._served: Served | None = None
        self._kv = ""

    def tokens(self, count: int) -> int:
        return max(4, count // self.scale)

    def served(self, kv_dtype: str = "auto", pool_tokens: int = 0) -> Served:
        """Return a warmed-up replica whose pool holds at least `pool_tokens`."""
        if self._served is not None and self._kv == kv_dtype:
            return self._served
        self.clear()
        self._kv = kv_dtype
        self._served = Served(
            self.folder,
            self.device,
            profile=self.profile,
            kv_dtype=kv_dtype,
            dtype="bfloat16" if self.timed else "float32",
            pages=max(self.pool, self.tokens(pool_tokens)) // PAGE_TOKENS + 64,
            slo=Slo(ttft_floor_s=0.15, ttft_multiplier=1.15, tpot_s=0.025),
        )
        for _ in range(3):
            mixed = [Wish(prompt_tokens=self.tokens(n), output_tokens=8) for n in (128, 2048, 8192)]
            self._served.play(mixed + [Wish(prompt_tokens=8, output_tokens=16)] * 8)
        return self._served

    def clear(self) -> None:
        """Discard the replica: another is needed, or this one failed."""
        self._served = None
        gc.collect()
        if self.timed:
            torch.cuda.empty_cache()

    def wait(self, work: Callable[[], object]) -> float:
        """Return the seconds until the device has done `work`."""
        self.device.fetch().wait()
        began = time.perf_counter()
        work()
        self.device.fetch().wait()
        return time.perf_counter() - began

    def copy_bytes_per_s(self) -> float:
        source = torch.zeros(
            1 << (30 if self.timed else 22), dtype=torch.uint8, device=self.device.at
        )
        target = torch.empty_like(source)
        best_s = min(self.wait(lambda: target.copy_(source)) for _ in range(8))
        return 2.0 * source.nbytes / best_s

    def row(
        self,
        row: str,
        what: str,
        value: float,
        unit: str,
        target: float,
        *,
        least: bool = False,
        note: str = "",
    ) -> Row:
        met = (value >= target if least else value <= target) if self.timed and target else None
        return Row(
            row=row,
            what=what,
            value=value,
            unit=unit,
            target=target,
            least=least,
            met=met,
            note=note,
        )
