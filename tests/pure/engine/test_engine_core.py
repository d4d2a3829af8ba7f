"""The engine over a fake executor: every accepted sequence ends once, whatever the executor does."""

import random

import pytest

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.kv_cache import KVCache
from quire.core.scheduling.limits.base import by_contract
from quire.core.scheduling.limits.isolation_limit import TRIAL_STEPS, FaultIsolationLimit
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.scheduling.limits.token_budget import TokenBudget
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.scheduler import Scheduler
from quire.core.types import Request, StepResult, StopConditions, Wants
from quire.engine.core.engine_core import EngineCore
from quire.errors import EngineDead, HookFailed, TooLong
from quire.executors.fake import Executor


def next_token(tokens):
    return (sum(tokens) * 31 + len(tokens)) % 50


def engine_over(executor, depth=1):
    kv = KVCache(BlockPool(64), 4)
    scheduler = Scheduler(
        kv,
        Fifo(),
        **by_contract([FaultIsolationLimit(), TokenBudget(16), MaxSeqsLimit(8)]),
        max_seqs=8,
        max_len=100,
        steps_in_flight=depth,
    )
    return EngineCore(scheduler, executor, steps_in_flight=depth, check=True)


def request(name, prompt=(1, 2, 3), max_tokens=5, **more):
    return Request(id=name, prompt=tuple(prompt), stop=StopConditions(max_tokens), **more)


def drain(engine):
    updates = []
    for _ in range(500):
        if engine.idle:
            return updates
        updates += engine.step()
    raise AssertionError("the engine does not come to rest")


def expected(prompt, n):
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Faulty(Executor):
    """Raises at the chosen steps: when submitting, or when waited for."""

    def __init__(self, submit=(), wait=()):
        super().__init__(next_token)
        self.bad_submit, self.bad_wait = set(submit), set(wait)

    def submit(self, plan):
        done = super().submit(plan)
        if plan.step in self.bad_submit:
            raise RuntimeError("no device")
        return Bad() if plan.step in self.bad_wait else done


class Bad:
    def wait(self):
        raise RuntimeError("device fault")


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_come_in_order_and_end_once(depth):
    engine = engine_over(Executor(next_token), depth)
    for i in range(12):
        engine.add(request(str(i), prompt=range(1, 2 + 3 * i), max_tokens=3 + i))
    out = {}
    for update in drain(engine):
        out.setdefault(update.request_id, []).append(update)
    for i in range(12):
        tokens = [t for u in out[str(i)] for t in u.token_ids]
        assert tokens == expected(range(1, 2 + 3 * i), 3 + i)
        assert [u.finish for u in out[str(i)] if u.finish] == ["length"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["submit", "wait"])
def test_a_step_that_fails_once_is_repeated_with_the_same_outputs(depth, where, caplog):
    engine = engine_over(Faulty(**{where: [3]}), depth)
    engine.add(request("a"))
    engine.add(request("b", (1, 2)))
    engine.add(request("c", (3, 4), n=2))
    said = said_by(drain(engine))
    assert said["a", 0] == (expected((1, 2, 3), 5), "length", None)
    assert said["b", 0] == (expected((1, 2), 5), "length", None)
    assert said["c", 0] == said["c", 1] == (expected((3, 4), 5), "length", None)
    stats = engine.stats()
    assert (stats.failed_steps, stats.unattributed_failures, stats.failed_requests) == (1, 1, 0)
    assert stats.held_blocks == 0


class Poisoned(Executor):
    """Raises in steps of these requests from so many outputs on: when submitting, or later."""

    def __init__(self, where, **poison):
        super().__init__(next_token)
        self.where, self.poison = where, poison
        self.plans = []

    def submit(self, plan):
        self.plans.append([(row.seq.request.id, row.seq.index) for row in plan.rows])
        done = super().submit(plan)
        if not any(self.hits(row) for row in plan.rows):
            return done
        if self.where == "submit":
            raise RuntimeError("illegal access")
        return Bad()

    def hits(self, row):
        at = self.poison.get(row.seq.request.id)
        return at is not None and row.start + row.count - row.seq.prompt_len >= at


