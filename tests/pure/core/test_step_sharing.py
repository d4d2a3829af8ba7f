"""Limits that share steps between prompts and decoding rows, and the cache between tenants."""

from __future__ import annotations

import pytest

from quire.core.scheduling.limits.itl_target import (
    DECODE_STEPS_PER_TARGET,
    INITIAL_PROMPT_TOKENS,
    MIN_PROMPT_TOKENS,
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
from tests.pure.core.builders import request, sequence
from tests.pure.core.test_limits import granted_prompt_tokens, prompt_of, run_full_steps


def running(tokens, planned=0):
    return sequence(prompt=range(tokens), planned=planned, state=SequenceState.RUNNING)


def test_the_first_prompt_beside_decoding_rows_starts_small():
    limit = InterTokenLatencyLimit(0.050)
    limit.begin_step(5)
    limit.take_decode_rows(4)
    assert limit.allow(prompt_of(9000), 9000) == INITIAL_PROMPT_TOKENS


class Device:
    """Runs steps of decoding rows and a long prompt. seconds(tokens, context): time of its part."""

    def __init__(self, decode_s, seconds, *, rows=4, waiting=1, target_s=0.040):
        self.limit = InterTokenLatencyLimit(target_s)
        self.decode_s, self.seconds, self.rows, self.waiting = decode_s, seconds, rows, waiting
        self.prompt = running(1_000_000)
        self.seconds_taken, self.tokens = [], []

    def run(self, steps):
        for _ in range(steps):
            self.limit.begin_step(self.rows + self.waiting)
            self.limit.take_decode_rows(self.rows)
            n = self.limit.allow(self.prompt, 8192)
            seconds_taken = self.decode_s
            if n:
                self.limit.take(self.prompt, n)
                seconds_taken += self.seconds(n, self.prompt.planned)
            self.limit.observe_step(n, seconds_taken)
            self.prompt.planned += n
            self.seconds_taken.append(seconds_taken)
            self.tokens.append(n)
        return self

    def recent(self, steps=400):
        """Return of the last steps the time share of decoding alone, and prompt tokens a second."""
        seconds_taken, tokens = self.seconds_taken[-steps:], self.tokens[-steps:]
        return steps * self.decode_s / sum(seconds_taken), sum(tokens) / sum(seconds_taken)


COSTS = {
    "a GPU": (0.004, lambda n, c: 0.0005 + 22e-6 * n),
    "a CPU with fixed costs of a step": (0.0035, lambda n, c: 0.009 + 3e-4 * n),
    "a large model on a CPU": (0.150, lambda n, c: 0.02 + 8e-3 * n),
    "many rows": (0.030, lambda n, c: 22e-6 * n),
    "a growing context": (0.005, lambda n, c: 20e-6 * n + 5e-11 * n * c),
    "a context that grows fast": (0.005, lambda n, c: 22e-6 * n + 9e-10 * n * min(c, 100_000)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", COSTS)
def test_a_long_prompt_and_decoding_rows_get_half_of_the_time_each(name):
    decode_s, seconds = COSTS[name]
    device = Device(decode_s, seconds).run(1000)
    kept, speed = device.recent()
    assert 0.45 < kept < 0.62
    assert speed > seconds(8192, device.prompt.planned) ** -1 * 8192 / 3
    full_s = decode_s + seconds(MIN_PROMPT_TOKENS, device.prompt.planned)
    assert max(device.seconds_taken[-400:]) <= 1.1 * max(0.040, 2 * decode_s, full_s)


@pytest.mark.parametrize("stalled", [0, 1, 300])
def test_the_limit_recovers_from_stalled_steps(stalled):
    decode_s, seconds = COSTS["a CPU with fixed costs of a step"]
    device = Device(decode_s, seconds).run(stalled)
    device.seconds = lambda n, c: 3.0
    while len([seconds_taken for seconds_taken in device.seconds_taken if seconds_taken > 3.0]) < 3:
        device.run(1)
    device.seconds = seconds
    device.run(100)
    kept, speed = device.run(400).recent()
    assert kept > 0.45
    assert speed > 1 / 3e-4 / 3


def test_many_prompts_get_more_than_half_of_the_time_beside_few_rows():
    decode_s, seconds = COSTS["a GPU"]
    kept, speed = Device(decode_s, seconds, rows=2, waiting=60).run(1000).recent()
    assert speed > 0.5 / 22e-6
    one_prompt, _ = Device(decode_s, seconds, rows=2).run(1000).recent()
    assert kept < one_prompt / 1.5


def test_a_short_prompt_does_not_wait_for_the_share_of_decoding_rows():
    device = Device(*COSTS["a GPU"]).run(400)
    while not device.tokens[-1]:
        device.run(1)
    device.limit.begin_step(6)
    device.limit.take_decode_rows(4)
    assert device.limit.allow(device.prompt, 8192) == 0
    assert device.limit.allow(prompt_of(100), 100) == 100


def test_a_long_prompt_does_not_wait_after_decoding_ends():
    device = Device(*COSTS["a GPU"]).run(400)
    while not device.tokens[-1]:
        device.run(1)
    for _ in range(2):
        device.limit.begin_step(1)
    assert device.limit.allow(device.prompt, 8192) == 8192


def test_the_time_of_a_step_without_prompts_is_measured_again():
    device = Device(0.030, lambda n, c: 22e-6 * n).run(100)
    device.decode_s = 0.060
    device.run(20 * PROBE_EVERY)
    assert device.limit.decode_step_s == pytest.approx(0.060, rel=0.1)


def test_short_prompts_get_half_of_a_step_where_decoding_alone_is_beyond_the_target():
    limit = Device(0.100, lambda n, c: 1e-3 * n).run(100).limit
    run_full_steps(limit, 0.100, 1e-3, 40, rows=16)
    part = DECODE_STEPS_PER_TARGET - 1
    assert granted_prompt_tokens(limit, 16) * 1e-3 == pytest.approx(part * 0.100, rel=0.2)


# -- short prompts first -----------------------------------------------------------------------


def with_running(*seqs, budget=100, waiting=()):
    """Return a limit after these sequences started in this order, and a function that schedules."""
    queue, left = Fifo(), [budget]
    limit = ShortestPromptFirst(queue, lambda: left[0])
    for seq in seqs:
        limit.begin_step(9)
        limit.take(seq, 1)
    for seq in waiting:
        queue.push(seq)
    limit.begin_step(9)

    def schedule(seq, want=10_000):
        n = limit.allow(seq, min(want, seq.pending, left[0]))
        if n:
            limit.take(seq, n)
            left[0] -= n
            seq.planned += n
        return n

    return limit, schedule


def test_a_long_prompt_leaves_tokens_for_a_shorter_waiting_one():
    long, short = running(10_000), prompt_of(60)
    _, schedule = with_running(long, waiting=[short])
    assert (schedule(long), schedule(short)) == (40, 60)


def test_the_oldest_prompt_keeps_a_quarter():
    long = running(10_000)
    _, schedule = with_running(long, waiting=[prompt_of(60) for _ in range(5)])
    assert schedule(long) == 25


def test_among_running_prompts_the_shortest_is_first():
    oldest, middle, shortest = running(900), running(400), running(50)
    _, schedule = with_running(oldest, middle, shortest)
    assert (schedule(oldest), schedule(middle), schedule(shortest)) == (25, 25, 50)


def test_a_single_prompt_and_decoding_rows_are_not_limited():
    long, row = running(10_000), sequence(prompt=range(3), output=[7], planned=3)
    limit, schedule = with_running(long)
    assert schedule(long) == 100
    assert limit.allow(row, 1) == 1


def test_tokens_are_not_left_for_prompts_that_cannot_start():
    long, blocked = running(100_000), prompt_of(60)
    limit, _ = with_running(long, waiting=[blocked])
    granted_tokens = []
    for _ in range(200):
        granted_tokens.append(limit.allow(long, 100))
        limit.take(long, granted_tokens[-1])
        limit.begin_step(9)
    assert granted_tokens.count(40) <= 12
    assert granted_tokens[-MAX_BACKOFF:].count(40) <= 2


# -- shares of the cache -----------------------------------------------------------------------


def tenant_seq(tenant, tokens=10, share=0.5, **fields):
    seq = sequence(prompt=range(tokens), **fields)
    seq.request = request(
        id=f"{tenant}{id(seq)}",
        prompt=range(tokens),
        tenant=tenant,
        tenant_limits=TenantLimits(kv_share=share),
    )
    return seq


def test_a_tenant_at_its_quota_starts_no_sequence_and_running_ones_continue():
    order = FairQueue(Fifo)
    limit = TenantKVQuota(order, 40, lambda request, tokens: tokens)
    first, second, third = tenant_seq(b"a"), tenant_seq(b"a"), tenant_seq(b"a")
    limit.begin_step(3)
    for seq in (first, second):
        assert limit.allow(seq, 10) == 10
        limit.take(seq, 10)
        seq.state = SequenceState.RUNNING
        seq.tables = (list(range(10)),)
    assert limit.allow(third, 10) == 0
    assert limit.allows_overtaking
    assert limit.allow(second, 1) == 1
    assert limit.allow(tenant_seq(b"b"), 10) == 10
    assert limit.allow(tenant_seq(b"a", share=None), 10) == 10
    first.state = SequenceState.FINISHED
    limit.begin_step(2)
    assert limit.allow(third, 10) == 10


def test_a_tenant_may_always_run_one_sequence_and_is_overtaken_at_its_quota():
    order = FairQueue(Fifo)
    limit = TenantKVQuota(order, 40, lambda request, tokens: tokens)
    large, next_one, other = tenant_seq(b"a", 30), tenant_seq(b"a"), tenant_seq(b"b")
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
def test_a_fork_shares_nothing_after_different_extra_content(content, shared):
    parent = sequence(prompt=range(9), extra_content=((5, b"cat"),), computed=9)
    child = sequence(prompt=range(12), extra_content=content)
    assert _shared_prefix_len(parent, child) == shared
