"""What every limit promises; one test for all of them, and what each is for."""

from __future__ import annotations

import copy

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
from quire.core.scheduling.limits.prefill_limits import (
    LongPrefillLimit,
    PartialPrefillLimit,
    PrefillChunkLimit,
)
from quire.core.scheduling.limits.shortest_prompt_first import ShortestPromptFirst
from quire.core.scheduling.limits.tenant_kv_quota import TenantKVQuota
from quire.core.scheduling.limits.token_budget import TokenBudget, WholePromptLimit
from quire.core.scheduling.order.fair import FairQueue
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.plan_builder import PlanBuilder
from quire.core.types import SequenceState, Wants
from quire.errors import TooLong
from tests.pure.core.made import request, sequence
from tests.pure.core.workload import Run, Setup


class OneLongRow(StepBudget, StepListener):
    """A budget that no hub names: one row of several tokens in a step, and none after a slow one."""

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


MAKERS = {
    "tokens": lambda k: TokenBudget(3 * k),
    "whole": lambda k: WholePromptLimit(3 * k),
    "seats": MaxSeqsLimit,
    "one long row": OneLongRow,
    "chunk": PrefillChunkLimit,
    "partial": PartialPrefillLimit,
    "long": lambda k: LongPrefillLimit(k, 5),
    "suspects": lambda k: suspects(k, marked=False, accused=0),
    "suspects, marked": lambda k: suspects(k, marked=True, accused=0),
    "suspects, accused": lambda k: suspects(k, marked=False, accused=k),
    "suspects, an open step": lambda k: suspects(k, marked=True, accused=k, waits=True),
    "door": lambda k: AdmissionControl(max_requests=k, max_tokens=9 * k, clock=lambda: 0.0),
    "kv share": lambda k: TenantKVQuota(FairQueue(Fifo), 4 * k, lambda tokens: tokens),
    "short first": lambda k: ShortestPromptFirst(Fifo(), lambda: 3 * k),
    "pace": lambda k: paced(k, known=False),
    "pace, known": lambda k: paced(k, known=True),
}


def suspects(number, *, marked, accused, waits=False):
    """Of the sequences that the tests make all are of one request, "r"."""
    limit = FaultIsolationLimit()
    if marked:
        limit.add_request(request("r", engine_crashes=1))
    limit.observe_step_failure([sequence(id=f"other{i}") for i in range(accused)])
    if waits:
        limit.begin_step(1)  # nobody of those on trial comes
    return limit


def paced(decoding, *, known):
    limit = InterTokenLatencyLimit(0.05)
    if known:
        limit.observe_step(1000, 0.05)
    limit.take_decode_rows(decoding)
    return limit


wishes = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 5), st.booleans()), min_size=1, max_size=8
)


def seqs_of(wishes):
    for prompt, planned, running in wishes:
        yield sequence(
            prompt=range(prompt),
            planned=min(planned, prompt - 1),
            state=SequenceState.RUNNING if running else SequenceState.WAITING,
        )


def state_of(limit):
    return dict(vars(limit))


def known_to(limit):
    """What a copy of a limit shares with it: sequences, and all else that is itself and no value."""
    held = [
        one for value in vars(limit).values() if isinstance(value, dict | list) for one in value
    ]
    found = [*held, *vars(limit).values()]
    return {id(one): one for one in found if type(one).__eq__ is object.__eq__}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@given(size=st.integers(1, 4), sequences=st.integers(1, 3), wishes=wishes)
def test_a_limit_allows_no_more_than_wanted_and_forgets_what_is_undone(
    make, size, sequences, wishes
):
    limit = make(size)
    limit.begin_step(sequences)
    for seq in seqs_of(wishes):
        for want in range(seq.pending + 1):
            before = state_of(limit)
            allowed = limit.allow(seq, want)
            assert 0 <= allowed <= want
            assert state_of(limit) == before, "allow() changed something"
            assert not (limit.full() and allowed), "full, and yet it allows"
            if allowed:
                limit.take(seq, allowed)
                limit.undo(seq, allowed)
                assert state_of(limit) == before
        n = limit.allow(seq, seq.pending)
        if n:
            limit.take(seq, n)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@given(size=st.integers(1, 4), wishes=wishes)
def test_slack_rows_are_granted_and_counted_like_any_other(make, size, wishes):
    limit = make(size)
    limit.begin_step(9)
    for seq in seqs_of(wishes):
        n = limit.allow(seq, seq.pending)
        if n:
            limit.take(seq, n)
    one = sequence(prompt=range(9), output=(1,), planned=9, state=SequenceState.RUNNING)
    other = copy.deepcopy(limit, known_to(limit))
    rows = min(limit.free_decode_rows(), 5)
    for _ in range(rows):
        assert limit.allow(one, 1) == 1
        limit.take(one, 1)
    other.take_decode_rows(rows)
    assert state_of(other) == state_of(limit)


@given(wishes)
def test_adding_a_row_to_a_draft_and_removing_it_is_nothing(wishes):
    limits = [
        PrefillChunkLimit(4),
        TokenBudget(20),
        MaxSeqsLimit(4),
        PartialPrefillLimit(1),
        LongPrefillLimit(1, 5),
    ]
    draft = PlanBuilder(limits, 9)
    for seq in seqs_of(wishes):
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


