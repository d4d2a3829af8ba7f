"""Numbers of drafts follow acceptance and step times; rows without drafts stay as quick."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import pytest

from quire.core.scheduling.draft_costs import DraftCosts
from quire.core.scheduling.draft_trials import LOSS_SHARE, DraftTrials
from quire.core.scheduling.drafting import LAST_WAIT, Drafting
from quire.core.scheduling.limits.base import NO_BOUND
from quire.core.scheduling.order.fair import OUTPUT_COST, FairQueue
from quire.core.scheduling.order.fifo import Fifo
from quire.core.types import DraftCounts, StepPlan, StepResult, StopConditions
from quire.engine.core.engine_core import EngineCore
from quire.executors.fake import Executor
from tests.pure.core.builders import request, sequence
from tests.pure.core.proposing_executor import ProposingExecutor
from tests.pure.core.workload import Setup


def next_token(tokens):
    return (tokens[-1] * 7 + len(tokens) * 13) % 997 + 3


def proposer(acceptance):
    """Propose what the model generates; each token is right with a probability, by length."""

    def propose(seq, tokens):
        rng = random.Random(f"{seq.request.id} {len(tokens)}")
        found, wrong = list(tokens), False
        for _ in range(8):
            wrong = wrong or rng.random() >= acceptance(len(tokens))
            found.append(next_token(found) + wrong)
        return found[len(tokens) :]

    return propose


def memory_bound(rows, tokens):
    """Milliseconds of a step of a GPU: the first 200 tokens cost the same."""
    return 4.0 * max(1.0, tokens / 200) + 0.002 * tokens


def compute_bound(rows, tokens):
    """Milliseconds of a step in which every token costs about as much."""
    return 10.0 + 6.0 * tokens


class Simulation:
    """Runs requests, with the time that steps would take, two of them in flight."""

    def __init__(
        self, rows, acceptance, cost, *, drafts=7, tokens=400, model=False, host=0.1,
        most=NO_BOUND, seats=512, turns=1,
    ):  # fmt: skip
        """most: rows of a step with drafts. turns: of as many sequences, for the cache."""
        setup = Setup(
            blocks=turns * rows * 64, block_size=16, budget=8192, slots=seats, max_rows=seats,
            depth=2,
        )  # fmt: skip
        setup.draft_rows = most
        setup.drafts, setup.adaptive, setup.model_proposes = drafts, True, model
        propose = proposer(acceptance)
        setup.proposer = propose if drafts else None
        self.scheduler, _, _ = setup.build()
        self.executor = ProposingExecutor(next_token, propose) if model else Executor(next_token)
        self.cost, self.host = cost, host
        self.seconds, self.generated, self.drafts, self.flying = 0.0, 0, [], []
        for i in range(rows):
            one = request(f"r{i}", (i + 5, 1, 2), stop=StopConditions(tokens))
            self.scheduler.add(one)

    def result(self, plan):
        """Return the result of a step, with proposals of a model if it has one."""
        return self.executor.submit(plan).wait()

    def run(self):
        """Return tokens per second."""
        while self.flying or not self.scheduler.idle:
            waits = self.flying and self.scheduler.awaits_result
            if not self.scheduler.idle and len(self.flying) < 2 and not waits:
                plan = self.scheduler.plan()
                gap = 0.0 if self.flying else self.host
                self.flying.append((plan, self.result(plan), gap))
                continue
            self.apply(*self.flying.pop(0))
        return self.generated / self.seconds

    def apply(self, plan, result, gap):
        updates = self.scheduler.apply(plan, result)
        tokens = sum(row.count for row in plan.rows)
        seconds = (self.cost(len(plan.rows), tokens) + gap + 0.2 * plan.proposals) if tokens else 0
        prompts = sum(row.count for row in plan.rows if not row.start)
        self.scheduler.observe_step(prompts, seconds)
        self.seconds += seconds
        self.generated += sum(len(update.token_ids) for update in updates)
        self.drafts.append(plan.num_drafts)


def speedup(rows, acceptance, cost, **how):
    off = Simulation(rows, acceptance, cost, drafts=0, **how).run()
    return Simulation(rows, acceptance, cost, **how).run() / off


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", [False, True])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("rows", [1, 8, 48])
def test_drafts_cost_little_where_they_bring_nothing(rows, acceptance, cost, model):
    assert speedup(rows, lambda _: acceptance, cost, model=model, tokens=300) > 0.95


@pytest.mark.parametrize("rows", [4, 8, 32])
def test_drafts_that_fail_cost_little_where_the_host_is_slow(rows):
    """The step behind one with drafts waits for the host for longer than a step takes: that is a
    loss of the drafts, and what is lost in all is bounded, from the first step of an engine on."""
    small = lambda rows, tokens: 0.64 + 0.016 * tokens  # noqa: E731
    assert speedup(rows, lambda _: 0.0, small, host=0.8, tokens=250) > 0.972


def test_trials_end_where_a_share_of_the_steps_is_lost():
    trials, lost = DraftTrials(), 0.0
    for _ in range(2000):
        trials.begin_step(8)
        if trials.allowed:
            trials.count_step(1.5, 1.0)
            lost += 0.5
    assert 0.9 * (2 + 2000 * LOSS_SHARE) < lost < 1.1 * (2 + 2000 * LOSS_SHARE)
    trials.count_rows(3, 8, left_out=False)
    assert trials.allowed, "accepted drafts pay for further ones"


@pytest.mark.parametrize(("rows", "least"), [(1, 3.0), (8, 2.5), (48, 1.2)])
@pytest.mark.parametrize("model", [False, True])
def test_accepted_drafts_pay_where_tokens_are_cheap(rows, least, model):
    assert speedup(rows, lambda _: 0.95, memory_bound, model=model) > least * (0.7 if model else 1)


@pytest.mark.parametrize("rows", [1, 8])
def test_what_any_draft_costs_is_not_taken_for_the_price_of_each(rows):
    """A step with drafts takes longer, and each draft hardly anything: two drafts do not pay, so
    that more have to be tried."""
    cost = lambda rows, tokens: 1.0 + 0.002 * tokens + 0.4 * (tokens > rows)  # noqa: E731
    assert speedup(rows, lambda _: 0.95, cost, tokens=250) > 2.0


@pytest.mark.parametrize("model", [False, True])
def test_a_change_of_acceptance_is_followed(model):
    """Nothing is accepted until a sequence has 300 tokens, then all, then nothing again."""
    acceptance = lambda length: float(300 <= length < 600)  # noqa: E731
    run = Simulation(1, acceptance, memory_bound, tokens=900, model=model)
    run.run()
    lengths = len(run.drafts)
    begin = next(i for i in range(280, lengths) if run.drafts[i] > 3)
    assert begin < 300 + LAST_WAIT + 10
    assert sum(run.drafts[200:280]) < 10
    assert sum(run.drafts[-100:]) < 30


def test_a_change_of_step_times_is_followed():
    """Each token costs a step's time from some step on: no draft pays any longer."""
    run = Simulation(8, lambda _: 0.8, memory_bound, tokens=900)
    steps = iter(range(10**6))
    run.cost = lambda rows, tokens: (memory_bound if next(steps) < 150 else compute_bound)(
        rows, tokens
    )
    run.run()
    assert sum(run.drafts[100:140]) > 40
    assert sum(run.drafts[150 + LAST_WAIT : 350]) < 0.2 * sum(run.drafts[0:140])


