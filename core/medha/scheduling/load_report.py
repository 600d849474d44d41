"""The Load that a replica reports to routers, by which they place and admit requests.

Margins are those of the group where a new request would go: the one with the least pending work.
"""

from __future__ import annotations

import numpy as np

from medha.messages.fields import Load
from medha.scheduling.prefill_admission import DecodeAccount
from medha.scheduling.promises import PromiseSet
from medha.scheduling.state import SchedulerState
from medha.scheduling.waiting_queue import WaitingQueue
from medha.tenants import TenantWork

BANDS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 1e9)
MARGINS = 256


def report(
    state: SchedulerState,
    account: DecodeAccount,
    predicted_tpot_s: float,
    wanted_groups: int,
    promised_work: tuple[TenantWork, ...],
    now: float,
) -> Load:
    """Summarise all groups in a few numbers and two short lists."""
    queues, promises, pool = state.queues, state.promises, state.pool
    running = sorted(queues.by_group)
    groups = range(max(running) + 1) if running else range(0)
    waiting, prefilling = _counts(queues.by_group)
    pending = {group: queues.pending_s(group) for group in running}
    best = min(running, key=lambda group: (pending[group], group), default=None)
    alongside = 0.0 if best is None else account.promise_part()
    return Load(
        margins=() if best is None else _margins(state, best, alongside, now),
        pending_bands=_bands([queues.by_group[group] for group in running], now),
        pending_s=sum(pending.values()),
        relegated_s=sum(_relegated_s(promises, queues.by_group[group]) for group in running),
        ahead_s=min((_ahead_s(state, group, now) for group in running), default=0.0),
        relegated_ahead_s=min((_short_s(state, group, False) for group in running), default=0.0),
        waiting=waiting,
        prefilling=prefilling,
        decoding=len(state.running),
        free_pages=tuple(pool[group].available if group in running else -1 for group in groups),
        total_pages=tuple(pool[group].total if group in running else -1 for group in groups),
        claimable_pages=max(0, pool.claimable),
        page_tokens=pool.page_tokens,
        share=1.0 / (promises.full_cost_s(1.0) - promises.full_cost_s(0.0)),
        budget_s=account.budget_s,
        decode_capacity_s=account.capacity_s,
        decode_room_s=account.room_s(),
        decode_part=alongside,
        long_factor=1.0 if best is None else promises.widened(promises.coming(best, now)),
        predicted_tpot_s=predicted_tpot_s,
        drain_s_per_s=float(len(running) or 1),
        wanted_groups=wanted_groups,
        promised_work=promised_work,
    )


def _counts(queues: dict[int, WaitingQueue]) -> tuple[int, int]:
    """Return (prompts not started, prompts in progress), each counted once.

    A row in need of pages is of a prompt of one group that has not started: most are.
    """
    waiting = 0
    started: dict[int, bool] = {}
    for queue in queues.values():
        others = (queue.need <= 0.0).nonzero()[0].tolist()
        waiting += len(queue) - len(others)
        for row in others:
            sequence = queue.sequences[row]
            started[sequence.number] = sequence.started
    in_progress = sum(started.values())
    return waiting + len(started) - in_progress, in_progress


def _margins(
    state: SchedulerState, group: int, part: float, now: float
) -> tuple[tuple[float, float], ...]:
    """Return (due in, margin) from now; runs of promises as one if there are too many.

    A run counts as if all its work were due with its first promise, so that nothing is lost.
    """
    promises, lead = state.promises, state.in_flight.free_in_s(group, now)
    queue = state.queues.by_group[group]
    work_s = queue.work_alongside(np.maximum(queue.alongside, part))
    due_in, margins = promises.margins(group, now + lead, work_s)
    if len(margins) > MARGINS:
        starts = np.linspace(0, len(margins), MARGINS, endpoint=False).astype(np.intp)
        ends = np.append(starts[1:], len(margins)) - 1
        margins = due_in[starts] - (due_in[ends] - margins[ends])
        due_in = due_in[starts]
    return tuple(zip((due_in + lead + promises.drain_s).tolist(), margins.tolist(), strict=True))


def _bands(queues: list[WaitingQueue], now: float) -> tuple[tuple[float, float], ...]:
    """Return (up to, seconds) of prefill work by relative slack, without empty bands."""
    sums = np.zeros(len(BANDS))
    for queue in queues:
        if len(queue):
            rho = (queue.due_s - now - queue.work_s) / queue.norm_s
            band = np.minimum(np.searchsorted(BANDS, rho), len(BANDS) - 1)
            sums += np.bincount(band, weights=queue.work_s, minlength=len(BANDS))
    return tuple(
        (upto, seconds) for upto, seconds in zip(BANDS, sums.tolist(), strict=True) if seconds > 0.0
    )


def _relegated_s(promises: PromiseSet, queue: WaitingQueue) -> float:
    if not promises.promising:
        return 0.0
    return float(queue.work_s[~queue.kept].sum())


def _ahead_s(state: SchedulerState, group: int, now: float) -> float:
    """Return the time before a most urgent new request starts: stage 0's rest, then short prompts.

    Relegated prompts run after all that are kept, and long ones are preempted between chunks, so
    that neither is before it.
    """
    return state.in_flight.free_in_s(group, now) + _short_s(state, group, True)


def _short_s(state: SchedulerState, group: int, kept: bool) -> float:
    """Return the time for the short prompts that are kept, or for the relegated ones.

    All are kept under a policy without promises.
    """
    queue, promises = state.queues.by_group[group], state.promises
    short = queue.norm_s <= 8.0 * promises.longest_s
    if promises.promising:
        short &= queue.kept == kept
    elif not kept:
        return 0.0
    return float(queue.work_s[short].sum())
