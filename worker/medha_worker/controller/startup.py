"""From the first generation to the first Hello: measure this machine, make the scheduler.

With a given profile there is nothing to measure; else the warm-up's batches run through one group
and the profile is fitted to their times. Its batches took the first numbers, so the scheduler's are
shifted by as many on the wire.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from medha.calibration import fit
from medha.config import WorkerConfig
from medha.messages import Hello
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import Profile, encode, guess_for
from medha_worker.controller.decider import Decider
from medha_worker.controller.flights import Flights
from medha_worker.controller.membership import Membership
from medha_worker.controller.warmup import Warmup

WARMUP_S = 3.0

MakeScheduler = Callable[[Profile, int], tuple[Decider, Predictor]]
"""(profile, pages per group) -> a scheduler whose groups are all absent, and its predictor."""

log = logging.getLogger("medha.controller")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this replica is: what Hello says beside the config.

    `files`: name -> bytes of tokenizer and generation files; `hashes`: name -> blake2b-128 hex.
    `checkpoint`: which weights these are, see `medha_worker.model.files`.
    """

    incarnation: str
    shape: ModelShape
    files: dict[str, bytes]
    hashes: dict[str, str]
    checkpoint: str = ""
    stop_tokens: tuple[int, ...] = ()


class Startup:
    """Gets a profile once the base groups run; `profile` is None until then."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: Identity,
        flights: Flights,
        membership: Membership,
        profile: Profile | None,
    ) -> None:
        self._config, self._identity = config, identity
        self._flights, self._membership = flights, membership
        self._warmup: Warmup | None = None
        self.profile = profile

    @property
    def pages(self) -> int:
        """KV pages that every running group can hold."""
        most = min((self._membership.pages(g) for g in self._membership.running), default=0)
        return min(self._config.kv_pages or most, most)

    def begin(self) -> None:
        """The base groups run: start to measure, unless that is under way or done."""
        if self.profile is not None or self._warmup is not None:
            return
        config = self._config
        self._warmup = Warmup(
            group=self._membership.running[0],
            spp=config.topology.spp,
            pages=self.pages,
            page_tokens=config.page_tokens,
            max_context_tokens=config.max_context_tokens,
            vocab=self._identity.shape.vocab,
            budget_s=WARMUP_S,
        )

    def lost(self, group: int) -> None:
        """A group is gone; if it was being measured, that begins anew when it is back."""
        self._flights.lose(group)
        if self._warmup is not None and self._warmup.group == group:
            self._warmup = None

    def advance(self, now: float) -> None:
        """Run the warm-up's batches; fits the profile when the last one is done."""
        warmup = self._warmup
        if warmup is None:
            return
        for flight in self._flights.finished():
            if not flight.void:
                warmup.done(flight.batch.number, max(flight.elapsed_s))
        while not self._flights.queued(warmup.group):
            batch = warmup.next(now)
            if batch is None:
                break
            self._flights.launch(batch, warmup, lambda _: (), (), now)
        if warmup.finished:
            self._warmup = None
            self._flights.offset = warmup.number
            self._flights.forget(warmup.seqs)
            shape, topology = self._identity.shape, self._config.topology
            name = f"warm-up-{self._config.device}"
            guess = guess_for(self._config.device)
            self.profile = fit(warmup.samples, shape, topology, guess, name)
            fields = {"batches": warmup.number, "error": round(self.profile.error, 4)}
            log.info("measured a profile", extra={"fields": fields})

    def hello(self, profile: Profile, draining: bool) -> Hello:
        """How this replica introduces itself to routers."""
        config, identity, settings = self._config, self._identity, self._config.scheduling
        return Hello(
            replica=config.replica,
            incarnation=identity.incarnation,
            model=config.model,
            shape=identity.shape,
            topology=config.topology,
            page_tokens=config.page_tokens,
            max_context_tokens=config.max_context_tokens,
            classes=config.classes,
            profile=encode(profile),
            files=identity.hashes,
            checkpoint=identity.checkpoint,
            stop_tokens=identity.stop_tokens,
            max_batch_s=settings.max_batch_s,
            min_batch_s=settings.min_batch_s,
            draining=draining,
        )