def test_drafts_count_as_work_for_a_tenant():
    """A row of one token and two drafts: the token costs what an output does, a draft what a prompt
    token does, whether it was accepted or not."""
    queue = FairQueue(Fifo)
    for tenant in (b"a", b"b"):
        queue.push(sequence(range(10), tenant=tenant))
    seq = queue.pop()
    seq.tokens += [1, 2, 3]
    seq.planned = seq.computed = 12
    before = queue.virtual_counter(seq.request.tenant)
    queue.charge_service()
    assert queue.virtual_counter(seq.request.tenant) - before == 3 * OUTPUT_COST
    seq.tokens += [4, 5]
    seq.verified_drafts, seq.accepted_drafts = 2, 1
    queue.charge_service()
    assert queue.virtual_counter(seq.request.tenant) - before == 4 * OUTPUT_COST + 2


def test_rows_without_drafts_keep_two_steps_in_flight():
    run = Simulation(4, lambda _: 0.0, memory_bound, tokens=300)
    overlapped, plan = [], run.scheduler.plan
    run.scheduler.plan = lambda: (overlapped.append(bool(run.flying)), plan())[1]
    run.run()
    assert sum(overlapped) > 0.9 * len(overlapped)


def engine_of(**how):
    setup = Setup(depth=2, drafts=4, adaptive=True, proposer=proposer(lambda _: 1.0), **how)
    scheduler, _, _ = setup.build()
    ticks = count()  # so steps with drafts take no longer
    clock = lambda: float(next(ticks))  # noqa: E731
    return EngineCore(scheduler, Executor(next_token), steps_in_flight=2, check=True, clock=clock)


