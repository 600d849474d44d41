"""Order of tokenizer jobs: fair by tenant, short before long, none starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from medha_router.tokenization import fair_queue
from medha_router.tokenization.fair_queue import FairQueue, Shares, due_s


class Job:
    def __init__(self, tenant: str, size_bytes: int, arrival_s: float = 0.0) -> None:
        self.tenant, self.size_bytes = tenant.encode(), size_bytes
        self.due_s = due_s(arrival_s, size_bytes)
        self.abandoned = False


def serve(queue: FairQueue[Job], shares: Shares, count: int) -> list[Job]:
    """Take and charge `count` jobs."""
    served: list[Job] = []
    while len(served) < count and (job := queue.take()) is not None:
        shares.start(job.tenant)
        shares.charge(job.tenant, job.size_bytes)
        served.append(job)
    return served


def test_a_short_job_passes_longer_ones_until_they_are_due() -> None:
    shares = Shares()
    queue: FairQueue[Job] = FairQueue(shares)
    book = Job("a", 4_000_000)
    early, late = Job("a", 1000, arrival_s=3.0), Job("a", 1000, arrival_s=5.0)
    for job in (book, late, early):
        queue.put(job)
    assert serve(queue, shares, 9) == [early, book, late]


def test_a_tenant_with_many_jobs_does_not_delay_another() -> None:
    shares = Shares()
    queue: FairQueue[Job] = FairQueue(shares)
    for _ in range(50):
        queue.put(Job("greedy", 1000))
    serve(queue, shares, 10)
    modest = Job("modest", 2000, arrival_s=9.0)
    queue.put(modest)
    assert modest in serve(queue, shares, 2)


def test_a_job_that_does_not_fit_is_next_still() -> None:
    queue: FairQueue[Job] = FairQueue(Shares())
    small, large = Job("a", 10), Job("a", 1000)
    for job in (large, small):
        queue.put(job)
    assert [queue.take(lambda job: job.size_bytes < 100) for _ in range(3)] == [small, None, None]
    assert queue.take() is large


def test_a_tenant_gets_no_credit_for_idle_time() -> None:
    shares = Shares()
    queue: FairQueue[Job] = FairQueue(shares)
    for _ in range(100):
        queue.put(Job("steady", 1000))
    serve(queue, shares, 50)
    for _ in range(50):
        queue.put(Job("late", 1000))
    served = serve(queue, shares, 20)
    assert 9 <= sum(job.tenant == b"late" for job in served) <= 11


def test_abandoned_jobs_are_dropped() -> None:
    shares = Shares()
    queue: FairQueue[Job] = FairQueue(shares)
    jobs = [Job("a", 10), Job("b", 20), Job("b", 30)]
    for job in jobs:
        queue.put(job)
    jobs[0].abandoned = jobs[1].abandoned = True
    assert serve(queue, shares, 9) == [jobs[2]]


def test_tenants_are_forgotten_beyond_a_limit() -> None:
    shares = Shares()
    for number in range(fair_queue.MAX_TENANTS + 100):
        shares.arrive(str(number).encode())
        shares.charge(str(number).encode(), 1)
        shares.start(str(number).encode())
    assert len(shares._served) <= fair_queue.MAX_TENANTS + 1


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 100), st.booleans(), st.booleans()),
        max_size=60,
    )
)
def test_the_next_job_is_the_earliest_due_of_the_least_served_tenant(
    actions: list[tuple[str, int, bool, bool]],
) -> None:
    shares = Shares()
    queue: FairQueue[Job] = FairQueue(shares)
    waiting: list[Job] = []
    for tenant, size_bytes, put, leave in actions:
        if put:
            waiting.append(Job(tenant, size_bytes))
            queue.put(waiting[-1])
        if leave and waiting:
            waiting.pop(size_bytes % len(waiting)).abandoned = True
        if not put:
            expected = [(shares.of(job.tenant), job.due_s) for job in waiting]
            taken = serve(queue, Shares(), 1)
            if not expected:
                assert not taken
                continue
            assert (shares.of(taken[0].tenant), taken[0].due_s) == min(expected)
            waiting.remove(taken[0])
            shares.start(taken[0].tenant)
            shares.charge(taken[0].tenant, size_bytes)
    assert {id(job) for job in serve(queue, shares, 99)} == {id(job) for job in waiting}
