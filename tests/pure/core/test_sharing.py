"""How prompts share steps with those who decode, with each other, and tenants the cache."""

from __future__ import annotations

import pytest

from quire.core.scheduling.limits.itl_target import (
    INITIAL_PROMPT_TOKENS,
    LONG_STEP_FACTOR,
    PROBE_EVERY,
    InterTokenLatencyLimit,
)
from quire.core.scheduling.limits.shortest_prompt_first import MAX_BACKOFF, ShortestPromptFirst
from quire.core.scheduling.limits.tenant_kv_quota import TenantKVQuota
from quire.core.scheduling.order.fair import FairQueue
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.request_group import _shared_prefix_len
from quire.core.tenant_limits import TenantLimits
from quire.core.types import SequenceState
from tests.pure.core.made import request, sequence
from tests.pure.core.test_limits import granted, prompt_of, run_full_steps


def running(tokens, planned=0):
    return sequence(prompt=range(tokens), planned=planned, state=SequenceState.RUNNING)


def test_the_first_prompt_beside_decoding_rows_begins_small():
    limit = InterTokenLatencyLimit(0.050)
    limit.begin_step(5)
    limit.take_decode_rows(4)
    assert limit.allow(prompt_of(9000), 9000) == INITIAL_PROMPT_TOKENS


def run_long(limit, bare_s, cost_s, steps, rows=16):
    """Steps beside a long prompt; cost_s(tokens, context). What each took, and what it computed."""
    took, tokens, seq = [], [], running(1_000_000)
    for _ in range(steps):
        limit.begin_step(rows + 1)
        limit.take_decode_rows(rows)
        n = limit.allow(seq, 8192)
        if n:
            limit.take(seq, n)
        seconds = bare_s + (cost_s(n, seq.planned) if n else 0.0)
        limit.observe_step(n, seconds)
        seq.planned += n
        took.append(seconds)
        tokens.append(n)
    return took, tokens


def knowing(bare_s, fits):
    """A pace that has seen bare steps, and full ones of so many tokens."""
    limit = InterTokenLatencyLimit(0.040)
    for _ in range(9):
        limit.begin_step(17)
        limit.take_decode_rows(16)
        limit.observe_step(0, bare_s)
    for _ in range(9):
        limit.begin_step(17)
        limit.take_decode_rows(16)
        limit.observe_step(fits, 0.040)
    return limit


def test_a_long_prompt_at_most_doubles_a_step_as_its_context_grows():
    took, tokens = run_long(
        knowing(0.005, 1750), 0.005, lambda n, c: 20e-6 * n + 5e-10 * n * c, 4000
    )
    assert max(took) < 2 * 0.005
    assert sum(took) / len(took) > 1.7 * 0.005, "it leaves too much unused"
    assert tokens[5] > tokens[-1] > 32


def test_a_long_prompt_gets_on_where_every_step_must_read_much():
    _, tokens = run_long(knowing(0.005, 1750), 0.005, lambda n, c: 0.02 + 20e-6 * n, 300)
    assert set(tokens[50:]) == {0, 32}
    assert tokens[50:].count(0) <= len(tokens[50:]) // PROBE_EVERY + 1


def test_what_a_bare_step_takes_is_looked_at_again_beside_a_long_prompt():
    limit = knowing(0.005, 1750)
    run_long(limit, 0.015, lambda n, c: 20e-6 * n, 20 * PROBE_EVERY)
    assert limit.decode_step_s == pytest.approx(0.015, rel=0.1)


def test_on_a_device_whose_bare_steps_are_beyond_the_target_prompts_still_get_half():
    limit = knowing(0.100, 100)
    run_full_steps(limit, 0.100, 1e-3, 40, rows=16)
    assert granted(limit, 16) * 1e-3 == pytest.approx((LONG_STEP_FACTOR - 1) * 0.100, rel=0.2)


def test_short_prompts_beside_a_long_one_do_not_teach_its_pace():
    limit, long = knowing(0.005, 1750), running(1_000_000, planned=150_000)
    run_long(limit, 0.005, lambda n, c: 0.004 * n / 100, 30)
    before = limit.long_fit.max_tokens
    limit.begin_step(18)
    limit.take_decode_rows(16)
    limit.take(long, 60)
    limit.take(prompt_of(500), 500)
    limit.observe_step(560, 0.006)
    assert limit.long_fit.max_tokens == before


# -- short prompts first -----------------------------------------------------------------------


