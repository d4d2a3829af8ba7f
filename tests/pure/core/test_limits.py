"""The contract of limits for all of them, and tests of each."""

from __future__ import annotations

import copy
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.admission.admission_control import AdmissionControl
from quire.core.scheduling.limits.base import NO_BOUND, StepBudget, StepListener, by_contract
from quire.core.scheduling.limits.isolation_limit import FaultIsolationLimit
from quire.core.scheduling.limits.itl_target import (
    LONG_PROMPT_STEPS,
    MIN_PROMPT_TOKENS,
    InterTokenLatencyLimit,
)
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.scheduling.limits.media_encoder import MediaEncoderLimit
from quire.core.scheduling.limits.pipeline import PipelineLimit
from quire.core.scheduling.limits.prefill_limits import (
    LongPrefillLimit,
    PartialPrefillLimit,
    PrefillChunkLimit,
)
from quire.core.scheduling.limits.shared_prompts import SharedPromptLimit
from quire.core.scheduling.limits.shortest_prompt_first import ShortestPromptFirst
from quire.core.scheduling.limits.tenant_kv_quota import TenantKVQuota
from quire.core.scheduling.limits.token_budget import TokenBudget, WholePromptLimit
from quire.core.scheduling.limits.undivided_runs import UndividedRunLimit
from quire.core.scheduling.order.fair import FairQueue
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.plan_builder import PlanBuilder, StepBudgets
from quire.core.types import UNKNOWN, MediaItem, Row, SequenceState, ThinkingBudget, Wants
from quire.errors import TooLong
from tests.pure.core.builders import request, sequence
from tests.pure.core.workload import Run, Setup


class OneLongRow(StepBudget, StepListener):
    """A new budget: one row of several tokens in a step, and none after a slow step."""

    def __init__(self, most=1):
        self.most = self.left = most
        self.slow = False

    def begin_step(self, sequences):
        self.left = 0 if self.slow else self.most

    def allow(self, seq, want):
        return want if want <= 1 or self.left else 0

    def take(self, seq, n):
        self.left -= n > 1

    def undo(self, seq, n):
        self.left += n > 1

    def free_decode_rows(self):
        return NO_BOUND

    def observe_step(self, prompt_tokens, seconds):
        self.slow = seconds > 1


def media_limit(size):
    return MediaEncoderLimit(("image",), max_rows=size, cache_rows=16 * size, row_bytes=1)


MAKERS = {
    "media encoder": media_limit,
    "shared prompts": lambda k: SharedPromptLimit(2, lambda seq: seq.keys, (), 2 * k),
    "undivided runs": UndividedRunLimit,
    "tokens": lambda k: TokenBudget(3 * k),
    "whole": lambda k: WholePromptLimit(3 * k),
    "max seqs": MaxSeqsLimit,
    "one long row": OneLongRow,
    "chunk": PrefillChunkLimit,
    "partial": PartialPrefillLimit,
    "long": lambda k: LongPrefillLimit(k, 5),
    "fault isolation": lambda k: isolation_limit(k, crashed=False, failed=0),
    "fault isolation, after a crash": lambda k: isolation_limit(k, crashed=True, failed=0),
    "fault isolation, after a failed step": lambda k: isolation_limit(k, crashed=False, failed=k),
    "fault isolation, a trial without rows": lambda k: isolation_limit(
        k, crashed=True, failed=k, blocked=True
    ),
    "admission": lambda k: AdmissionControl(max_requests=k, max_tokens=9 * k, clock=lambda: 0.0),
    "kv quota": lambda k: TenantKVQuota(FairQueue(Fifo), 4 * k, lambda request, tokens: tokens),
    "shortest first": lambda k: ShortestPromptFirst(Fifo(), lambda: 3 * k),
    "pipeline": lambda k: PipelineLimit(k, Fifo(), lambda: False),
    "itl": lambda k: itl_limit(k, known=False),
    "itl, measured": lambda k: itl_limit(k, known=True),
}


def isolation_limit(number, *, crashed, failed, blocked=False):
    """Return a limit with suspects. The tests' sequences belong to request "r"."""
    limit = FaultIsolationLimit()
    if crashed:
        limit.add_request(request("r", engine_crashes=1))
    limit.observe_step_failure([sequence(id=f"other{i}") for i in range(failed)])
    if blocked:
        limit.begin_step(1)  # no request on trial has rows
    return limit


