"""The state of one replica's scheduler, made once and shared by everything that decides.

Each part owns its fields; others change them through its methods. Settings, topology and predictor
are part of it, so that a decider needs nothing else.
"""

from __future__ import annotations

from medha.config import Scheduling
from medha.predictor import Predictor
from medha.prefill_times import PrefillTimes
from medha.scheduling.block_pool import BlockPool
from medha.scheduling.kv_groups import KvGroups
from medha.scheduling.promises import PromiseSet
from medha.scheduling.running import InFlightBatches, RunningDecodes
from medha.scheduling.sequence import Sequence
from medha.scheduling.waiting_queue import WaitingQueues
from medha.topology import Topology


class SchedulerState:
    """The parts, and the sequences by number and by request id.

    `unassigned`: sequences that wait for any group to run. `generation`: generation of the KVP
    columns that shared chunks use; `columns_ready`: shared chunks can run now. `relegates`: a class
    accepts requests without a promise.
    """

    def __init__(
        self,
        topology: Topology,
        predictor: Predictor,
        settings: Scheduling,
        pool: BlockPool,
        *,
        relegates: bool,
    ) -> None:
        self.topology, self.predictor, self.settings = topology, predictor, settings
        self.pool = pool
        times = PrefillTimes(predictor, settings.max_batch_s, 0.0)  # nothing decodes yet
        self.queues = WaitingQueues(pool, times, settings.output_reserve)
        self.groups = KvGroups(pool, self.queues, ranked=settings.policy == "lars")
        self.running = RunningDecodes(pool.kept.window_tokens)
        self.in_flight = InFlightBatches(topology.spp)
        self.promises = PromiseSet(
            settings, self.groups, predictor, topology.spp, relegates=relegates
        )
        self.sequences: dict[int, Sequence] = {}
        self.by_id: dict[str, Sequence] = {}
        self.unassigned: dict[int, Sequence] = {}
        self.generation = 0
        self.columns_ready = True
        self._next_number = 1

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.number] = sequence
        self.by_id[sequence.id] = sequence

    def next_number(self) -> int:
        """Return the number of a new sequence."""
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def take_unassigned(self) -> list[Sequence]:
        unassigned, self.unassigned = self.unassigned, {}
        return [*unassigned.values()]

    def set_generation(self, generation: int, *, columns_ready: bool) -> None:
        self.generation, self.columns_ready = generation, columns_ready
