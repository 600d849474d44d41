"""Every request that lives in this router, and how each may end.

Keeps answers and their runs, and carries out what was decided about one: released by its replica,
withdrawn, resumed elsewhere with what it has emitted, finished, failed, cancelled, expired. A run
is in exactly one place: waiting in its model's dispatch, or sent to one replica.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from medha.errors import MedhaError, Refusal, RequestError
from medha.messages import Abort, RouterMessage
from medha_router.faults import StreamBroken
from medha_router.fleet import Fleet, Replica
from medha_router.metering import Meter
from medha_router.models import ServedModel
from medha_router.runs import MAX_MOVES, POISON_DEATHS, Answer, Run

Send = Callable[[bytes, RouterMessage], bool]


class Ledger:
    """Answers and runs by id. `send` puts a message on the link and says whether it could;
    `changed` is called when heads may have to be published anew."""

    def __init__(
        self, models: Mapping[str, ServedModel], fleet: Fleet, meter: Meter, send: Send,
        changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._models, self._fleet, self._meter = models, fleet, meter
        self._send, self.changed = send, changed
        self._log = logging.getLogger("medha.router")
        self._answers: dict[str, Answer] = {}
        self._runs: dict[str, Run] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: Answer) -> None:
        """An answer whose runs all wait in their dispatch."""
        self._answers[answer.id] = answer
        self._runs.update({run.id: run for run in answer.runs})
        self.changed()

    def sent_to(self, replica: Replica) -> list[Run]:
        """The runs that a replica serves."""
        runs = [self._runs.get(each) for each in sorted(replica.sent)]
        return [run for run in runs if run is not None and run.peer == replica.peer]

    def run_at(self, replica: Replica, id: str) -> Run | None:
        """The run if it is served there; a replica that serves what nobody wants is told so."""
        run = self._runs.get(id)
        if run is None or run.peer != replica.peer:
            self._send(replica.peer, Abort(id))
            return None
        return run

    def release(self, run: Run, now: float) -> None:
        """No replica holds the run any more, and it does not wait."""
        replica = self._fleet.get(run.peer) if run.peer is not None else None
        if replica is not None:
            replica.sent.discard(run.id)
        self._of(run.answer).dispatch.drop(run.id, replica.name if replica else None, now)
        run.peer = None

    def withdraw(self, run: Run, now: float) -> None:
        """Stop a run wherever it is."""
        if run.peer is not None:
            self._send(run.peer, Abort(run.id))
        self.release(run, now)
        self._runs.pop(run.id, None)

    def again(self, run: Run, now: float, *, died: bool = False) -> None:
        """The run lost its replica, which may have `died`: let another go on, within limits."""
        self.release(run, now)
        run.moves += 1
        run.deaths += died
        if run.deaths >= POISON_DEATHS or run.moves > MAX_MOVES:
            self.fail(run.answer, _given_up(run), now)
            return
        self._meter.moved(run)
        run.waiting_since_s = now
        self._of(run.answer).dispatch.resume(run, now)
        self.changed()

    def finish(self, run: Run, now: float) -> None:
        """The run has all its tokens; its answer is over with the last of its runs."""
        run.done = True
        self._runs.pop(run.id, None)
        self._meter.finished(run, now)
        answer = run.answer
        if answer.done and self._answers.pop(answer.id, None) is not None:
            self._log.info("finished with %d tokens", answer.output_tokens,
                           extra={"fields": {"request": answer.id}})  # fmt: skip

    def fail(self, answer: Answer, error: MedhaError, now: float) -> None:
        """The answer ends with an error, all its runs with it. Twice is once."""
        if self._end(answer, now):
            self._meter.failed(answer, error, now)
            # The message of a RequestError may show what the client sent.
            told = error.code if isinstance(error, RequestError) else error
            self._log.warning("failed: %s", told, extra={"fields": {"request": answer.id}})
            answer.fail(error)

    def cancel(self, answer: Answer, now: float) -> None:
        """The client left: free everything that its runs hold. Twice is once."""
        if self._end(answer, now):
            self._meter.cancelled(answer)
            self._log.info("cancelled: the client left", extra={"fields": {"request": answer.id}})

    def expire(self, now: float, queue_timeout_s: float, no_replica_timeout_s: float) -> None:
        """End what waited too long for a replica, or for room: the time of the one is not time of
        the other. Where none is left, requests are held as long as those that come to none."""
        for answer in list(self._answers.values()):
            waiting = [run for run in answer.runs if run.peer is None and not run.done]
            if not waiting:
                continue
            model = self._of(answer)
            answer.held = answer.held or not model.ready
            since_s = min(run.waiting_since_s for run in waiting)
            waited_s = now - max(since_s, model.turned_s)
            if not all(model.serves(run.edition) for run in waiting):
                if waited_s <= model.patience_s(no_replica_timeout_s):
                    continue
                error = Refusal("no_replica", "the replicas of this model are gone: retry later",
                                retry_after_s=5.0)  # fmt: skip
            elif waited_s > max(queue_timeout_s, answer.promise_s or 0.0):
                error = Refusal("overloaded", f"waited {waited_s:.0f} s for room: retry later",
                                retry_after_s=model.dispatch.retry_after_s())  # fmt: skip
            else:
                continue
            self._meter.refused(model.name, answer.slo_class.name, error.code, now)
            self.fail(answer, error, now)

    def _end(self, answer: Answer, now: float) -> bool:
        if self._answers.pop(answer.id, None) is None:
            return False
        for run in answer.runs:
            if not run.done:
                self.withdraw(run, now)
        self.changed()
        return True

    def _of(self, answer: Answer) -> ServedModel:
        return self._models[answer.ask.model]


def _given_up(run: Run) -> StreamBroken:
    """Why a run is not tried on one more replica."""
    if run.deaths >= POISON_DEATHS:
        return StreamBroken(
            "poison_request",
            f"{run.deaths} replicas died while they served this request; it is not tried again",
        )
    return StreamBroken(
        "replica_failed", f"the request was tried {run.moves} times and could not be finished"
    )
