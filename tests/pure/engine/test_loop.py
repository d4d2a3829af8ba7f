"""The engine over a fake executor: every accepted sequence ends once, whatever the executor does."""

import pytest

from quire.core.block_pool import BlockPool
from quire.core.kv_cache import KVCache
from quire.core.limits.seats import SeatLimit
from quire.core.limits.tokens import TokenBudget
from quire.core.order.fifo import Fifo
from quire.core.scheduler import Scheduler
from quire.core.types import Request, StepResult, Stop
from quire.engine.loop import Engine
from quire.errors import TooLong
from quire.executors.fake import Executor


def next_token(tokens):
    return (sum(tokens) * 31 + len(tokens)) % 50


def engine_over(executor, depth=1):
    kv = KVCache(BlockPool(64), 4)
    scheduler = Scheduler(
        kv, [TokenBudget(16), SeatLimit(8)], Fifo(), max_seqs=8, max_len=100, steps_in_flight=depth
    )
    return Engine(scheduler, executor, steps_in_flight=depth, check=True)


def request(name, prompt=(1, 2, 3), max_tokens=5, **more):
    return Request(id=name, prompt=tuple(prompt), stop=Stop(max_tokens), **more)


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
def test_a_failed_step_ends_its_rows_and_the_engine_goes_on(depth, where):
    engine = engine_over(Faulty(**{where: [3]}), depth)
    engine.add(request("a"))
    engine.add(request("b"))
    ends = [u for u in drain(engine) if u.finish]
    assert {u.request_id: u.finish for u in ends} == {"a": "error", "b": "error"}
    assert all("RuntimeError" in u.error for u in ends)
    assert engine.stats().held_blocks == 0
    engine.add(request("c"))
    updates = drain(engine)
    assert [t for u in updates for t in u.token_ids] == expected((1, 2, 3), 5)


def test_one_row_s_error_leaves_the_others_alone():
    class OneBad(Executor):
        def submit(self, plan):
            result = super().submit(plan).wait()
            errors = {
                i: "not finite"
                for i, row in enumerate(plan.rows)
                if row.seq.request.id == "bad" and row.samples
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
    with pytest.raises(TooLong, match=r"max_model_len|num_gpu_blocks_override"):
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
def test_an_interrupted_submit_costs_its_rows_and_the_engine_goes_on(depth):
    engine = engine_over(Interrupted(submit=[2]), depth)
    engine.add(request("a"))
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    engine.add(request("c"))
    updates = drain(engine)
    ends = {u.request_id: (u.finish, u.error) for u in updates if u.finish}
    assert ends["a"][0] == "error"
    assert "KeyboardInterrupt" in ends["a"][1]
    assert ends["c"] == ("length", None)
    assert [t for u in updates if u.request_id == "c" for t in u.token_ids] == expected(
        (1, 2, 3), 5
    )
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
    engine.settle()
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

        def forget_kv(self):
            self.forgotten += 1

    executor = Counts(next_token)
    engine = engine_over(executor, depth)
    engine.add(request("a"))
    engine.step()
    engine.step()
    assert not engine.forget_kv()
    engine.abort("a")  # with depth 2 its last step is still under way
    assert engine.forget_kv()
    assert executor.forgotten == 1


def test_who_is_aboard_is_told_before_the_step_that_takes_them():
    told = []

    class Noting(Executor):
        def submit(self, plan):
            told.append(("step", sorted(row.seq.request.id for row in plan.rows)))
            return super().submit(plan)

    engine = engine_over(Noting(next_token))
    engine.call_when_boarding(lambda ids: told.append(("aboard", sorted(ids))))
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
