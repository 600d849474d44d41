"""Controller <-> rank: steps and their outcome, KVP generations, KV transfers, life and death."""

from __future__ import annotations

from typing import Annotated

import msgspec

from medha import PROTOCOL
from medha.batch import Batch, Move
from medha.messages.fields import Blob, Count, Group, Logprob, Name, Sampling, Text, TokenBytes


class SequenceStart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A sequence that this group's ranks do not know yet.

    `cached`: (logical page, page id) of what this group already holds of it. `history`: its tokens
    so far (int32 bytes), sent only when `sampling` needs them; `prompt_tokens` of them are prompt.
    `rope_tokens`: the sequence's final length for dynamic NTK, fixed at admission. `adapter`: name
    of the adapter that computes its tokens, or empty.
    """

    seq: int
    sampling: Sampling
    prompt_tokens: Count
    cached: tuple[tuple[int, int], ...] = ()
    history: TokenBytes = b""
    rope_tokens: Count = 0
    adapter: Name = ""


class Step(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A batch for one group. `step` numbers the group's steps without gaps, from 1.

    `tokens`: int32 ids of the rows of `batch.of_group(group)` in order; -1 for a decode means the
    token that this sequence sampled last. `ends`: sequences that the ranks forget first.
    `switches`: the moves that `batch.switches` names, for ranks of both ends.
    """

    step: Count
    batch: Batch
    tokens: TokenBytes
    starts: tuple[SequenceStart, ...] = ()
    ends: tuple[int, ...] = ()
    switches: tuple[Move, ...] = ()


class Form(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Build the KVP columns of `generation` among `members` (groups, ascending), in background.

    `controller`: incarnation of the controller, whose rank this is from now on.
    """

    generation: Count
    members: Annotated[tuple[Group, ...], msgspec.Meta(max_length=4096)]
    store: Name
    controller: Name
    timeout_s: float = 30.0


class Dissolve(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Close the columns of this generation and of older ones; blocked exchanges fail at once."""

    generation: Count


class Peer(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Address of the rank at (group, same stage, same shard) for KV transfers."""

    group: Group
    agent: Name
    metadata: Blob
    bases: tuple[int, ...]
    page_bytes: Count
    pages: Count


class Forget(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The group's ranks are gone: drop their agents and fail their transfers."""

    group: Group


class OfferPages(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the source of a move: grant its pages to the target; answered by Offered."""

    move: Move
    lease_s: float = 30.0


class FetchPages(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the target of a move: read the granted pages; answered by Fetched.

    `epochs`: allocation epoch of each source page at the grant. `digests`: of sampled
    (layer, page) pairs, 8 bytes each in the grant's order; empty when not checked.
    """

    move: Move
    epochs: tuple[int, ...]
    digests: Blob = b""
    lease_s: float = 30.0


class Withdraw(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A move is over or called off: source drops its grant, target stops reading.

    The source answers Withdrawn with whether its pages' epochs still stand; the target answers
    Fetched(ok=False) if it was reading, only after its handles are terminal.
    """

    move: int


class Leave(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The rank ends after what it has begun; `rejoin`: it keeps its weights and sends Hello."""

    reason: Text = ""
    rejoin: bool = False


class ControllerBeat(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The controller lives; sent at least every 0.5 s."""


class Resend(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Announces the steps from `step` on, sent again after a gap."""

    step: Count


RankCommand = (
    Step
    | Form
    | Dissolve
    | Peer
    | Forget
    | OfferPages
    | FetchPages
    | Withdraw
    | Leave
    | ControllerBeat
    | Resend
)


class RankHello(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A rank introduces itself; `incarnation` changes whenever it starts or rejoins.

    `controller`: incarnation of the controller that formed its group; empty before. `store`:
    address of the rendezvous store that the first rank of a group serves; empty for the others.
    """

    group: Group
    stage: Count
    shard: Count
    incarnation: Name
    pid: int
    controller: Name = ""
    store: Name = ""
    protocol: int = PROTOCOL


class Loading(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Progress of loading: bytes of weights read so far, and in all."""

    done_bytes: Count
    total_bytes: Count


class RankReady(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Weights are loaded and the KV pool stands; what peers need for transfers.

    `bases`: address of each own layer's pool; page `p` of layer `l` lies at
    `bases[l] + p × page_bytes`.
    """

    pages: Count
    page_bytes: Count
    agent: Name
    metadata: Blob
    bases: tuple[int, ...]


class StageDone(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Reports that the rank's stage finished batch `number` after `elapsed_s` of computing."""

    number: Count
    elapsed_s: float = 0.0


class TokenOut(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A sampled token. `error`: the grammar of the sequence failed, so the token is void."""

    seq: int
    token: int
    logprob: Logprob | None = None
    error: Text = ""


class BatchTokens(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Sampled tokens of a batch whose tail is this rank's group, from the last stage's shard 0."""

    number: Count
    tokens: tuple[TokenOut, ...]


class ScoredPrompt(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Log probabilities of the tokens of a prompt from position `first` on (at least 1)."""

    seq: int
    first: Count
    logprobs: Annotated[tuple[Logprob, ...], msgspec.Meta(max_length=1 << 20)]


class Formed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Reports that the rank joined its column of `generation`, or the `error` that prevented it."""

    generation: Count
    error: Text = ""


class Offered(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The source grants a move's pages; the fields are FetchPages'."""

    move: int
    epochs: tuple[int, ...]
    digests: Blob = b""
    error: Text = ""


class Fetched(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The target holds a copy of a move's pages whose digests agree (`ok`), or why it does not.

    Sent only when every transfer handle is terminal.
    """

    move: int
    ok: bool
    moved_bytes: Count = 0
    elapsed_s: float = 0.0
    error: Text = ""


class Withdrawn(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The grant is gone; `intact`: no granted page was reused while it stood."""

    move: int
    intact: bool


class Gap(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A step is missing: `expected` was awaited when a later one came."""

    expected: Count


class RankFailed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The rank cannot go on; `kind`: `column` (a KVP peer), `group` (a TP or SPP peer), `memory`,
    `model`, `internal`. After `column` it lives on without that generation; else it exits."""

    kind: Name
    message: Text
    generation: Count = 0
    number: Count = 0


class RankBeat(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The rank lives; sent at least every 0.5 s from a thread that never computes."""


RankReport = (
    RankHello
    | Loading
    | RankReady
    | StageDone
    | BatchTokens
    | ScoredPrompt
    | Formed
    | Offered
    | Fetched
    | Withdrawn
    | Gap
    | RankFailed
    | RankBeat
)