def itl_limit(decoding, *, known):
    limit = InterTokenLatencyLimit(0.05)
    if known:
        limit.observe_step(1000, 0.05)
    limit.take_decode_rows(decoding)
    return limit


want_lists = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 5), st.booleans()), min_size=1, max_size=8
)


def seqs_of(want_lists):
    for prompt, planned, running in want_lists:
        yield sequence(
            prompt=range(prompt),
            planned=min(planned, prompt - 1),
            keys=[bytes([i]) for i in range(prompt // 2)],
            state=SequenceState.RUNNING if running else SequenceState.WAITING,
        )


def state_of(limit):
    return dict(vars(limit))


def shared_objects(limit):
    """Return the objects by id that a deep copy must share, as they have no value equality."""
    found = [*vars(limit).values()]
    for value in found:  # grows
        if isinstance(value, dict | list | set | deque):
            found += value
    return {id(one): one for one in found if type(one).__eq__ is object.__eq__}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@given(size=st.integers(1, 4), sequences=st.integers(1, 3), want_lists=want_lists)
def test_allow_is_bounded_by_want_and_undo_reverts_take(make, size, sequences, want_lists):
    limit = make(size)
    limit.begin_step(sequences)
    for seq in seqs_of(want_lists):
        for want in range(seq.pending + 1):
            before = state_of(limit)
            allowed = limit.allow(seq, want)
            assert 0 <= allowed <= want
            assert state_of(limit) == before, "allow() changed something"
            assert not (limit.full() and allowed), "it is full, but allows tokens"
            if allowed:
                limit.take(seq, allowed)
                limit.undo(seq, allowed)
                assert state_of(limit) == before
        n = limit.allow(seq, seq.pending)
        if n:
            limit.take(seq, n)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@given(size=st.integers(1, 4), want_lists=want_lists)
def test_free_decode_rows_are_granted_and_counted_like_others(make, size, want_lists):
    limit = make(size)
    limit.begin_step(9)
    for seq in seqs_of(want_lists):
        n = limit.allow(seq, seq.pending)
        if n:
            limit.take(seq, n)
    one = sequence(prompt=range(9), output=(1,), planned=9, state=SequenceState.RUNNING)
    other = copy.deepcopy(limit, shared_objects(limit))
    rows = min(limit.free_decode_rows(), 5)
    for _ in range(rows):
        assert limit.allow(one, 1) == 1
        limit.take(one, 1)
    other.take_decode_rows(rows)
    other.take_each_decode_row([Row(one, 9, 1, Wants.TOKEN)] * rows)
    assert state_of(other) == state_of(limit)


@given(want_lists)
def test_adding_and_removing_a_row_leaves_the_plan_unchanged(want_lists):
    limits = [
        PrefillChunkLimit(4),
        TokenBudget(20),
        MaxSeqsLimit(4),
        PartialPrefillLimit(1),
        LongPrefillLimit(1, 5),
    ]
    draft = PlanBuilder(StepBudgets(limits), 9)
    for seq in seqs_of(want_lists):
        n = draft.allowed_tokens(seq)
        if not n:
            continue
        before = [state_of(limit) for limit in limits], list(draft.rows), seq.planned, seq.tokens[:]
        draft.add(seq, n)
        assert seq.pending == (
            1 if draft.rows[-1].wants is Wants.TOKEN else len(seq.tokens) - seq.planned
        )
        draft.remove(seq)
        after = [state_of(limit) for limit in limits], list(draft.rows), seq.planned, seq.tokens
        assert after == before
        draft.add(seq, n)


def test_the_token_budget_is_shared_in_order():
    budget = TokenBudget(10)
    budget.begin_step(2)
    seq = sequence(prompt=range(8))
    budget.take(seq, budget.allow(seq, 8))
    assert budget.allow(seq, 8) == 2
    assert not budget.full()
    budget.take(seq, 2)
    assert budget.full()


def test_whole_prompts_are_not_chunked_but_recomputed_ones_may_be():
    limit = WholePromptLimit(10)
    seq = sequence(prompt=range(8))
    assert limit.allow(seq, 7) == 0
    assert limit.allow(seq, 8) == 8
    seq.planned = 4  # found in the prefix cache
    assert limit.allow(seq, 3) == 0
    assert limit.allow(seq, 4) == 4
    seq.preemptions = 1
    assert limit.allow(seq, 3) == 0
    seq.tokens.append(9)
    assert limit.allow(seq, 3) == 3


def test_a_prompt_above_the_budget_is_refused_without_chunked_prefill():
    WholePromptLimit(10).check_request(request(prompt=range(10)))
    with pytest.raises(TooLong, match=r"11 tokens.*at most 10.*max_num_batched_tokens") as caught:
        WholePromptLimit(10).check_request(request(prompt=range(11)))
    assert caught.value.param == "prompt"


def test_long_prompts_are_chunked_unless_alone():
    cap = PrefillChunkLimit(4)
    seq = sequence(prompt=range(20))
    cap.begin_step(2)
    assert cap.allow(seq, 20) == 4
    cap.begin_step(1)
    assert cap.allow(seq, 20) == 20


def test_only_unfinished_prompts_count_as_partial():
    limit = PartialPrefillLimit(1)
    limit.begin_step(3)
    whole, cut, other = (sequence(prompt=range(9)) for _ in range(3))
    limit.take(whole, 9)
    limit.take(cut, 5)
    assert limit.allow(other, 5) == 0
    assert limit.allow(other, 9) == 9


def test_short_prompts_do_not_count_as_long_ones():
    limit = LongPrefillLimit(1, threshold=5)
    limit.begin_step(3)
    limit.take(sequence(prompt=range(9)), 3)
    assert limit.allows_overtaking
    assert limit.allow(sequence(prompt=range(9)), 3) == 0
    assert limit.allow(sequence(prompt=range(5)), 3) == 3


def prompt_of(tokens):
    return sequence(prompt=range(tokens), planned=0, state=SequenceState.WAITING)


def longest_short_prompt(limit):
    """Return the longest prompt that does not count as long."""
    fits = min(max(limit.fitting_tokens, MIN_PROMPT_TOKENS), 20_000)
    return prompt_of(int(fits * LONG_PROMPT_STEPS))


def observe_step_of(limit, rows, prompt_tokens, seconds):
    """Observe a step with so many decoding rows, and begin the next."""
    limit.observe_step(0, 0.004)
    limit.begin_step(rows + 1)
    limit.take_decode_rows(rows)
    limit.observe_step(prompt_tokens, seconds)
    limit.begin_step(rows + 1)


def granted_prompt_tokens(limit, rows=4):
    """Return the prompt tokens that the next step is allowed."""
    limit.begin_step(rows + 1)
    limit.take_decode_rows(rows)
    return limit.allow(longest_short_prompt(limit), 100_000)


def run_full_steps(limit, fixed_s, token_s, steps, rows=4):
    """Run steps with all allowed tokens on a device with these costs. Returns the last duration."""
    seconds = 0.0
    for _ in range(steps):
        tokens = granted_prompt_tokens(limit, rows)
        seconds = fixed_s + token_s * (tokens + rows)
        limit.observe_step(tokens, seconds)
    return seconds


def test_prompts_beside_decoding_rows_get_what_fits_the_target():
    limit = InterTokenLatencyLimit(0.050)
    observe_step_of(limit, 4, 2000, 0.100)
    most = limit.allow(prompt_of(3000), 3000)
    assert 850 < most <= 1000
    limit.take(prompt_of(600), 600)
    assert limit.allow(prompt_of(3000), 3000) == most - 600


@pytest.mark.parametrize(
    ("rows", "fits", "tokens"), [(250, 1900, 2048), (48, 1100, 1024), (20, 700, 640)]
)
def test_a_step_beside_decoding_rows_fills_the_tiles_of_products(rows, fits, tokens):
    limit = InterTokenLatencyLimit(0.050)
    observe_step_of(limit, rows, 2 * fits, 0.100)
    limit.take_decode_rows(rows)
    assert limit.allow(longest_short_prompt(limit), 9000) + rows == tokens


def test_drafts_of_decoding_rows_are_in_the_tiles_too():
    limit = InterTokenLatencyLimit(0.050)
    observe_step_of(limit, 0, 2200, 0.100)
    limit.begin_step(20)
    for _ in range(20):
        limit.take(decoding(), 4)
    limit.begin_step(20)
    limit.take_decode_rows(20)
    assert limit.allow(longest_short_prompt(limit), 9000) + 20 * 4 == 1024


@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.0, 22e-6), (0.02, 22e-6), (0.005, 2e-3)])
def test_step_times_approach_the_target_for_any_cost(fixed_s, token_s):
    limit = InterTokenLatencyLimit(0.050)
    limit.observe_step(8000, fixed_s + 8000 * token_s)
    seconds = run_full_steps(limit, fixed_s, token_s, 30)
    least = fixed_s + (MIN_PROMPT_TOKENS + 4) * token_s
    assert max(0.022, least) <= seconds <= max(0.055, least)