def said_by(updates):
    """The tokens of each sequence, and how it ended."""
    said = {}
    for u in updates:
        tokens, finish, fault = said.get((u.request_id, u.index), ([], None, None))
        assert finish is None, "it goes on behind its end"
        said[u.request_id, u.index] = (
            tokens + list(u.token_ids),
            u.finish,
            u.fault if u.finish == "error" else fault,
        )
    return said


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["submit", "wait"])
@pytest.mark.parametrize("seed", range(12))
def test_each_faulty_request_is_ended_and_no_other(depth, where, seed, caplog):
    draw = random.Random(f"{depth} {where} {seed}")
    names = [f"r{i}" for i in range(draw.randrange(1, 13))]
    poison = {name: draw.choice([-9, 0, 1, 4]) for name in draw.sample(names, min(len(names), 2))}
    executor = Poisoned(where, **poison)
    engine = engine_over(executor, depth)
    updates, todo = [], list(names)
    for _ in range(2000):
        if not todo and engine.idle:
            break
        if todo and draw.random() < 0.7:
            number = len(names) - len(todo)
            prompt = range(number, number + 1 + number % 4)
            engine.add(request(todo.pop(0), prompt, max_tokens=6, n=1 + number % 3))
        updates += engine.step()
    assert not todo
    assert engine.idle
    said = said_by(updates)
    for number, name in enumerate(names):
        prompt = list(range(number, number + 1 + number % 4))
        want = expected(prompt, 6)
        for index in range(1 + number % 3):
            tokens, finish, fault = said[name, index]
            if name in poison:
                assert (finish, fault) == ("error", "step")
                assert tokens == want[: min(len(tokens), max(poison[name], 0))]
            else:
                assert (tokens, finish) == (want, "length")
    stats = engine.stats()
    assert stats.failed_requests == len(poison)
    assert stats.held_blocks == stats.running == stats.waiting == 0


def test_a_trial_goes_as_far_as_the_step_that_raised(caplog):
    engine = engine_over(Poisoned("wait", bad=3))
    engine.add(request("bad", range(40), 9, read_prefix_cache=False))
    engine.add(request("good", range(3), 9))
    said = said_by(drain(engine))
    assert said["bad", 0] == (expected(range(40), 3), "error", "step")
    assert said["good", 0] == (expected(range(3), 9), "length", None)
    assert engine.stats().failed_steps == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_fail_only_together_are_not_ended(depth, caplog):
    class Together(Poisoned):
        def hits(self, row):
            return False

        def submit(self, plan):
            done = super().submit(plan)
            return Bad() if {("a", 0), ("c", 0)} <= {*self.plans[-1]} else done

    engine = engine_over(Together("wait"), depth)
    for name in "abcd":
        engine.add(request(name))
    said = said_by(drain(engine))
    assert set(map(str, said.values())) == {str((expected((1, 2, 3), 5), "length", None))}
    assert engine.stats().unattributed_failures > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_device_that_fails_with_every_request_blocks_no_request(depth, caplog):
    class Broken(Poisoned):
        def hits(self, row):
            return len(self.plans) > 3

    engine = engine_over(Broken("wait"), depth)
    for name in "abc":
        engine.add(request(name, max_tokens=9))
    with pytest.raises(EngineDead, match="with any request: device fault"):
        drain(engine)
    assert engine.stats().failed_requests == 0
    assert engine.stats().waiting == 3


def test_a_device_that_is_lost_ends_the_engine_at_once(caplog):
    class Lost(Poisoned):
        def recover(self):
            raise EngineDead("the device is lost")

    executor = Lost("wait", a=1)
    engine = engine_over(executor)
    engine.add(request("a"))
    engine.add(request("b"))
    with pytest.raises(EngineDead, match="lost"):
        drain(engine)
    assert len(executor.plans) == 2


