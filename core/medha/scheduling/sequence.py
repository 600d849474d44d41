"""A sequence in the scheduler: a request, three cursors and where its pages are.

    position   0 ...... done ...... left ...... packed ........... goal
               | finished | past     | in stage 0 | not handed out  |
               | stages   | stage 0  |            | yet             |

`goal` is the prompt, and after a recomputation the prompt and what was emitted. Pages are kept by
logical index; the group of each says whose shard it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from medha.batch import Chunk, Move
from medha.request import Request


class Sequence:
    """State of one accepted request, from submit until its pages have come back.

    `plan`: groups in the order in which they become active.
    `kept`: it is in the promise set, `promised`: by a promise. `reserved`: pages per group that it
    will still take; `claim`: on groups that do not run yet. `fresh`: pages that its newest chunk
    took. `displaced`: it lost its place in the promise set to others. `moving`: copies of its pages
    under way or not yet switched. `refused`: its groups were together, and it was not taken. `row`:
    where it stood lately among the rows of a group.
    """

    __slots__ = (
        "claim", "decode_due_s", "decoding", "displaced", "done", "emitted", "ended",
        "first_token_s", "fresh", "goal", "group_of", "groups", "hashes", "held", "in_flight",
        "kept", "key", "left", "moving", "next_chunk", "norm_s", "number", "over", "packed",
        "page_of", "passed", "paused_since_s", "plan", "promised", "refused", "request", "reserved",
        "row", "slot", "started", "switching", "taken_back", "total_work_s", "waiting_since_s",
    )  # fmt: skip

    def __init__(self, number: int, request: Request, hashes: Items[bytes] = ()) -> None:
        self.number, self.request, self.hashes = number, request, tuple(hashes)
        self.key = (request.due_s, request.arrival_s, request.id)
        self.goal = request.prompt_tokens
        self.emitted = 0
        self.plan: tuple[int, ...] = ()
        self.kept = self.promised = False
        self.total_work_s = self.norm_s = 0.0
        self.over = self.ended = self.taken_back = self.displaced = False
        self.in_flight = self.moving = 0
        self.first_token_s: float | None = None
        self.claim = self.row = 0
        self.reserved: dict[int, int] = {}
        self.reset()

    def reset(self) -> None:
        """Back to the start: nothing computed, no pages; what was emitted is computed anew."""
        self.packed = self.left = self.done = 0
        self.goal = self.request.prompt_tokens + self.emitted
        self.page_of: list[int] = []
        self.group_of: list[int] = []
        self.held: dict[int, int] = {}
        self.groups: tuple[int, ...] = ()
        self.fresh = 0
        self.started = self.decoding = False
        self.next_chunk: Chunk | None = None
        self.slot = -1
        self.decode_due_s = 0.0
        self.passed, self.refused = 0, False
        self.waiting_since_s: float | None = None
        self.paused_since_s: float | None = None
        self.switching: list[Move] = []

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def remaining_tokens(self) -> int:
        """Prompt tokens that no batch holds yet."""
        return self.goal - self.packed

    @property
    def ready(self) -> bool:
        """The next chunk of the prompt may be packed: the one before left stage 0."""
        return self.left == self.packed and not (self.over or self.taken_back)

    @property
    def last_token(self) -> int:
        """Output tokens after which it ends with reason `length`."""
        return self.request.max_output_tokens

    def hold(self, group: int, tokens: int) -> None:
        """`tokens` more of it lie in `group`."""
        if group in self.held:
            self.held[group] += tokens
        else:
            self.held[group] = tokens
            self.groups = tuple(sorted(self.held))

    def let_go(self, group: int, tokens: int) -> None:
        """`tokens` fewer of it lie in `group`."""
        self.held[group] -= tokens
        if not self.held[group]:
            del self.held[group]
            self.groups = tuple(sorted(self.held))

    def layout(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """(group, ((logical page, page id), …)) without the pages that its newest chunk took."""
        by_group: dict[int, list[tuple[int, int]]] = {}
        for logical in range(len(self.page_of) - self.fresh):
            pair = (logical, self.page_of[logical])
            by_group.setdefault(self.group_of[logical], []).append(pair)
        return tuple((group, tuple(by_group[group])) for group in sorted(by_group))
