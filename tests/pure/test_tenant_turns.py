"""Turns of tenants at workers, in simulations with a clock of their own."""

import heapq
import itertools

from hypothesis import given
from hypothesis import strategies as st

from quire.sandbox.tenant_turns import TenantShare, TenantTurns

TENANTS = {b"a": 1.0, b"b": 1.0, b"c": 2.0}
JOBS = st.lists(
    st.tuples(
        st.floats(0, 5),  # when it comes
        st.sampled_from(sorted(TENANTS)),
        st.floats(0.001, 3),  # how long it runs
        st.none() | st.floats(0, 5),  # how long its caller waits for it to start
    ),
    max_size=40,
)


class Simulation:
    """Runs jobs; a job is its number. found: number -> when it started and ended."""

    def __init__(self, workers):
        self.turns, self.workers = TenantTurns(workers), workers
        self.events, self.order = [], itertools.count()
        self.jobs, self.found, self.left, self.running = {}, {}, set(), {}
        self.now = 0.0

    def at(self, time, what, job):
        heapq.heappush(self.events, (time, next(self.order), what, job))

    def add(self, came, tenant, seconds, patience=None):
        job = len(self.jobs)
        self.jobs[job] = (came, tenant, seconds)
        self.at(came, "come", job)
        if patience is not None:
            self.at(came + patience, "leave", job)
        return job

    def run(self):
        while self.events:
            self.now, _, what, job = heapq.heappop(self.events)
            if what == "come":
                tenant = self.jobs[job][1]
                self.turns.push(job, TenantShare(tenant, TENANTS[tenant]), self.now)
            elif what == "leave" and self.turns.remove(job):
                self.left.add(job)
            elif what == "end":
                del self.running[job]
                self.turns.finish(job, self.now)
            while (job := self.turns.start(self.now)) is not None:
                others = [self.jobs[one][1] for one in self.running]
                assert len(others) <= self.workers
                if len(others) == self.workers:
                    assert self.jobs[job][1] not in others, "the worker more is for a newcomer"
                end = self.now + self.jobs[job][2]
                self.running[job] = end
                self.found[job] = (self.now, end)
                self.at(end, "end", job)
            waiting = sum(self.turns.num_waiting(tenant) for tenant in TENANTS)
            assert not waiting or len(self.running) >= self.workers, "a worker is idle"
        return self.found


def waits(simulation, jobs):
    return [simulation.found[job][0] - simulation.jobs[job][0] for job in jobs]


@given(st.integers(1, 3), JOBS)
def test_all_jobs_run_once_unless_their_callers_leave(workers, jobs):
    simulation = Simulation(workers)
    for job in jobs:
        simulation.add(*job)
    found = simulation.run()
    assert found.keys() | simulation.left == simulation.jobs.keys()
    assert not found.keys() & simulation.left
    assert not simulation.turns._tenants, "nothing is kept of tenants without jobs"
    for tenant in TENANTS:
        came = sorted((simulation.jobs[job][0], job) for job in found
                      if simulation.jobs[job][1] == tenant)  # fmt: skip
        starts = [found[job][0] for _, job in came]
        assert starts == sorted(starts), "within a tenant the first that came is the first to run"


@given(st.integers(1, 3), st.lists(st.floats(0.1, 3), min_size=8, max_size=30), st.floats(0, 4))
def test_a_lone_job_never_waits_for_those_of_another_tenant(workers, large, came):
    simulation = Simulation(workers)
    for seconds in large:
        simulation.add(0.0, b"a", seconds)
    small = simulation.add(came, b"b", 0.01)
    simulation.run()
    assert waits(simulation, [small]) == [0.0]


@given(st.integers(1, 3), st.lists(st.floats(0.1, 3), min_size=8, max_size=30), st.floats(0, 4))
def test_a_third_tenant_waits_for_one_job_at_most(workers, large, came):
    simulation = Simulation(workers)
    for seconds in large:
        simulation.add(0.0, b"a", seconds)
        simulation.add(0.0, b"b", seconds)
    small = simulation.add(came, b"c", 0.01)
    simulation.run()
    assert waits(simulation, [small])[0] <= max(large)


@given(
    st.integers(1, 3),
    st.tuples(*[st.lists(st.floats(0.01, 2), min_size=20, max_size=20) for _ in range(2)]),
)
def test_waiting_tenants_get_service_by_their_weights(workers, seconds):
    simulation = Simulation(workers)
    for tenant, each in zip((b"a", b"c"), seconds):
        for one in each:
            simulation.add(0.0, tenant, one)
    found = simulation.run()
    busy = min(max(found[job][0] for job in found if simulation.jobs[job][1] == tenant)
               for tenant in (b"a", b"c"))  # fmt: skip
    longest = max(map(max, seconds))
    for time in (busy / 3, busy / 2, busy):
        got = dict.fromkeys((b"a", b"c"), 0.0)
        for job, (start, end) in found.items():
            got[simulation.jobs[job][1]] += (
                max(min(end, time) - start, 0.0) / TENANTS[simulation.jobs[job][1]]
            )
        # One may have had a turn while jobs of the other occupied the workers.
        assert abs(got[b"a"] - got[b"c"]) <= (workers + 1) * longest * 1.5 + 1e-6


def test_a_tenant_that_returns_has_no_credit():
    """Otherwise one that was idle for a minute had all workers for a minute."""
    simulation = Simulation(1)
    for _ in range(60):
        simulation.add(0.0, b"a", 1.0)
    late = [simulation.add(30.5, b"b", 1.0) for _ in range(10)]
    simulation.run()
    between = [job for job, (start, _) in simulation.found.items()
               if job not in late and 31.6 < start < simulation.found[late[-1]][0]]  # fmt: skip
    assert len(between) >= 8