def test_prompts_are_not_limited_without_decoding_rows():
    limit = InterTokenLatencyLimit(0.050)
    observe_step_of(limit, 0, 2000, 0.090)
    assert limit.allow(prompt_of(5000), 5000) == 5000


def test_a_prompt_makes_progress_on_a_slow_device():
    limit = InterTokenLatencyLimit(0.050)
    observe_step_of(limit, 1, 100, 10.0)
    assert limit.allow(longest_short_prompt(limit), 5000) == MIN_PROMPT_TOKENS


def test_the_limit_recovers_from_a_stalled_step():
    limit = InterTokenLatencyLimit(0.050)
    run_full_steps(limit, 0.02, 22e-6, 20)
    before = granted_prompt_tokens(limit)
    limit.observe_step(granted_prompt_tokens(limit), 9.0)
    assert granted_prompt_tokens(limit) < before / 2
    run_full_steps(limit, 0.02, 22e-6, 12)
    assert granted_prompt_tokens(limit) >= 0.75 * before


def test_a_step_with_few_prompt_tokens_does_not_lower_the_limit():
    limit = InterTokenLatencyLimit(0.050)
    limit.observe_step(2000, 0.100)
    granted_prompt_tokens(limit)
    before = granted_prompt_tokens(limit)
    for _ in range(20):
        limit.observe_step(100, 0.012)
    assert granted_prompt_tokens(limit) == before