def finished(engine):
    updates = []
    while not engine.idle:
        updates += engine.step()
    return updates


def test_the_engine_awaits_steps_with_drafts_and_plans_none_without_rows():
    engine, rows = engine_of(), []
    submit = engine._executor.submit
    engine._executor.submit = lambda plan: (rows.append(len(plan.rows)), submit(plan))[1]
    engine.add(request("a", (5, 1, 2), 60))
    finished(engine)
    assert 0 not in rows[:-1]
    assert len(rows) < 40


def test_updates_and_counters_have_the_counts():
    engine = engine_of()
    engine.add(request("a", (5, 1, 2), 40, n=2))
    engine.add(request("off", (6, 1, 2), 40, speculates=False))
    engine.add(request("held", (7, 1, 2), 40, hold=True))
    updates = finished(engine)
    last = {update[:2]: update.draft_counts for update in updates if update.finish}
    assert last["off", 0] is last["held", 0] is None
    total = engine.snapshot().counters.draft_counts
    assert total.rows == sum(one.rows for one in last.values() if one)
    assert total.tokens == sum(one.tokens for one in last.values() if one) >= sum(total.accepted)
    assert list(total.accepted) == sorted(total.accepted, reverse=True)
    for key in (("a", 0), ("a", 1)):
        own = [update for update in updates if update[:2] == key]
        accepted = sum(len(one.token_ids) - 1 for one in own if one.token_ids)
        assert sum(last[key].accepted) == accepted > 10
        counts = [one.draft_counts for one in own if one.draft_counts is not None]
        assert [one.rows for one in counts] == sorted(one.rows for one in counts)
    engine.release("held")


def test_a_prediction_has_drafts_without_a_method():
    def run(prediction):
        scheduler, _, _ = Setup(drafts=8, adaptive=True).build()
        engine = EngineCore(scheduler, Executor(next_token), check=True)
        engine.add(request("a", (5, 1, 2), 60, prediction=prediction))
        updates = finished(engine)
        return [token for one in updates for token in one.token_ids], updates, engine

    text, _, plain = run(())
    again, updates, engine = run(tuple(text))
    assert again == text
    assert engine.snapshot().counters.steps < plain.snapshot().counters.steps / 3
    assert plain.snapshot().counters.draft_counts == DraftCounts()
    assert updates[-1].draft_counts.rows > 5


def test_no_sequence_is_longer_with_drafts_than_the_drafter_allows():
    scheduler, _, _ = Setup(drafts=4, proposer=proposer(lambda _: 1.0)).build()
    scheduler._drafting._max_len = 30
    engine = EngineCore(scheduler, Executor(next_token), check=True)
    engine.add(request("a", (5, 1, 2), 60))
    lengths, submit = [], engine._executor.submit
    engine._executor.submit = lambda plan: (
        lengths.extend(row.start + row.count for row in plan.rows if row.drafts),
        submit(plan),
    )[1]
    finished(engine)
    assert max(lengths) < 30 < 60


def test_a_step_that_measures_plain_time_has_no_passes_of_a_model():
    drafting = Drafting(None, max_drafts=3, model=True)
    drafting.rows, drafting.plain_step, seq = 1, 5, sequence()
    drafting.add(seq.request, [seq])
    made = {}
    for drafting.step in range(4, 8):
        made[drafting.step] = drafting.end_plan(1, 0) > 0
    assert made == {4: False, 5: False, 6: True, 7: True}


