"""Messages between router and controller: registration, load, heads, grants, requests, tokens."""

from __future__ import annotations

from typing import Annotated

import msgspec

from medha import PROTOCOL
from medha.config import MAX_PROCESSES, QueueOrder
from medha.corrections import REGIMES
from medha.messages.fields import (
    TOKEN_BYTES,
    Blob,
    Count,
    Load,
    Logprob,
    Name,
    RequestId,
    Sampling,
    Text,
    TokenBytes,
)
from medha.model import ModelShape
from medha.request import Request, SloClass
from medha.topology import Topology

MAX_TENANT_COUNTS = 256
MAX_EARLY_SUBMITS = 8
"""Heads of a message whose requests may come with them."""
Use = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]
Weight = Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]
OutputToken = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class TenantCount(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Counts of a tenant by one router, see `medha.fleet.use_meter`."""

    tenant: Name
    requests: Use
    tokens: Use
    coming: Use
    concurrent_s: Use


class TenantCounts(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Counts of tenants by one router, by its incarnation; controllers pass them on."""

    router: Name
    counts: Annotated[tuple[TenantCount, ...], msgspec.Meta(max_length=MAX_TENANT_COUNTS)]


class Welcome(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Accepts a controller; the router has its tokenizer. `router` names the router's incarnation.

    A repeated Welcome requests a snapshot of the prefix cache.
    """

    router: Name
    protocol: int = PROTOCOL


class RouterPorts(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ports of all processes of a router, which share its address; a controller dials each."""

    ports: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, lt=65536)], ...],
        msgspec.Meta(max_length=MAX_PROCESSES),
    ]