def test_whole_prompts_are_not_cut_but_recomputed_ones_may_be():
    limit = WholePromptLimit(10)
    seq = sequence(prompt=range(8))
    assert limit.allow(seq, 7) == 0
    assert limit.allow(seq, 8) == 8
    seq.planned = 4  # found in the prefix cache
    assert limit.allow(seq, 3) == 0
    assert limit.allow(seq, 4) == 4
    seq.preemptions = 1
    assert limit.allow(seq, 3) == 3


def test_a_prompt_beyond_the_budget_is_refused_when_it_may_not_be_cut():
    WholePromptLimit(10).check_request(request(prompt=range(10)))
    with pytest.raises(TooLong, match=r"11 tokens.*at most 10.*max_num_batched_tokens") as caught:
        WholePromptLimit(10).check_request(request(prompt=range(11)))
    assert caught.value.param == "prompt"


def test_long_prompts_come_in_pieces_unless_alone():
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


def short(limit):
    """A prompt that would take all that a step has, and is not long."""
    fits = min(max(limit.fitting_tokens, MIN_PROMPT_TOKENS), 20_000)
    return prompt_of(int(fits * LONG_PROMPT_STEPS))


def told(limit, rows, prompt_tokens, seconds):
    """A step of so many decoding rows was planned and applied; the next is being planned."""
    limit.observe_step(0, 0.004)
    limit.begin_step(rows + 1)
    limit.take_decode_rows(rows)
    limit.observe_step(prompt_tokens, seconds)
    limit.begin_step(rows + 1)


def granted(limit, rows=4):
    """Prompt tokens that the next step may have."""
    limit.begin_step(rows + 1)
    limit.take_decode_rows(rows)
    return limit.allow(short(limit), 100_000)


def run_full_steps(limit, fixed_s, token_s, steps, rows=4):
    """Steps that take all they are allowed, on a device with a fixed cost a step."""
    seconds = 0.0
    for _ in range(steps):
        tokens = granted(limit, rows)
        seconds = fixed_s + token_s * (tokens + rows)
        limit.observe_step(tokens, seconds)
    return seconds


def test_prompts_beside_decoding_rows_get_what_fits_the_target():
    limit = InterTokenLatencyLimit(0.050)
    told(limit, 4, 2000, 0.100)
    most = limit.allow(prompt_of(5000), 5000)
    assert 850 < most <= 1000
    limit.take(prompt_of(600), 600)
    assert limit.allow(prompt_of(5000), 5000) == most - 600


@pytest.mark.parametrize(
    ("rows", "fits", "tokens"), [(250, 1900, 2048), (48, 1100, 1024), (20, 700, 640)]
)
def test_a_step_beside_decoding_rows_fills_the_tiles_of_products(rows, fits, tokens):
    limit = InterTokenLatencyLimit(0.050)
    told(limit, rows, 2 * fits, 0.100)
    limit.take_decode_rows(rows)
    assert limit.allow(short(limit), 9000) + rows == tokens


@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.0, 22e-6), (0.02, 22e-6), (0.005, 2e-3)])
def test_steps_come_near_the_target_and_not_over_it_whatever_a_step_costs(fixed_s, token_s):
    limit = InterTokenLatencyLimit(0.050)
    limit.observe_step(8000, fixed_s + 8000 * token_s)
    seconds = run_full_steps(limit, fixed_s, token_s, 30)
    least = fixed_s + (MIN_PROMPT_TOKENS + 4) * token_s
    assert max(0.022, least) <= seconds <= max(0.055, least)


def test_prompts_get_all_they_want_while_nobody_decodes():
    limit = InterTokenLatencyLimit(0.050)
    told(limit, 0, 2000, 0.090)
    assert limit.allow(prompt_of(5000), 5000) == 5000


def test_a_prompt_gets_on_however_slow_the_device_is():
    limit = InterTokenLatencyLimit(0.050)
    told(limit, 1, 100, 10.0)
    assert limit.allow(short(limit), 5000) == MIN_PROMPT_TOKENS


def test_a_step_that_stalled_is_forgotten_after_some_full_ones():
    limit = InterTokenLatencyLimit(0.050)
    run_full_steps(limit, 0.02, 22e-6, 20)
    before = granted(limit)
    limit.observe_step(granted(limit), 9.0)
    assert granted(limit) < before / 2
    run_full_steps(limit, 0.02, 22e-6, 12)
    assert granted(limit) >= 0.75 * before


def test_a_step_with_few_prompts_teaches_nothing_of_many():
    limit = InterTokenLatencyLimit(0.050)
    limit.observe_step(2000, 0.100)
    granted(limit)
    before = granted(limit)
    for _ in range(20):
        limit.observe_step(100, 0.012)
    assert granted(limit) == before


def test_a_decoding_row_is_never_held_back():
    limit = InterTokenLatencyLimit(0.001)
    told(limit, 4, 2000, 1.0)
    limit.take(prompt_of(MIN_PROMPT_TOKENS), MIN_PROMPT_TOKENS)
    row = sequence(prompt=range(3), output=[7], planned=3, state=SequenceState.RUNNING)
    assert limit.allow(row, 1) == 1
    assert limit.allow(prompt_of(9), 9) == 0


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