def test_a_model_makes_no_drafts_where_no_sequence_has_any():
    drafting = Drafting(None, max_drafts=3, model=True, adaptive=False)
    quiet = sequence()
    drafting.add(replace(quiet.request, speculates=False), [quiet])
    assert drafting.end_plan(1, 0) == 0
    drafting.add(quiet.request, [quiet])
    assert drafting.end_plan(1, 0) == 3


def verifying(rows, tokens):
    """Milliseconds of a step of an 8B model on a GPU whose drafts are a head's: what a step with
    drafts costs at all, and little for each of them."""
    return 3.6 + 0.035 * rows + (0.8 + 0.012 * (tokens - rows) if tokens > rows else 0.0)


@pytest.mark.parametrize(("rows", "least"), [(1, 1.9), (8, 1.7), (32, 1.62), (64, 1.54)])
def test_the_drafts_of_a_head_are_soon_as_many_as_pay(rows, least):
    """Neither a first draft that pays little nor one that failed once ends the others, and numbers
    of rows that are left when some have ended are not measured one by one."""
    how = {"model": True, "drafts": 3, "tokens": 300}
    off = Simulation(rows, lambda _: 0.8, verifying, **how | {"drafts": 0})
    on = Simulation(rows, lambda _: 0.8, verifying, **how)
    assert on.run() / off.run() > least


def test_steps_that_the_machine_delays_do_not_end_the_drafts_of_a_head():
    """A third of the steps take half as long again, with any number of drafts."""
    rng = random.Random(1)
    delayed = lambda rows, tokens: verifying(rows, tokens) * rng.choice([1, 1, 1.5])  # noqa: E731
    run = Simulation(8, lambda _: 0.8, delayed, model=True, drafts=3, tokens=900)
    run.run()
    counts = run.scheduler.draft_counts
    assert counts.tokens > 2.5 * counts.rows


@pytest.mark.parametrize(("rows", "acceptance"), [(1, 0.9), (8, 0.7), (8, 0.9), (16, 0.8)])
def test_drafts_have_the_price_of_one_wait_for_the_host(monkeypatch, rows, acceptance):
    """The first of several steps with drafts is planned early, and the wait of the next is its."""
    cost, host, waits = lambda rows, tokens: 4.0 + 0.03 * tokens, 2.0, set()

    def observe(costs, rows, drafts, seconds):
        waits.add(round(seconds - cost(rows, rows + drafts), 6))
        observed(costs, rows, drafts, seconds)

    observed = DraftCosts.observe_drafts
    monkeypatch.setattr(DraftCosts, "observe_drafts", observe)
    Simulation(rows, lambda _: acceptance, cost, drafts=8, tokens=300, host=host).run()
    assert waits == {host}


@pytest.mark.parametrize(("rows", "acceptance"), [(32, 0.9), (64, 0.6)])
def test_drafts_that_seem_to_pay_cost_little_if_they_do_not(rows, acceptance):
    """Prompts in between, other steps than those that were measured, and a host that is slower than
    the device: what drafts have lost ends them, whatever they promise."""

    def run(drafts):
        one = Simulation(
            rows, lambda _: acceptance, small, drafts=drafts, tokens=128, model=drafts > 0,
            host=0.4 + 0.03 * rows, most=256, seats=rows, turns=4,
        )  # fmt: skip
        lengths = random.Random(5)
        for i in range(3 * rows):
            tokens = StopConditions(lengths.randint(64, 192))
            one.scheduler.add(request(f"later {i}", (i + 1005, 1, 2), stop=tokens))
        return one.run()

    small = lambda rows, tokens: 0.62 + 0.012 * tokens + 0.05 * (tokens > rows)  # noqa: E731
    assert run(3) / run(0) > 0.955


def test_the_step_behind_an_awaited_one_is_planned_before_its_updates_are_read():
    setup = Setup(blocks=64, block_size=16, budget=64, slots=4, depth=2)
    setup.drafts, setup.proposer = 3, proposer(lambda _: 1.0)
    scheduler, _, _ = setup.build()
    engine = EngineCore(scheduler, Executor(next_token), steps_in_flight=2, check=True)
    engine.add(request("a", (5, 1, 2), stop=StopConditions(60)))
    several = 0
    while not engine.empty:
        updates = engine.step()
        if updates and len(updates[0].token_ids) > 1 and not scheduler.idle:
            several += 1
            assert engine._in_flight, "the device has work while the updates are read"
    assert several > 5