def aboard(*seqs, room=100, waiting=()):
    """A limit that has seen these come aboard in this order, at the beginning of a step."""
    queue, left = Fifo(), [room]
    limit = ShortestPromptFirst(queue, lambda: left[0])
    for seq in seqs:
        limit.begin_step(9)
        limit.take(seq, 1)
    for seq in waiting:
        queue.push(seq)
    limit.begin_step(9)

    def give(seq, want=10_000):
        n = limit.allow(seq, min(want, seq.pending, left[0]))
        if n:
            limit.take(seq, n)
            left[0] -= n
            seq.planned += n
        return n

    return limit, give


def test_a_long_prompt_leaves_room_for_a_shorter_one_that_waits():
    long, short = running(10_000), prompt_of(60)
    _, give = aboard(long, waiting=[short])
    assert (give(long), give(short)) == (40, 60)


def test_the_eldest_keeps_a_quarter_whatever_comes():
    long = running(10_000)
    _, give = aboard(long, waiting=[prompt_of(60) for _ in range(5)])
    assert give(long) == 25


def test_among_those_aboard_the_one_with_least_to_do_goes_first():
    eldest, middle, least = running(900), running(400), running(50)
    _, give = aboard(eldest, middle, least)
    assert (give(eldest), give(middle), give(least)) == (25, 25, 50)


def test_an_only_prompt_gets_everything_and_decoding_rows_are_left_alone():
    long, row = running(10_000), sequence(prompt=range(3), output=[7], planned=3)
    limit, give = aboard(long)
    assert give(long) == 100
    assert limit.allow(row, 1) == 1


def test_room_is_not_left_for_long_for_those_who_cannot_come():
    long, stuck = running(10_000_000), prompt_of(60)
    limit, _ = aboard(long, waiting=[stuck])
    got = []
    for _ in range(200):
        got.append(limit.allow(long, 100))
        limit.take(long, got[-1])
        limit.begin_step(9)
    assert got.count(40) <= 12
    assert got[-MAX_BACKOFF:].count(40) <= 2


# -- shares of the cache -----------------------------------------------------------------------


def of(tenant, tokens=10, share=0.5, **fields):
    made = sequence(prompt=range(tokens), **fields)
    made.request = request(
        id=f"{tenant}{id(made)}",
        prompt=range(tokens),
        tenant=tenant,
        tenant_limits=TenantLimits(kv_share=share),
    )
    return made


def test_beyond_its_share_nobody_of_a_tenant_comes_in_and_those_who_run_go_on():
    order = FairQueue(Fifo)
    limit = TenantKVQuota(order, 40, lambda tokens: tokens)
    first, second, third = of(b"a"), of(b"a"), of(b"a")
    limit.begin_step(3)
    for seq in (first, second):
        assert limit.allow(seq, 10) == 10
        limit.take(seq, 10)
        seq.state = SequenceState.RUNNING
        seq.tables = (list(range(10)),)
    assert limit.allow(third, 10) == 0
    assert limit.allows_overtaking
    assert limit.allow(second, 1) == 1
    assert limit.allow(of(b"b"), 10) == 10
    assert limit.allow(of(b"a", share=None), 10) == 10
    first.state = SequenceState.FINISHED
    limit.begin_step(2)
    assert limit.allow(third, 10) == 10


def test_one_of_a_tenant_may_always_run_and_who_is_at_its_share_is_passed_over():
    order = FairQueue(Fifo)
    limit = TenantKVQuota(order, 40, lambda tokens: tokens)
    large, next_one, other = of(b"a", 30), of(b"a"), of(b"b")
    limit.begin_step(1)
    assert limit.allow(large, 30) == 30
    limit.take(large, 30)
    large.state, large.tables = SequenceState.RUNNING, (list(range(30)),)
    order.push(next_one)
    order.push(other)
    limit.begin_step(3)
    assert list(order) == [other, next_one]
    assert order.pop() is other


@pytest.mark.parametrize(
    ("content", "shared"), [(((5, b"cat"),), 9), (((5, b"dog"),), 5), ((), 5), (((2, b"x"),), 2)]
)
def test_a_fork_shares_nothing_behind_other_content(content, shared):
    parent = sequence(prompt=range(9), extra_content=((5, b"cat"),), computed=9)
    child = sequence(prompt=range(12), extra_content=content)
    assert _shared_prefix_len(parent, child) == shared