def test_decoding_rows_are_never_limited():
    limit = InterTokenLatencyLimit(0.001)
    observe_step_of(limit, 4, 2000, 1.0)
    limit.take(prompt_of(MIN_PROMPT_TOKENS), MIN_PROMPT_TOKENS)
    row = sequence(prompt=range(3), output=[7], planned=3, state=SequenceState.RUNNING)
    assert limit.allow(row, 1) == 1
    assert limit.allow(prompt_of(9), 9) == 0


def decoding(token=7, **fields):
    """Return a running sequence whose last token no step has computed. token: UNKNOWN or known."""
    tokens = {"prompt": range(3), "output": [token], "planned": 3, "plain_len": 99}
    return sequence(state=SequenceState.RUNNING, **tokens | fields)


def test_steps_of_a_pipeline_share_the_decoding_sequences():
    limit = PipelineLimit(3, queue := Fifo(), lambda: serialized)
    queue.push(sequence(prompt=range(9)))
    serialized = False
    rows = [decoding() for _ in range(7)]
    limit.begin_step(8)
    taken = [limit.allow(row, 1) and not limit.take(row, 1) for row in rows]
    assert taken == [True] * 3 + [0] * 4, "a third of those that run"
    assert limit.free_decode_rows() == 0
    assert limit.allow(sequence(prompt=range(9), state=SequenceState.RUNNING), 9) == 9, "a prompt"
    serialized = True
    limit.begin_step(8)
    assert limit.left == limit.free_decode_rows() == 7


