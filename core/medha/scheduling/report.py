"""What a replica tells the routers of its work: the Load by which they place and admit.

Margins are those of the group where a newcomer would go: the one with the least pending work.
"""

from __future__ import annotations

import numpy as np

from medha.messages.fields import Load
from medha.scheduling.decodes import Decodes
from medha.scheduling.growth import Groups
from medha.scheduling.inflight import Flights
from medha.scheduling.ledger import Ledger
from medha.scheduling.outlook import Outlook
from medha.scheduling.packer import Packer

BANDS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 1e9)
MARGINS = 256


def report(
    groups: Groups, ledger: Ledger, flights: Flights, decodes: Decodes, packer: Packer,
    outlook: Outlook, wanted_groups: int, now: float,
) -> Load:  # fmt: skip
    """The state of all groups, in a few numbers and two short lists."""
    running = sorted(groups.generation)
    pool = groups.pool
    pages = range(max(running) + 1) if running else range(0)
    waiting, prefilling = _counts(groups)
    pending = {group: groups.pending_s(group) for group in running}
    best = min(running, key=lambda one: (pending[one], one), default=None)
    share = given = 1.0
    if best is not None:
        given = outlook.given()[best]
        share = 1.0 / (ledger.full_cost_s(1.0, given) - ledger.full_cost_s(0.0, given))
    return Load(
        margins=() if best is None else _margins(ledger, flights, best, given, now),
        pending_bands=_bands(groups, running, now),
        pending_s=sum(pending.values()),
        relegated_s=sum(_relegated_s(groups, ledger, group) for group in running),
        ahead_s=min((_ahead_s(groups, ledger, flights, one, now) for one in running), default=0.0),
        waiting=waiting,
        prefilling=prefilling,
        decoding=len(decodes),
        free_pages=tuple(pool[one].available if one in groups else -1 for one in pages),
        total_pages=tuple(pool[one].total if one in groups else -1 for one in pages),
        claimable_pages=max(0, pool.claimable),
        page_tokens=pool.page_tokens,
        share=share,  # of time, for prefills that hold a promise
        predicted_tpot_s=packer.decode_tpot_s(),
        drain_s_per_s=sum(ledger.share[group] for group in running) or 1.0,
        wanted_groups=wanted_groups,
    )  # fmt: skip


def _counts(groups: Groups) -> tuple[int, int]:
    """(prompts that have not begun, prompts under way), each once."""
    begun: dict[int, bool] = {}
    for waiting in groups.waiting.values():
        for sequence in waiting.sequences:
            begun[sequence.number] = sequence.started
    under_way = sum(begun.values())
    return len(begun) - under_way, under_way


def _margins(
    ledger: Ledger, flights: Flights, group: int, share: float, now: float
) -> tuple[tuple[float, float], ...]:
    """(due in, margin) from now, thinned to the tightest where there are too many."""
    lead = flights.free_in_s(group, now)
    due_in, margins = ledger.margins(group, now + lead, share)
    if len(margins) > MARGINS:
        keep = np.sort(np.argpartition(margins, MARGINS)[:MARGINS])
        due_in, margins = due_in[keep], margins[keep]
    return tuple(zip((due_in + lead + ledger.drain_s).tolist(), margins.tolist(), strict=True))


def _bands(groups: Groups, running: list[int], now: float) -> tuple[tuple[float, float], ...]:
    """Seconds of prefill work by relative slack: (up to, seconds), bands without work left out."""
    sums = np.zeros(len(BANDS))
    for group in running:
        waiting = groups.waiting[group]
        if len(waiting):
            rho = (waiting.due_s - now - waiting.work_s) / waiting.norm_s
            band = np.minimum(np.searchsorted(BANDS, rho), len(BANDS) - 1)
            sums += np.bincount(band, weights=waiting.work_s, minlength=len(BANDS))
    return tuple(
        (upto, seconds) for upto, seconds in zip(BANDS, sums.tolist(), strict=True) if seconds > 0.0
    )


def _relegated_s(groups: Groups, ledger: Ledger, group: int) -> float:
    if not ledger.promising:
        return 0.0
    waiting = groups.waiting[group]
    return float(waiting.work_s[~waiting.kept].sum())


def _ahead_s(groups: Groups, ledger: Ledger, flights: Flights, group: int, now: float) -> float:
    """Work that would run before a most urgent newcomer: stage 0's rest, then the short ones.

    Long ones are preempted between chunks, so they close nothing, not even when little is left.
    """
    waiting = groups.waiting[group]
    short = waiting.work_s[waiting.norm_s <= 8.0 * ledger.longest_s]
    return flights.free_in_s(group, now) + float(short.sum()) / ledger.share[group]