def looks_of(run):
    """Run a simulation. Returns by step how many sequences ran, how many were looked at, drafts."""
    found, drafting, plan = [], run.scheduler._drafting, run.scheduler.plan
    choose, looks = drafting.choose, count()

    def counted(seq):
        next(looks)
        return choose(seq)

    def planned():
        running, before = len(run.scheduler._running), next(looks)
        made = plan()
        found.append((running, next(looks) - before - 1, made.num_drafts))
        return made

    drafting.choose, run.scheduler.plan = counted, planned
    run.run()
    return found


def test_no_sequence_is_looked_at_in_a_step_without_room_for_drafts():
    run = Simulation(32, lambda _: 0.9, memory_bound, tokens=60, most=32)
    steps = [one for one in looks_of(run) if one[0] == 32]
    assert len(steps) > 40
    assert all(looks == drafts == 0 for _, looks, drafts in steps)


@pytest.mark.parametrize("rows", [16, 64, 200])
def test_few_sequences_are_looked_at_where_nothing_is_accepted(rows):
    """A look costs the host several rows: old rules looked at every one of 200 in every step, as
    long as there was room for a few drafts."""
    run = Simulation(rows, lambda _: 0.0, memory_bound, tokens=150, most=256)
    steps = [one for one in looks_of(run) if one[0] == rows]
    assert sum(looks for _, looks, _ in steps) <= len(steps) * max(rows / 64, 1) + 4 * rows
    assert sum(drafts > 0 for *_, drafts in steps) < len(steps) / 6


def test_a_model_proposes_nothing_that_no_step_has_room_for():
    drafting = Drafting(None, max_drafts=3, model=True, step_rows=256)
    seq = sequence()
    drafting.add(seq.request, [seq])
    made = {}
    for step, (running, rows) in enumerate([(0, 9), (9, 250), (250, 256), (256, 512)], 1):
        drafting.begin_plan(step, running, 0)
        made[step] = drafting.end_plan(rows, 0) > 0
    assert made == {1: True, 2: True, 3: False, 4: False}


def test_drafts_behind_a_row_without_a_token_do_not_keep_its_sequence():
    """The row in flight with drafts is stale, and the sequence has the next one."""
    setup = Setup(depth=2, drafts=3, adaptive=False, proposer=proposer(lambda _: 1.0))
    scheduler, _, _ = setup.build()
    engine = EngineCore(scheduler, Executor(next_token), steps_in_flight=2, check=True)
    engine.add(request("a", (5, 1, 2), stop=StopConditions(20)))
    submit, lost = engine._executor.submit, []

    def losing(plan):
        result = submit(plan)
        if not lost:
            lost.append(plan)
            engine._executor._tokens[plan.rows[0].seq.slot].pop()
            result._result = StepResult([()])
        lost.append(plan.num_drafts)
        return result

    engine._executor.submit = losing
    for _ in range(100):
        engine.step()
    assert lost[2] > 0, "the step in flight behind the lost token has drafts"
    assert engine.idle


def test_rows_of_a_step_that_are_alike_are_counted_as_if_one_by_one():
    """In the counts and in the acceptance of each tenant; that of all is of all rows together."""
    rows = [(b"a", 3, 2)] * 5 + [(b"b", 2, 0)] * 3
    found = []
    for steps in ([rows], [[one] for one in rows]):
        drafting = Drafting(None, max_drafts=3, model=True)
        drafting.begin_plan(1, len(rows), 0)
        for one in steps:
            for tenant, drafts, accepted in one:
                seq = sequence(tenant=tenant)
                drafting.add(seq.request, [seq])
                drafting.record(seq, drafts, accepted)
            drafting.end_result(StepPlan(1, ()))
        found.append((drafting.total, drafting._means, drafting._tenant_means))
        assert drafting._trials._looks == pytest.approx(1 + 10)
        drafting.end_result(StepPlan(2, ()))
        assert drafting.total == found[-1][0], "counted once"
    assert found[0][0] == found[1][0] == DraftCounts(8, 21, (5, 5))
    assert 0.4 < found[0][1][0] < found[0][2][b"a"][0]
    for tenant, means in found[0][2].items():
        assert means == pytest.approx(found[1][2][tenant])
        assert means != [0.4] * 3