class Rejected(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rejects a controller; `reason` names the fault, e.g. both protocol versions.

    `stranger`: the router only misses a Hello.
    """

    reason: Text
    stranger: bool = False


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A queued request that a controller may grant, with the numbers that order it.

    `elsewhere_s`: seconds per unit of weight that the router had its tenant served on other
    replicas in the last minutes.
    """

    id: RequestId
    age_s: float
    due_in_s: float
    work_s: float
    promised: bool
    weight: Weight = 1.0
    tenant: Name = ""
    charge_s: float = 0.0
    beyond_share: bool = False
    elsewhere_s: float = 0.0


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A request to compute. `hashes` are the names of its full pages (see `fleet.prefix_index`).

    `emitted` of the tokens are output of an earlier attempt: sampling goes on after them.
    `adapter`: name of the adapter that computes the tokens, or empty.
    """

    id: RequestId
    tokens: TokenBytes
    hashes: Blob = b""
    age_s: float = 0.0
    emitted: Count = 0
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    sampling: Sampling = Sampling()
    ttft_deadline_s: float = 0.5
    tpot_s: float = 0.03
    work_s: float = 0.0
    slo_class: Name = "default"
    tenant: Name = ""
    salt: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    adapter: Name = ""
    weight: Weight = 1.0
    promised: bool = False
    beyond_share: bool = False

    @property
    def emitted_before(self) -> int:
        """Output tokens among `tokens`; at least one token counts as prompt."""
        return min(self.emitted, len(self.tokens) // TOKEN_BYTES - 1)

    def request(self, now: float) -> Request:
        """Return the request as a scheduler sees it that receives the message at `now`.

        Tokens emitted earlier are part of its prompt and no longer of its output.
        """
        return Request(
            id=self.id,
            arrival_s=now - self.age_s,
            prompt_tokens=len(self.tokens) // TOKEN_BYTES,
            max_output_tokens=max(self.max_output_tokens - self.emitted_before, 1),
            ttft_deadline_s=self.ttft_deadline_s,
            tpot_s=self.tpot_s,
            work_s=self.work_s,
            slo_class=self.slo_class,
            tenant=self.tenant,
            weight=self.weight,
            promised=self.promised,
            beyond_share=self.beyond_share,
        )


class Heads(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The requests placed on a controller, most urgent first; replaces earlier heads.

    A Submit removes its head, so that none follows for that alone. `submits`: early ones of some
    heads. The controller begins such a request where it would grant it, and sends no Grant.
    """

    heads: Annotated[tuple[Head, ...], msgspec.Meta(max_length=256)]
    submits: Annotated[tuple[Submit, ...], msgspec.Meta(max_length=MAX_EARLY_SUBMITS)] = ()


class Abort(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Stop a request at once and free its pages; unknown ids are ignored."""

    id: RequestId


class FetchFile(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ask for a file named in Hello by its content hash, from `offset`."""

    hash: Name
    offset: Count = 0


class RouterBeat(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Heartbeat of the router, sent at least every 0.5 s."""


RouterMessage = (
    Welcome
    | RouterPorts
    | Rejected
    | Heads
    | Submit
    | Abort
    | FetchFile
    | RouterBeat
    | TenantCounts
)


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of a checkpoint where a request is silent; None: the API's default."""

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=10.0)] | None = None

    def given(self) -> dict[str, float]:
        """Return the parameters that the checkpoint has."""
        return {
            name: value for name, value in msgspec.structs.asdict(self).items() if value is not None
        }


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Registers a replica with a router. `files`: name -> content hash (blake2b-128 hex).

    `files` has `tokenizer.json` and, if the checkpoint has them, `tokenizer_config.json`,
    `chat_template.jinja`, `generation_config.json`, and in `adapter_templates.json` the chat
    templates of adapters by name. `checkpoint`: equal for replicas of the same weights; empty if
    unknown. `adapters`: name -> digest of its files. `profile`: JSON of the predictor's profile.
    `defaults`: sampling of the checkpoint. `order`: of requests that wait for the replica.
    `max_running`: sequences that may run at once. `draining`: the replica finishes its requests and
    takes no new ones.
    """

    replica: Name
    incarnation: Name
    model: Name
    shape: ModelShape
    topology: Topology
    page_tokens: Annotated[int, msgspec.Meta(ge=1)]
    max_context_tokens: Annotated[int, msgspec.Meta(ge=1)]
    classes: Annotated[tuple[SloClass, ...], msgspec.Meta(max_length=64)]
    profile: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    files: Annotated[dict[str, str], msgspec.Meta(max_length=16)]
    checkpoint: Name = ""
    adapters: Annotated[dict[Name, Name], msgspec.Meta(max_length=64)] = {}
    stop_tokens: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = ()
    defaults: GenerationDefaults = GenerationDefaults()
    max_batch_s: float = 0.1
    min_batch_s: float = 0.01
    max_running: Annotated[int, msgspec.Meta(ge=1)] = 256
    order: QueueOrder = QueueOrder()
    draining: bool = False
    protocol: int = PROTOCOL


class FilePart(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Bytes of a file from `offset`; `total` is its size."""

    hash: Name
    offset: Count
    total: Count
    data: Annotated[bytes, msgspec.Meta(max_length=4 << 20)]


Factors = Annotated[
    tuple[Annotated[float, msgspec.Meta(ge=1e-7, le=1e7)], ...],
    msgspec.Meta(min_length=len(REGIMES), max_length=len(REGIMES)),
]
Counts = Annotated[
    tuple[Annotated[float, msgspec.Meta(ge=0.0, le=1e15)], ...],
    msgspec.Meta(min_length=len(REGIMES), max_length=len(REGIMES)),
]


class LoadReport(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Load of a replica, sent after changes and at least every 0.5 s as heartbeat.

    `learned`: how measured batches differ from the profile, see `Corrections.learned`. `quiet`: a
    rank gives no sign of life; it may hang. `gone`: no running group has all its ranks connected.
    """

    load: Load
    draining: bool = False
    quiet: bool = False
    gone: bool = False
    learned: tuple[Factors, Factors, Counts, Counts] | None = None


class Grant(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Grants heads for which the replica has room; a Submit must arrive within the lease."""

    ids: Annotated[tuple[RequestId, ...], msgspec.Meta(max_length=256)]
    lease_s: float = 0.2


class Accepted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Accepts a submitted request; `cached_tokens`: tokens of its prompt in the cache."""

    id: RequestId
    cached_tokens: Count = 0
    predicted_ttft_s: float = 0.0


class Tokens(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Output tokens from index `first` on (0 = the first token that this request ever emits).

    `slack_ratio`: relative slack left at the first token, sent with it.
    """

    id: RequestId
    first: Count
    tokens: Annotated[tuple[OutputToken, ...], msgspec.Meta(max_length=1024)]
    logprobs: Annotated[tuple[Logprob, ...], msgspec.Meta(max_length=1024)] = ()
    slack_ratio: float | None = None


class PromptLogprobs(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Log probabilities of the prompt's tokens from position `first` on (at least 1).

    All are sent before the first of Tokens; a request that starts again sends them again.
    """

    id: RequestId
    first: Count
    logprobs: Annotated[tuple[Logprob, ...], msgspec.Meta(max_length=1 << 20)]


class Finished(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ends a request; `reason` is `stop` (a stop token) or `length`."""

    id: RequestId
    reason: Name
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    cached_tokens: Count = 0


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Gives up a request; `retriable`: another replica may finish it."""

    id: RequestId
    code: Name
    message: Text
    retriable: bool = False


class KvEvents(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefix-cache changes, numbered from 1; `snapshot`: `stored` is the whole cache.

    `stored` and `removed` are concatenated 16-byte page names.
    """

    number: Count
    stored: Blob = b""
    removed: Blob = b""
    snapshot: bool = False


ReplicaMessage = (
    Hello
    | FilePart
    | LoadReport
    | Grant
    | Accepted
    | PromptLogprobs
    | Tokens
    | Finished
    | Failed
    | KvEvents
    | TenantCounts
)
