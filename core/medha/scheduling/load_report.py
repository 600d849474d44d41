"""The Load that a replica reports to routers, by which they place and admit requests.

Margins are those of each group. While promises span groups they are the least of all, as one list:
what delays one of its groups delays such a promise.
"""

from __future__ import annotations

import numpy as np

from medha.messages.fields import GroupMargins, Load
from medha.scheduling.interface import Ahead
from medha.scheduling.native import WorkSums
from medha.scheduling.prefill_admission import DecodeAccount, PrefillAdmission
from medha.scheduling.state import SchedulerState
from medha.tenants import TenantWork

BANDS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 1e9)
MARGINS = 256


def report(
    state: SchedulerState,
    account: DecodeAccount,
    admission: PrefillAdmission,
    predicted_tpot_s: float,
    wanted_groups: int,
    promised_work: tuple[TenantWork, ...],
    now: float,
) -> Load:
    """Summarise all groups in a few numbers and two short lists."""
    queues, promises, pool = state.queues.by_group, state.promises, state.pool
    running = sorted(queues)
    groups = range(max(running) + 1) if running else range(0)
    sums = work_sums(state, now)
    waiting, prefilling = _counts(state, sums)
    best = min(running, key=lambda group: (sums[group].pending_s, group), default=None)
    before = ahead(state, sums, now)
    margins, lead_s = _all_margins(state, account, running, now)
    return Load(
        margins=margins,
        lead_s=lead_s,
        pending_bands=_bands(sums),
        pending_s=sum(group_sums.pending_s for group_sums in sums.values()),
        relegated_s=sum(group_sums.relegated_s for group_sums in sums.values()),
        ahead_s=before.ahead_s,
        relegated_ahead_s=before.relegated_ahead_s,
        waiting=waiting,
        prefilling=prefilling,
        decoding=len(state.running),
        free_pages=tuple(
            admission.free_pages(group, now) if group in running else -1 for group in groups
        ),
        total_pages=tuple(pool[group].total if group in running else -1 for group in groups),
        claimable_pages=max(0, pool.claimable),
        page_tokens=pool.page_tokens,
        share=1.0 / (promises.full_cost_s(1.0) - promises.full_cost_s(0.0)),
        budget_s=account.budget_s,
        decode_capacity_s=account.capacity_s,
        decode_room_s=account.room_s(),
        free_places=admission.free_places,
        decode_parts=account.promise_parts(now, spans=False) if running else (),
        spanning_parts=account.promise_parts(now, spans=True) if running else (),
        long_factor=1.0 if best is None else promises.widened(promises.coming(best, now)),
        predicted_tpot_s=predicted_tpot_s,
        drain_s_per_s=float(len(running) or 1),
        wanted_groups=wanted_groups,
        promised_work=promised_work,
    )


def ahead(state: SchedulerState, sums: dict[int, WorkSums], now: float) -> Ahead:
    """Return the time before a most urgent new request starts, and before a relegated one.

    Stage 0's rest, then short prompts: relegated prompts run after all that are kept, and long ones
    are preempted between chunks, so that neither is before it.
    """
    kept_s = [
        state.in_flight.free_in_s(group, now) + group_sums.kept_short_s
        for group, group_sums in sums.items()
    ]
    relegated_s = [group_sums.relegated_short_s for group_sums in sums.values()]
    return Ahead(min(kept_s, default=0.0), min(relegated_s, default=0.0))


def work_sums(state: SchedulerState, now: float) -> dict[int, WorkSums]:
    """Return the sums of each group's work. All is kept under a policy without promises."""
    promises, queues = state.promises, state.queues.by_group
    short_s, all_kept = 8.0 * promises.longest_s, not promises.promising
    return {
        group: queues[group].rows.sums(now, short_s, BANDS, all_kept) for group in sorted(queues)
    }


def _counts(state: SchedulerState, sums: dict[int, WorkSums]) -> tuple[int, int]:
    """Return (prompts not started, prompts in progress), each counted once.

    A row in need of pages is of a prompt of one group that has not started: most are. A row without
    need has started, unless its prompt has several groups.
    """
    waiting = sum(group_sums.needy for group_sums in sums.values())
    if not state.groups.shared:
        return waiting, sum(map(len, state.queues.by_group.values())) - waiting
    started: dict[int, bool] = {}
    for queue in state.queues.by_group.values():
        for row in (queue.need <= 0.0).nonzero()[0].tolist():
            sequence = queue.sequences[row]
            started[sequence.number] = sequence.started
    in_progress = sum(started.values())
    return waiting + len(started) - in_progress, in_progress


def _all_margins(
    state: SchedulerState, account: DecodeAccount, running: list[int], now: float
) -> tuple[tuple[GroupMargins, ...], tuple[float, ...]]:
    """Return the margins of each group, and the seconds until a newcomer waits for no batch.

    It leaves at least `least_drain_s` for what is behind stage 0.
    """
    lead_s = [state.in_flight.lead_s(group, now, account.budget_s) for group in running]
    drain_s = state.promises.least_drain_s
    clear_s = [state.in_flight.clear_s(group, now, drain_s) for group in running]
    margins = [
        _margins(state, account, group, group_lead_s, now, MARGINS // len(running))
        for group, group_lead_s in zip(running, lead_s, strict=True)
    ]
    if len(running) > 1 and _promises_span(state):
        return (_least_margins(margins),), (max(clear_s),)
    return tuple(tuple(group) for group in margins), tuple(clear_s)


def _promises_span(state: SchedulerState) -> bool:
    """Return whether a promised prompt works in several groups."""
    return any(
        sequence.promised and len(sequence.assigned_groups) > 1 and not sequence.decoding
        for sequence in state.groups.shared.values()
    )


def _margins(
    state: SchedulerState,
    account: DecodeAccount,
    group: int,
    lead_s: float,
    now: float,
    most: int,
) -> list[tuple[float, float]]:
    """Return (due in, margin) of a group's promises, from now.

    Runs of promises are one if there are too many, as if all their work were due with the first,
    so that nothing is lost.
    """
    promises = state.promises
    account.try_nothing(group, now)
    return promises.margins(group, now + lead_s, max(1, most), lead_s + promises.behind_s(group))


def _least_margins(by_group: list[list[tuple[float, float]]]) -> GroupMargins:
    """Return (due in, margin) by deadline: at each the least of all groups."""
    pairs_by_group = [np.array(pairs).reshape(-1, 2).T for pairs in by_group]
    due_in = np.unique(np.concatenate([due_s for due_s, _ in pairs_by_group]))
    margins = np.full(len(due_in), np.inf)
    for due_s, left_s in pairs_by_group:
        taken_s = np.concatenate([[0.0], np.subtract(due_s, left_s)])
        margins = np.minimum(margins, due_in - taken_s[np.searchsorted(due_s, due_in, "right")])
    return tuple(zip(due_in.tolist(), margins.tolist(), strict=True))


def _bands(sums: dict[int, WorkSums]) -> tuple[tuple[float, float], ...]:
    """Return (up to, seconds) of prefill work by relative slack, without empty bands."""
    bands: list[tuple[float, float]] = []
    for place, upto in enumerate(BANDS):
        seconds = 0.0
        for group_sums in sums.values():
            seconds += group_sums.bands[place]
        if seconds > 0.0:
            bands.append((upto, seconds))
    return tuple(bands)
