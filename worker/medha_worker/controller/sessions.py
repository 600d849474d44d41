"""Requests as the controller holds them: their tokens, how they are sampled, when they end.

The scheduler knows lengths only; tokens, stop tokens and page names live here. A session survives
preemption and the loss of a group: its prompt and everything emitted is what is computed again.

    tokens   | prompt ........ | emitted earlier | emitted here ... |
             0          prompt_tokens         submitted           length
"""

from __future__ import annotations

import msgspec
import numpy as np

from medha.errors import ProtocolError
from medha.messages import SequenceStart, Submit
from medha.prefix import HASH_BYTES, next_hash
from medha.request import Request

TOKEN_BYTES = 4
DRAWN = (-1).to_bytes(TOKEN_BYTES, "little", signed=True)
MAX_LOSSES = 2


class Ending(msgspec.Struct, frozen=True):
    """How a session ended: `reason` is `stop` or `length`."""

    reason: str
    output_tokens: int


class Session:
    """One request from Submit to Finished; identity is (router, id), `seq` the scheduler's name."""

    def __init__(
        self, router: str, submit: Submit, page_tokens: int, max_context_tokens: int, now: float
    ) -> None:
        if len(submit.tokens) % TOKEN_BYTES or not submit.tokens:
            raise ProtocolError(
                f"tokens of request {submit.id} are {len(submit.tokens)} bytes: must be a multiple "
                "of 4, at least one token"
            )
        if len(submit.hashes) % HASH_BYTES:
            raise ProtocolError(
                f"hashes of request {submit.id} are {len(submit.hashes)} bytes: must be a multiple "
                f"of {HASH_BYTES}"
            )
        self.router = router
        self.id = submit.id
        self.seq = -1
        self.sampling = submit.sampling
        self.tokens = bytearray(submit.tokens)
        self.submitted_tokens = len(self.tokens) // TOKEN_BYTES
        self.emitted_before = min(submit.emitted, self.submitted_tokens - 1)
        self.prompt_tokens = self.submitted_tokens - self.emitted_before
        self.cached_tokens = 0
        self.losses = 0
        self.ending: Ending | None = None
        self.dispatched = False
        self._page_tokens, self._max_context_tokens = page_tokens, max_context_tokens
        hashes = [
            submit.hashes[i : i + HASH_BYTES] for i in range(0, len(submit.hashes), HASH_BYTES)
        ]
        self._named_pages = len(hashes)
        self._link = hashes[-1] if hashes else submit.salt
        # The router names the prompt's pages; only a chain that it began can be continued.
        self._named = bool(self._link) and self._named_pages == self.prompt_tokens // page_tokens
        while name := self.completed_page((self._named_pages + 1) * page_tokens):
            hashes.append(name)
        self.hashes = tuple(hashes)
        self.max_output_tokens = max(submit.max_output_tokens - self.emitted_before, 1)
        self.request = Request(
            id=submit.id,
            arrival_s=now - submit.age_s,
            prompt_tokens=self.submitted_tokens,
            max_output_tokens=self.max_output_tokens,
            ttft_deadline_s=submit.ttft_deadline_s,
            tpot_s=submit.tpot_s,
            work_s=submit.work_s,
            slo_class=submit.slo_class,
            tenant=submit.tenant,
            weight=submit.weight,
            promised=submit.promised,
        )

    @property
    def length(self) -> int:
        """Tokens so far: prompt and everything emitted."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def output_tokens(self) -> int:
        """Tokens that this request ever emitted, earlier attempts included."""
        return self.length - self.prompt_tokens

    def slack_ratio(self, remaining_s: float, floor_s: float, now: float) -> float:
        """Relative slack: time left after `remaining_s` of work, over the request's total work."""
        return (self.request.due_s - now - remaining_s) / max(self.request.work_s, floor_s)

    def rows(self, start: int, length: int) -> bytes:
        """Token ids [start, start + length) as int32 bytes; of the one that is being drawn, whose
        rank knows it, -1. Raises ProtocolError beyond."""
        if length == 1 and start == self.length:
            return DRAWN
        if start + length > self.length:
            raise ProtocolError(
                f"chunk [{start}, {start + length}) of request {self.id}: only {self.length} tokens"
            )
        return bytes(self.tokens[TOKEN_BYTES * start : TOKEN_BYTES * (start + length)])

    def introduction(self, cached: tuple[tuple[int, int], ...]) -> SequenceStart:
        """What a group that does not know this sequence is told of it."""
        return SequenceStart(
            seq=self.seq,
            sampling=self.sampling,
            prompt_tokens=self.prompt_tokens,
            cached=cached,
            history=bytes(self.tokens) if self.sampling.penalised else b"",
            rope_tokens=min(self.request.total_tokens, self._max_context_tokens),
        )

    def append(self, token: int) -> None:
        """Take the sampled token; sets `ending` when it is the last one."""
        self.tokens += token.to_bytes(TOKEN_BYTES, "little", signed=True)
        emitted_here = self.length - self.submitted_tokens
        if token in self.sampling.stop_tokens and self.output_tokens >= self.sampling.min_tokens:
            self.ending = Ending("stop", self.output_tokens)
        elif emitted_here >= self.max_output_tokens:
            self.ending = Ending("length", self.output_tokens)

    def completed_page(self, held_tokens: int) -> bytes | None:
        """Name of the page that ends at `held_tokens`, if generated text just filled it.

        Pages of the submitted tokens have the router's names; the chain goes on from the last.
        """
        page, rest = divmod(held_tokens, self._page_tokens)
        next_one = page == self._named_pages + 1 and held_tokens <= self.length
        if rest or not self._named or not next_one:
            return None
        rows = self.rows((page - 1) * self._page_tokens, self._page_tokens)
        self._link = next_hash(self._link, np.frombuffer(rows, dtype="<i4"))
        self._named_pages = page
        return self._link


class Sessions:
    """Every session that runs, by request id and by sequence."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_seq: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, id: str) -> bool:
        return id in self._by_id

    def add(self, session: Session, seq: int) -> None:
        session.seq = seq
        self._by_id[session.id] = session
        self._by_seq[seq] = session

    def of(self, id: str) -> Session | None:
        return self._by_id.get(id)

    def of_seq(self, seq: int) -> Session | None:
        return self._by_seq.get(seq)

    def all(self) -> tuple[Session, ...]:
        return tuple(self._by_id.values())

    def of_router(self, router: str) -> tuple[Session, ...]:
        return tuple(session for session in self._by_id.values() if session.router == router)

    def remove(self, session: Session) -> None:
        self._by_id.pop(session.id, None)
        self._by_seq.pop(session.seq, None)