def test_a_row_follows_that_of_its_group_before_its_token_is_known():
    """Three stages, so three groups: a sequence has a row in one of three steps."""
    limit = PipelineLimit(3, Fifo(), lambda: False)
    row, chunk = decoding(), sequence(prompt=range(9000), state=SequenceState.RUNNING)
    limit.begin_step(3)
    limit.take(row, 1)
    limit.take(chunk, 3000)
    row.planned += 1
    row.tokens.append(UNKNOWN)
    for step in range(2):
        limit.begin_step(3)
        assert limit.postponed() == {row}
        assert limit.allow(row, 1) == 0, step
        assert limit.allow(chunk, 1) == 1, "no token is read"
    limit.begin_step(3)
    assert not limit.postponed()
    assert limit.allow(row, 1) == 1
    limit.take_each_decode_row([Row(row, 4, 1, Wants.TOKEN)])
    row.planned += 1
    row.tokens.append(UNKNOWN)
    for _ in range(3):
        limit.begin_step(3)
    assert limit.allow(row, 1) == 0, "two of its rows are in flight"
    row.tokens[-2] = 7
    assert limit.allow(row, 1) == 1
    limit.begin_step(1)
    limit.take(row, 1)
    limit.begin_step(1)
    assert not limit.postponed()
    assert limit.allow(row, 1) == 1, "alone it has a row in each step"
    limit.take(row, 1)
    row.planned += 1
    row.tokens.append(UNKNOWN)
    limit.begin_step(1)
    assert limit.postponed() == {row}, "but no third one in flight"


def test_rows_that_need_their_token_on_the_host_wait_for_it():
    limit = PipelineLimit(2, Fifo(), lambda: False)
    through_host = PipelineLimit(2, Fifo(), lambda: False, sends_tokens=False)
    for one in (limit, through_host):
        one.begin_step(1)
    plain, drafted, thinks = decoding(UNKNOWN), decoding(UNKNOWN, plain_len=0), decoding()
    thinks.request = request(thinking=ThinkingBudget(9, (1,)))
    assert limit.allow(plain, 1) == 1
    assert limit.allow(drafted, 2) == 0
    assert through_host.allow(plain, 1) == through_host.free_decode_rows() == 0
    limit.take_each_decode_row([Row(thinks, 3, 1, Wants.TOKEN)])
    thinks.tokens.append(UNKNOWN)
    thinks.planned += 1
    limit.begin_step(1)
    assert limit.postponed() == {thinks}
    assert limit.allow(thinks, 1) == 0
    thinks.tokens[-1] = 5
    limit.begin_step(1)
    assert not limit.postponed()
    assert limit.allow(thinks, 1) == 1


def test_steps_of_a_pipeline_share_a_prompt():
    serialized, whole = False, 10_000
    limit = PipelineLimit(3, Fifo(), lambda: serialized)
    limit.begin_step(1)
    allow = lambda **seq: limit.allow(sequence(**seq), whole)  # noqa: E731
    assert allow(prompt=range(3000)) == allow(prompt=range(3000), planned=1000) == 1000
    assert allow(prompt=range(3000), cached=1500, planned=1500) == 500
    assert allow(prompt=range(300)) == PipelineLimit.least_share
    images = sequence(prompt=range(3000))
    images.request = request(media=(MediaItem("image", b"1", 5, 2, ((0, 2),), ()),))
    assert limit.allow(images, whole) >= whole
    undivided = PipelineLimit(3, Fifo(), lambda: False, divides=False)
    undivided.begin_step(1)
    assert undivided.allow(sequence(prompt=range(3000)), whole) >= whole
    serialized = True
    limit.begin_step(1)
    assert allow(prompt=range(3000)) >= whole


# -- a new budget -------------------------------------------------------------------------------


def test_a_new_budget_needs_no_change_elsewhere():
    budget = OneLongRow()
    run = Run(
        Setup(more=[budget]), [request(f"r{i}", range(10 * i, 10 * i + 5), 9) for i in range(4)]
    )
    for one in run.requests:
        run.add(one)
    plan = run.scheduler.plan()
    assert [row.count for row in plan.rows] == [5]
    run.model.submit(plan)
    run.scheduler.apply(plan, run.model.wait())
    run.scheduler.observe_step(5, 9.0)
    plan = run.scheduler.plan()
    assert [row.count for row in plan.rows] == [1]


def test_a_part_is_in_each_list_whose_contract_it_implements():
    door, isolation, budget = AdmissionControl(), FaultIsolationLimit(), TokenBudget(4)
    lists = by_contract([door, isolation, budget])
    assert lists["budgets"] == [door, isolation, budget]
    assert lists["admissions"] == lists["listeners"] == [door, isolation]
    assert lists["resources"] == []
