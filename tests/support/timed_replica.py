"""A replica with the real scheduler and no model.

    python -m tests.support.timed_replica ADDRESS FOLDER [--policy edf]

Grants heads and decides batches as a controller does. A batch takes the time that its predictor
says on the wall clock, on a machine slow enough for a load generator to overrun.
"""

from __future__ import annotations

import argparse
import pathlib
import time

import msgspec
from tests.support.instant_replica import PAGE_TOKENS, InstantReplica

from medha import testing
from medha.batch import Batch, BatchResult, Sampled
from medha.config import Scheduling
from medha.errors import Refusal
from medha.fleet.dispatcher import split_names
from medha.fleet.grants import GrantQueue
from medha.messages import (
    Abort,
    Accepted,
    Failed,
    Finished,
    Heads,
    RouterMessage,
    Submit,
    Tokens,
)
from medha.predictor import Predictor
from medha.request import Slo, SloClass
from medha.scheduling.scheduler import Scheduler

TOKEN_S, BATCH_S = 1e-4, 2e-3
TTFT_S, TPOT_S = 1.0, 0.2
CLASSES = (SloClass(slo=Slo(ttft_floor_s=TTFT_S, tpot_s=TPOT_S)),)
PAGES, MAX_TOKENS = 4096, 1 << 16
REPORT_S = 0.02


class TimedReplica(InstantReplica):
    """A replica of one group on a machine of TOKEN_S per row and BATCH_S per batch."""

    def __init__(self, address: str, folder: pathlib.Path, name: str, policy: str) -> None:
        super().__init__(address, folder, name, REPORT_S)
        profile = testing.profile(TOKEN_S, 0.0, BATCH_S)
        shape = msgspec.structs.replace(testing.shape(), vocab=self._hello.shape.vocab)
        layout, settings = testing.topology(), Scheduling(policy=policy, prefix_cache=False)
        self._hello = msgspec.structs.replace(
            self._hello,
            shape=shape,
            topology=layout,
            max_context_tokens=MAX_TOKENS,
            classes=CLASSES,
            profile=msgspec.json.encode(profile),
            max_batch_s=settings.max_batch_s,
            min_batch_s=settings.min_batch_s,
            order=settings.queue_order,
        )
        self._scheduler = Scheduler(
            layout,
            shape,
            Predictor(profile, shape, layout, settings.max_batch_s),
            settings,
            PAGES,
            PAGE_TOKENS,
            MAX_TOKENS,
            CLASSES,
        )
        self._scheduler.group_joined(0, 1, time.monotonic())
        window_s = settings.dispatch_budgets * settings.max_batch_s
        self._grants = GrantQueue(window_s, settings.queue_order)
        # By sequence: its tokens so far, and its router.
        self._live: dict[int, tuple[Submit, int, str]] = {}
        self._batch: tuple[Batch, float] | None = None

    def run(self) -> None:
        """Serve until the process is ended."""
        report_s = time.monotonic()
        while True:
            now = time.monotonic()
            due_s = report_s if self._batch is None else min(report_s, self._batch[1])
            self._receive(max(0.0, due_s - now))
            now = time.monotonic()
            if self._batch is not None and now >= self._batch[1]:
                self._complete(self._batch[0], now)
            for router, early in self._grants.begin(self._scheduler.load(now), now):
                self._admit(router, early, now)
            for router, grant in self._grants.grant(self._scheduler.load(now), now).items():
                self._links[router].send(grant)
            if self._batch is None and (batch := self._scheduler.next_batch(now, frozenset({0}))):
                self._batch = batch, now + batch.predicted_s
            if now >= report_s:
                report_s = now + REPORT_S
                self._report(self._scheduler.load(now), now)

    def _take(self, router: str, message: RouterMessage) -> None:
        now = time.monotonic()
        match message:
            case Heads():
                self._grants.heads(router, message.heads, now, message.submits)
            case Submit():
                self._grants.submitted(message.id, now)
                self._admit(router, message, now)
            case Abort(id=name):
                self._scheduler.abort(name, now)
            case _:
                super()._take(router, message)

    def _admit(self, router: str, submit: Submit, now: float) -> None:
        try:
            admitted = self._scheduler.submit(submit.request(now), now, split_names(submit.hashes))
        except Refusal as refusal:
            self._links[router].send(Failed(submit.id, refusal.code, str(refusal)))
            return
        self._live[admitted.seq] = submit, 0, router
        accepted = Accepted(submit.id, admitted.cached_tokens, admitted.predicted_ttft_s)
        self._links[router].send(accepted)

    def _complete(self, batch: Batch, now: float) -> None:
        """End a batch: send its tokens and the ends of its sequences."""
        self._batch = None
        self._scheduler.stage_done(batch.number, 0, now)
        seqs = [chunk.seq for chunk in batch.chunks if chunk.yields]
        result = BatchResult(tuple(Sampled(seq, False) for seq in seqs), batch.predicted_s)
        completed = self._scheduler.complete(batch.number, result, now)
        for seq in seqs:
            if seq in self._live:
                submit, emitted, router = self._live[seq]
                word = self._words[emitted % len(self._words)]
                self._links[router].send(Tokens(submit.id, emitted, (word,)))
                self._live[seq] = submit, emitted + 1, router
        for ended in completed:
            if ended.seq in self._live:
                _, _, router = self._live.pop(ended.seq)
                finished = Finished(
                    ended.request_id, ended.reason, ended.prompt_tokens, ended.output_tokens
                )
                self._links[router].send(finished)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--policy", default="lars")
    given = parser.parse_args()
    TimedReplica(given.address, given.folder, "r0", given.policy).run()


if __name__ == "__main__":
    main()
