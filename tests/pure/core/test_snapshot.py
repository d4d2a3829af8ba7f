"""Snapshots of the engine: sequences, block owners, percentiles of times."""

from array import array
from dataclasses import replace

import pytest

from quire.core.accounting.snapshot_builder import build_snapshot
from quire.core.accounting.time_accounting import TimeAccounting
from quire.core.kv.block_pool import BlockPool, BlockState
from quire.core.scheduling.limits.base import Admission
from quire.core.snapshot import (
    TIME_BUCKETS,
    AdmissionStats,
    GrammarStats,
    percentiles,
    time_bucket,
)
from tests.pure.core.test_scheduler import engine
from tests.pure.core.test_time_accounting import Simulation, request


def simulation_of(*requests, steps=1, **setup):
    sim = Simulation(**setup)
    for one in requests:
        sim.engine.add(one)
    for _ in range(steps):
        sim.step()
    return sim


def test_rows_have_the_state_of_each_sequence():
    sim = simulation_of(request("a", prompt=9, most=5), request("b"), slots=1, steps=2)
    running, waiting = sim.engine.snapshot().rows
    assert running[:7] == ("a", 0, "running", 9, 0, 10, 2)
    assert (running.blocks, running.preemptions, running.seconds) == (3, 0, 2.0)
    assert (waiting.request_id, waiting.state, waiting.generated) == ("b", "waiting", 0)


@pytest.mark.parametrize("host", [0, 50])
def test_rows_mark_preempted_sequences(host):
    small = dict(blocks=6, block_size=2, host=host)
    sim = simulation_of(
        request("a", prompt=4, most=8), request("b", prompt=4, most=4), steps=5, **small
    )
    snapshot = sim.engine.snapshot()
    assert [row.state for row in snapshot.rows] == ["running", "preempted"]
    assert snapshot.preempted == 1
    sim.run()
    assert sim.engine.snapshot().preempted == 0


def test_followers_of_a_sibling_are_among_the_waiting():
    sim = simulation_of(request("a", prompt=8, n=3), budget=4)
    assert [row.state for row in sim.engine.snapshot().rows] == ["running", "waiting", "waiting"]


def test_unknown_tokens_are_not_counted():
    sim = simulation_of(request("a", most=9), steps=3, depth=2)
    (row,) = sim.engine.snapshot().rows
    assert row.generated == 2


def test_block_owners_are_the_first_sequences_with_a_block():
    sim = simulation_of(request("a", prompt=9, most=5), request("b", prompt=5, most=5))
    snapshot = sim.engine.snapshot()
    owners = array("H", snapshot.block_owners)
    assert len(owners) == len(snapshot.block_states) == snapshot.stats.blocks
    assert [owners.count(k) for k in (1, 2)] == [3, 2]
    held = {i for i, state in enumerate(snapshot.block_states) if state >= BlockState.HELD}
    assert held == {i for i, owner in enumerate(owners) if owner}


def test_a_shared_block_is_owned_by_the_first_sequence():
    sim = Simulation()
    sim.engine.add(request("a", prompt=9, most=9))
    sim.step()
    first = sim.engine._scheduler._registry.groups["a"].sequences[0]
    same = first.request.prompt  # so its full blocks are hit
    sim.engine.add(replace(request("b", prompt=9, most=9), prompt=same))
    sim.step()
    snapshot = sim.engine.snapshot()
    owners = array("H", snapshot.block_owners)
    shared = [i for i, state in enumerate(snapshot.block_states) if state == BlockState.SHARED]
    assert len(shared) == 2
    assert {owners[i] for i in shared} == {1}


def test_rows_above_the_maximum_are_counted_only():
    sim = simulation_of(*(request(f"r{i}") for i in range(5)), slots=2)
    snapshot = sim.engine.snapshot(rows=1, blocks=False)
    assert [row.request_id for row in snapshot.rows] == ["r0"]
    assert (snapshot.stats.running, snapshot.stats.waiting) == (2, 3)
    assert snapshot.block_states == snapshot.block_owners == b""


def test_blocks_outside_of_a_window_have_no_owner():
    sim = simulation_of(
        request("a", prompt=30, most=9), windows=(4,), block_size=2, budget=8, steps=5
    )
    owners = array("H", sim.engine.snapshot().block_owners)
    assert owners.count(1) == sim.engine.snapshot().rows[0].blocks


def test_a_block_may_have_more_than_255_holds():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    for _ in range(300):
        pool.share([block])
    states = pool.usage_map()
    assert states[block] == BlockState.SHARED
    assert states.count(BlockState.FREE) == 2


class FixedStats(Admission):
    def stats(self):
        return GrammarStats(waiting=3)


def test_limit_stats_are_found_by_type():
    snapshot = build_snapshot(
        engine(limits=[FixedStats()]), TimeAccounting(), at=0.0, most=1, blocks=False
    )
    assert snapshot.grammars == GrammarStats(waiting=3)
    assert snapshot.admission == AdmissionStats(), "no limit has admission stats"


def test_percentiles_are_within_ten_percent():
    counts = [0] * TIME_BUCKETS
    for i in range(1, 1001):
        counts[time_bucket(i / 1000)] += 1
    for share, value in zip((0.5, 0.9, 0.99), percentiles(counts, None, (0.5, 0.9, 0.99))):
        assert value == pytest.approx(share, rel=0.1)


def test_percentiles_of_a_window_exclude_earlier_counts():
    before = [0] * TIME_BUCKETS
    before[time_bucket(5.0)] = 100
    after = list(before)
    after[time_bucket(0.01)] += 10
    assert percentiles(after, before, (0.99,)) == [pytest.approx(0.01, rel=0.1)]
    assert percentiles(after, after, (0.5,)) is None


def test_times_out_of_range_are_in_the_outermost_buckets():
    assert time_bucket(-1.0) == time_bucket(0.0) == 0
    assert time_bucket(1e9) == TIME_BUCKETS - 1
