"""Order of tokenizer jobs: fair by tenant, and by due time within a tenant.

    due_s = arrival_s + size_bytes / BYTES_PER_S

A short job passes longer ones until these are due. Tenants are served by start-time fair queueing:
the next tenant is the one that was served the fewest bytes, and a tenant that was idle gets no
credit for that time. Decides without a clock and without threads.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

BYTES_PER_S = 1_000_000.0
MAX_TENANTS = 4096


class Sized(Protocol):
    """A job: its tenant, when it is due, and if its client has left."""

    tenant: bytes
    due_s: float

    @property
    def abandoned(self) -> bool: ...


S = TypeVar("S", bound=Sized)


def due_s(arrival_s: float, size_bytes: int) -> float:
    """Return when a job of `size_bytes` is due; short ones are due sooner."""
    return arrival_s + size_bytes / BYTES_PER_S


class Shares:
    """Bytes that each tenant was served, in a virtual time that all queues share.

    A tenant is forgotten once it is behind the virtual time and there are more than MAX_TENANTS.
    """

    def __init__(self) -> None:
        self._served: dict[bytes, float] = {}
        self._virtual = 0.0

    def of(self, tenant: bytes) -> float:
        """Return the virtual time at which the tenant is served next."""
        return self._served.get(tenant, self._virtual)

    def arrive(self, tenant: bytes) -> None:
        """Give no credit for the time in which the tenant had no job."""
        self._served[tenant] = max(self.of(tenant), self._virtual)
        if len(self._served) > MAX_TENANTS:
            behind = [name for name, served in self._served.items() if served <= self._virtual]
            for name in behind or [min(self._served, key=self._served.__getitem__)]:
                del self._served[name]

    def start(self, tenant: bytes) -> None:
        """Advance the virtual time to that of the tenant, which is served now."""
        self._virtual = max(self._virtual, self.of(tenant))

    def charge(self, tenant: bytes, size_bytes: int) -> None:
        """Add bytes that the tenant was served."""
        self._served[tenant] = self.of(tenant) + size_bytes


class FairQueue(Generic[S]):
    """Waiting jobs of all tenants; abandoned ones are dropped when they are next."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._jobs: dict[bytes, list[tuple[float, int, S]]] = {}
        self._tenants: list[tuple[float, float, int, bytes]] = []
        self._entries: dict[bytes, int] = {}
        self._count = 0

    def put(self, job: S) -> None:
        """Add a job."""
        self._shares.arrive(job.tenant)
        jobs = self._jobs.setdefault(job.tenant, [])
        self._count += 1
        heapq.heappush(jobs, (job.due_s, self._count, job))
        if jobs[0][2] is job:
            self._enter(job.tenant)

    def peek(self) -> S | None:
        """Return the next job without removing it; None if there is none."""
        while self._tenants:
            share, due, number, tenant = self._tenants[0]
            jobs = self._jobs.get(tenant, [])
            while jobs and jobs[0][2].abandoned:
                heapq.heappop(jobs)
            latest = self._entries.get(tenant) == number
            if latest and jobs and (self._shares.of(tenant), jobs[0][0]) == (share, due):
                return jobs[0][2]
            heapq.heappop(self._tenants)
            if latest and jobs:
                self._enter(tenant)
            elif latest:
                del self._jobs[tenant], self._entries[tenant]
        return None

    def take(self, fits: Callable[[S], bool] | None = None) -> S | None:
        """Remove and return the next job; None if there is none, or if it does not fit."""
        job = self.peek()
        if job is None or (fits is not None and not fits(job)):
            return None
        heapq.heappop(self._jobs[job.tenant])
        return job

    def drain(self) -> list[S]:
        """Remove and return all jobs."""
        jobs = [entry[2] for entries in self._jobs.values() for entry in entries]
        self._jobs.clear()
        self._entries.clear()
        self._tenants.clear()
        return jobs

    def _enter(self, tenant: bytes) -> None:
        """Enter the tenant's next job in the order of tenants; the last entry counts."""
        self._count += 1
        self._entries[tenant] = self._count
        entry = (self._shares.of(tenant), self._jobs[tenant][0][0], self._count, tenant)
        heapq.heappush(self._tenants, entry)