def test_a_function_that_was_given_and_always_raises_costs_its_requests_and_not_the_engine(caplog):
    class Hook(Executor):
        def submit(self, plan):
            raise HookFailed("a logits processor raised")

    engine = engine_over(Hook(next_token))
    engine.add(request("a"))
    engine.add(request("b"))
    assert [(u.request_id, u.fault) for u in drain(engine)] == [("a", "step"), ("b", "step")]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_suspect_runs_its_first_steps_alone(depth):
    told = []
    executor = Poisoned("wait")
    engine = engine_over(executor, depth)
    engine.set_running_callback(lambda ids: told.append(sorted(set(ids))))
    engine.add(request("new"))
    for number, name in enumerate("abc"):
        spoken = ((7,) * number,) * 2
        engine.add(request(name, (1, 2, 3), 9, n=2, resumed_tokens=spoken, engine_crashes=1))
    engine.add(request("newer"))
    said = said_by(drain(engine))
    assert said["new", 0] == said["newer", 0] == (expected((1, 2, 3), 5), "length", None)
    for number, name in enumerate("abc"):
        steps = [at for at, rows in enumerate(executor.plans) if name in dict(rows)]
        first = [{one for one, _ in executor.plans[at]} for at in steps[:TRIAL_STEPS]]
        assert first == [{name}] * TRIAL_STEPS
        assert {*map(tuple, told)} >= {(name,)}
        want = expected([1, 2, 3, *(7,) * number], 9 - number)
        assert said[name, 0] == said[name, 1] == (want, "length", None)
    together = [{one for one, _ in rows} for rows in executor.plans]
    assert {"a", "b", "c"} in [one & {"a", "b", "c"} for one in together]
    assert told[-1] != ["c"]  # who is aboard is told anew when the trials are over


def test_a_suspect_that_fails_a_step_alone_is_ended(caplog):
    engine = engine_over(Poisoned("wait", b=0))
    for name in "ab":
        engine.add(request(name, engine_crashes=1))
    said = said_by(drain(engine))
    assert said["a", 0][1] == "length"
    assert said["b", 0] == ([], "error", "step")


def test_a_suspect_without_free_blocks_lets_others_finish():
    executor = Poisoned("wait")
    kv = KVCache(BlockPool(6), 4)
    limits = [FaultIsolationLimit(), TokenBudget(16), MaxSeqsLimit(8)]
    engine = EngineCore(
        Scheduler(kv, Fifo(), **by_contract(limits), max_seqs=8, max_len=24), executor, check=True
    )
    engine.add(request("old", range(12), 8))
    updates = engine.step()
    engine.add(request("big", range(16), 4, engine_crashes=1))
    said = said_by(updates + drain(engine))
    assert said["old", 0] == (expected(range(12), 8), "length", None)
    assert said["big", 0] == (expected(range(16), 4), "length", None)


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_suspect_that_is_aborted_delays_no_other_request(who, caplog):
    for at in range(12):
        engine = engine_over(Poisoned("wait", b=2), 2)
        for name in "abcd":
            engine.add(request(name, max_tokens=8))
        updates = []
        for _ in range(at):
            updates += engine.step()
        updates += engine.abort(who)
        said = said_by(updates + drain(engine))
        for name in {*"acd"} - {who}:
            assert said[name, 0] == (expected((1, 2, 3), 8), "length", None)
        assert not engine._scheduler.serialize_steps


def test_books_that_cannot_be_opened_refuse_the_request(monkeypatch):
    engine = engine_over(Executor(next_token))

    def breaks(request, kept):
        raise OverflowError("no time")

    monkeypatch.setattr(engine._time_accounting, "add_request", breaks)
    with pytest.raises(OverflowError):
        engine.add(request("a"))
    assert engine.idle
    engine.check()


def test_one_row_s_error_leaves_the_others_alone():
    class OneBad(Executor):
        def submit(self, plan):
            result = super().submit(plan).wait()
            errors = {
                i: "not finite"
                for i, row in enumerate(plan.rows)
                if row.seq.request.id == "bad" and row.wants is Wants.TOKEN
            }
            return type(self)._ready(StepResult(result.token_ids, errors=errors))

        class _ready:
            def __init__(self, result):
                self.wait = lambda: result

    engine = engine_over(OneBad(next_token))
    engine.add(request("bad"))
    engine.add(request("good"))
    updates = drain(engine)
    assert [(u.request_id, u.finish) for u in updates if u.finish] == [
        ("bad", "error"),
        ("good", "length"),
    ]
    assert [t for u in updates if u.request_id == "good" for t in u.token_ids] == expected(
        (1, 2, 3), 5
    )


