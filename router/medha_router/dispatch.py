"""Whose turn it is, and where: one model's queue over the replicas that serve it.

Puts the core's admission, queue, placement and prefix index together for one model. A request with
a promise is placed at once, since its promise was counted there; one without waits unplaced and is
placed when it comes near the front, so that what fits nowhere is held for the whole fleet. `now` is
an argument; it sends nothing.
"""

from __future__ import annotations

import collections

from medha.errors import Refusal
from medha.messages import Head, KvEvents
from medha.prefix import HASH_BYTES
from medha.request import SloClass
from medha.scheduling.admission import Usage, Verdict, admit, retry_after_s
from medha.scheduling.placement import Newcomer, Standing, place
from medha.scheduling.prefix_index import PrefixIndex
from medha.scheduling.queue import Queue, Queued
from medha_router.fleet import Replica
from medha_router.runs import Run

HEADS = 64
RELEGATED_PLACED = 16
MOST_SPREAD = 256


class Dispatch:
    """The waiting runs of one model, and what is believed of its replicas.

    `told` what happens (`joined`, `left`, `reported`, `cached`), asked for verdicts (`admit`) and
    for each replica's heads (`heads`).
    """

    def __init__(self, classes: tuple[SloClass, ...]) -> None:
        self._queue = Queue()
        self._usage = Usage(classes)
        self._index = PrefixIndex()
        self._standings: dict[str, Standing] = {}
        self._editions: dict[str, str] = {}  # of each of them
        self._runs: dict[str, Run] = {}
        self._waiting: collections.Counter[str] = collections.Counter()  # of them, by edition
        self._names: dict[str, list[bytes]] = {}
        self._cached: dict[str, int] = {}
        self._told_s: dict[str, float] = {}
        self._placed: dict[str, set[str]] = {}  # of those without a promise, by replica
        self._homeless: set[str] = set()  # promised ones that are placed nowhere

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def standings(self) -> list[Standing]:
        return list(self._standings.values())

    @property
    def cached_pages(self) -> int:
        """Page names known to be held by some replica."""
        return len(self._index)

    def waits_for(self, edition: str) -> int:
        """How many runs wait for a replica of this edition."""
        return self._waiting[edition]

    def held(self) -> list[Run]:
        """All runs that wait."""
        return list(self._runs.values())

    def reclass(self, classes: tuple[SloClass, ...]) -> None:
        """The model's classes from now on; what waits keeps its own."""
        self._usage.reclass(classes)

    def joined(self, replica: Replica) -> None:
        """A replica may be placed upon: it reported for the first time."""
        hello = replica.hello
        self._editions[replica.name] = replica.edition
        self._standings[replica.name] = Standing(
            replica.name, replica.predictor, hello.max_context_tokens, hello.min_batch_s,
            hello.max_batch_s,
        )  # fmt: skip

    def left(self, name: str) -> None:
        """A replica is gone: what was placed there waits for another place."""
        self._standings.pop(name, None)
        self._editions.pop(name, None)
        self._told_s.pop(name, None)
        self._index.forget(name)
        for item in self._queue.placed_on(name):
            self._put(_placed(item, ""))
        self._placed.pop(name, None)

    def reported(self, replica: Replica, now: float) -> None:
        if replica.load is None:
            return
        if replica.name not in self._standings:
            self.joined(replica)
        standing = self._standings[replica.name]
        opens = replica.open and (standing.draining or not standing.known)
        standing.draining = replica.draining
        standing.told(replica.load, now)
        self._told_s[replica.name] = now
        if opens:
            self._spread(replica.name, now)
        if not replica.open:
            for item in self._queue.placed_on(replica.name):
                standing.release(item.id, now)
                self._put(_placed(item, ""))

    def _spread(self, opened: str, now: float) -> None:
        """What waits for other replicas may go to one that has just opened. Of many, those due
        last: they would wait longest, and placing each anew takes a moment of the loop."""
        waiting = [
            item
            for name in self._standings
            if name != opened and self._editions[name] == self._editions[opened]
            for item in self._queue.placed_on(name)
        ]
        waiting.sort(key=lambda item: (item.due_s, item.id))
        for item in waiting[-MOST_SPREAD:]:
            self._standings[item.replica].release(item.id, now)
            self._put(_placed(item, ""))

    def cached(self, name: str, events: KvEvents) -> bool:
        """Prefix-cache changes of a replica; False when a snapshot is needed."""
        return self._index.apply(name, events)

    def idle_work_s(self, prompt_tokens: int, hashes: bytes, edition: str) -> float:
        """W: prefill seconds of the uncached tokens on an idle replica, the best one for them."""
        cached = self._cached_tokens(_names(hashes), prompt_tokens)
        return min(
            standing.predictor.prefill_s(prompt_tokens, cached.get(standing.name, 0))
            for standing in self._able(edition)
        )

    def idle_tpot_s(self, prompt_tokens: int, edition: str) -> float:
        """TPOT that the best replica for it would have for it alone."""
        return min(each.idle_tpot_s(prompt_tokens) for each in self._able(edition))

    def admit(self, run: Run, slo_class: SloClass, now: float) -> Verdict:
        """Let a run wait, with or without a promise; raises Refusal."""
        newcomer = _newcomer(run)
        names = _names(run.prompt.hashes)
        cached = self._cached_tokens(names, run.request.prompt_tokens)
        age_s = now - run.request.arrival_s
        able = self._able(run.edition)
        verdict = admit(newcomer, able, cached, slo_class, self._usage, now, age_s)
        self._remember(run, names)
        option = verdict.option
        self._cached[run.id] = option.cached_tokens
        if verdict.promised:
            self._standings[option.replica].hold(newcomer, option, now, True)
        request = run.request
        self._usage.add(request.slo_class, request.tenant, option.work_s, now)
        self._put(
            Queued(
                id=run.id,
                arrival_s=request.arrival_s,
                due_s=request.due_s,
                work_s=option.work_s,
                promised=verdict.promised,
                replica=option.replica if verdict.promised else "",
                weight=request.weight,
            )
        )
        return verdict

    def resume(self, run: Run, now: float) -> None:
        """A run lost its replica: it waits again, first of all, as what was promised."""
        self._remember(run, _names(run.prompt.hashes))
        tokens = run.prompt.length + len(run.output.tokens)
        work_s = min(
            (each.predictor.prefill_s(tokens) for each in self._able(run.edition)),
            default=run.request.work_s,
        )
        self._put(
            Queued(id=run.id, arrival_s=run.request.arrival_s, due_s=min(now, run.request.due_s),
                   work_s=work_s, promised=True, weight=run.request.weight)
        )  # fmt: skip

    def take(self, id: str, name: str) -> Run | None:
        """A replica was granted this run: it waits no longer. None when it is not placed there."""
        item = self._queue.get(id)
        if item is None or item.replica != name:
            return None
        self._queue.take(id)
        return self._forget(id)

    def accepted(self, id: str, name: str) -> None:
        if name in self._standings:
            self._standings[name].accepted(id)

    def drop(self, id: str, name: str | None, now: float) -> None:
        """The run is over or not wanted any more; `name`: the replica that it was sent to."""
        item = self._queue.remove(id)
        self._forget(id)
        where = item.replica if item is not None else name
        if where and where in self._standings:
            self._standings[where].release(id, now)

    def relegate_late(self, now: float) -> list[Run]:
        """Promised runs that cannot make it any more lose their place to those that can."""
        late: list[Run] = []
        freed: set[str] = set()
        for each in self._queue.late(now):
            item, run = self._queue.get(each), self._runs[each]
            if item is None or run.moves:
                continue  # a resumed run keeps its place: its client is reading
            if item.replica in self._standings:
                self._standings[item.replica].accepted(each)
                freed.add(item.replica)
            self._put(
                Queued(id=each, arrival_s=item.arrival_s, due_s=item.due_s, work_s=item.work_s,
                       promised=False, weight=item.weight)
            )  # fmt: skip
            late.append(run)
        for name in freed:  # one count for all of them: what was accepted is let go
            standing = self._standings[name]
            standing.told(standing.load, self._told_s[name])
        return late

    def place_waiting(self, now: float) -> None:
        """Place the most urgent of what is placed nowhere, a few without promise per replica."""
        if not self._standings or not len(self._queue):
            return
        room = sum(
            max(0, RELEGATED_PLACED - len(self._placed.get(name, ()))) for name in self._standings
        )
        if room <= 0 and not self._homeless:
            return
        for item in self._queue.unplaced(now):
            if room <= 0 and not item.promised:
                break
            run = self._runs[item.id]
            newcomer = _newcomer(run)
            cached = self._cached_tokens(self._names[item.id], newcomer.prompt_tokens)
            option = place(newcomer, self._able(run.edition), cached, now)
            if option is None:
                continue
            self._standings[option.replica].hold(newcomer, option, now, item.promised)
            self._cached[item.id] = option.cached_tokens
            self._put(_placed(item, option.replica))
            room -= not item.promised

    def heads(self, now: float) -> dict[str, tuple[Head, ...]]:
        """Each replica's most urgent runs, as they are published to it."""
        found = self._queue.heads(now, HEADS)
        return {name: tuple(self._head(item, now) for item in found.get(name, ()))
                for name in self._standings}  # fmt: skip

    def waiting(self, now: float) -> list[Queued]:
        """Everything that waits, most urgent first."""
        return [item for each in self._queue.order(now) if (item := self._queue.get(each))]

    def run(self, id: str) -> Run | None:
        """A run that waits."""
        return self._runs.get(id)

    def retry_after_s(self) -> float:
        return retry_after_s(self.standings)

    def check_room(self, most: int) -> None:
        """Raises Refusal when the queue is full."""
        if len(self._queue) >= most:
            raise Refusal(
                "overloaded",
                f"{len(self._queue)} requests wait, at most {most} may: retry later",
                retry_after_s=self.retry_after_s(),
            )

    def _able(self, edition: str) -> list[Standing]:
        """Replicas that can read what was made into tokens for this edition."""
        editions = self._editions
        return [each for each in self._standings.values() if editions[each.name] == edition]

    def _put(self, item: Queued) -> None:
        """Let a run wait, in place of what it waited as before."""
        self._unmark(item.id)
        if not item.promised and item.replica:
            self._placed.setdefault(item.replica, set()).add(item.id)
        elif item.promised and not item.replica:
            self._homeless.add(item.id)
        self._queue.add(item)

    def _unmark(self, id: str) -> None:
        self._homeless.discard(id)
        for placed in self._placed.values():
            placed.discard(id)

    def _remember(self, run: Run, names: list[bytes]) -> None:
        self._forget(run.id)
        self._runs[run.id], self._names[run.id] = run, names
        self._waiting[run.edition] += 1

    def _forget(self, id: str) -> Run | None:
        self._unmark(id)
        self._names.pop(id, None)
        self._cached.pop(id, None)
        run = self._runs.pop(id, None)
        if run is not None:
            self._waiting[run.edition] -= 1
            if not self._waiting[run.edition]:
                del self._waiting[run.edition]
        return run

    def _head(self, item: Queued, now: float) -> Head:
        run = self._runs[item.id]
        return Head(
            id=item.id,
            age_s=max(0.0, now - item.arrival_s),
            prompt_tokens=run.prompt.length + len(run.output.tokens),
            cached_tokens=self._cached.get(item.id, 0),
            max_output_tokens=run.request.max_output_tokens,
            ttft_deadline_s=run.request.ttft_deadline_s,
            work_s=item.work_s,
            slo_class=run.request.slo_class,
            promised=item.promised,
        )

    def _cached_tokens(self, names: list[bytes], prompt_tokens: int) -> dict[str, int]:
        """Prompt tokens held by each replica; the last one is always computed."""
        return {
            name: min(pages * standing.load.page_tokens, prompt_tokens - 1)
            for name, pages in self._index.match(names).items()
            if (standing := self._standings.get(name))
        }


def _newcomer(run: Run) -> Newcomer:
    request, emitted = run.request, len(run.output.tokens)
    return Newcomer(
        id=run.id,
        prompt_tokens=run.prompt.length + emitted,
        max_output_tokens=max(1, request.max_output_tokens - emitted),
        due_s=request.due_s,
        tpot_s=request.tpot_s,
        slo_class=request.slo_class,
        tenant=request.tenant,
    )


def _placed(item: Queued, replica: str) -> Queued:
    return Queued(
        id=item.id, arrival_s=item.arrival_s, due_s=item.due_s, work_s=item.work_s,
        promised=item.promised, replica=replica, weight=item.weight,
    )  # fmt: skip


def _names(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