def test_a_request_that_can_never_fit_is_refused_and_changes_nothing():
    engine = engine_over(Executor(next_token))
    with pytest.raises(TooLong, match=r"maximum context length|num_gpu_blocks_override"):
        engine.add(request("big", prompt=range(300)))
    assert engine.idle


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_at_any_step_ends_the_request_once(depth):
    for at in range(8):
        engine = engine_over(Executor(next_token), depth)
        engine.add(request("a", prompt=range(30), max_tokens=6))
        engine.add(request("b"))
        updates = []
        for _ in range(at):
            updates += engine.step()
        updates += engine.abort("a")
        assert engine.abort("a") == []
        updates += drain(engine)
        assert [u.finish for u in updates if u.request_id == "a" and u.finish] in (
            ["abort"],
            ["length"],
        )
        assert [t for u in updates if u.request_id == "b" for t in u.token_ids] == expected(
            (1, 2, 3), 5
        )
        assert engine.stats().held_blocks == 0


class Interrupted(Executor):
    """Ctrl-C arrives in the middle of the chosen steps: when submitting, or when waiting."""

    def __init__(self, submit=(), wait=()):
        super().__init__(next_token)
        self.in_submit, self.in_wait = set(submit), set(wait)

    def submit(self, plan):
        done = super().submit(plan)
        if plan.step in self.in_submit:
            raise KeyboardInterrupt
        if plan.step not in self.in_wait:
            return done
        return Twice(done)


class Twice:
    """Interrupted the first time it is waited for."""

    def __init__(self, done):
        self.done, self.asked = done, False

    def wait(self):
        if not self.asked:
            self.asked = True
            raise KeyboardInterrupt
        return self.done.wait()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupted_submit_is_made_again(depth, caplog):
    engine = engine_over(Interrupted(submit=[2]), depth)
    engine.add(request("a"))
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    engine.add(request("c"))
    updates = drain(engine)
    ends = {u.request_id: (u.finish, u.error) for u in updates if u.finish}
    assert ends == {"a": ("length", None), "c": ("length", None)}
    assert said_by(updates)["c", 0][0] == expected((1, 2, 3), 5)
    assert engine.stats().held_blocks == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupted_wait_loses_nothing(depth):
    engine = engine_over(Interrupted(wait=[2]), depth)
    engine.add(request("a"))
    updates, interrupts = [], 0
    while not engine.idle:
        try:
            updates += engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    assert [t for u in updates for t in u.token_ids] == expected((1, 2, 3), 5)


def test_steps_in_flight_of_sequences_that_are_gone_keep_no_blocks():
    engine = engine_over(Executor(next_token), depth=2)
    engine.add(request("a", max_tokens=50))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    assert not engine.idle  # a step of it is under way
    engine.drain()
    assert engine.idle
    assert engine.stats().held_blocks == 0
    engine.add(request("b", max_tokens=50))
    for _ in range(4):
        engine.step()
    engine.abort_sequence("b", 0)
    assert engine.reset_prefix_cache()


@pytest.mark.parametrize("depth", [1, 2])
def test_kv_memory_goes_back_once_all_has_ended_and_not_before(depth):
    class Counts(Executor):
        forgotten = 0

        def release_kv_memory(self):
            self.forgotten += 1

    executor = Counts(next_token)
    engine = engine_over(executor, depth)
    engine.add(request("a"))
    engine.step()
    engine.step()
    assert not engine.release_kv_memory()
    engine.abort("a")  # with depth 2 its last step is still under way
    assert engine.release_kv_memory()
    assert executor.forgotten == 1


def test_running_requests_are_published_before_their_step():
    told = []

    class Noting(Executor):
        def submit(self, plan):
            told.append(("step", sorted(row.seq.request.id for row in plan.rows)))
            return super().submit(plan)

    engine = engine_over(Noting(next_token))
    engine.set_running_callback(lambda ids: told.append(("aboard", sorted(ids))))
    for i in range(9):
        engine.add(request(str(i), max_tokens=2 + i))
    drain(engine)
    seated = [str(i) for i in range(6)]  # of three tokens each, in a step of 16
    assert told[:2] == [("aboard", seated), ("step", seated)]
    aboard = set()
    for kind, ids in told:
        aboard |= set(ids) if kind == "aboard" else set()
        assert set(ids) <= aboard
    assert "8" not in told[0][1]
