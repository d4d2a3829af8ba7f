"""The runner on a GPU: nothing waits in a step, errors end their rows, memory stands still."""

import math
import warnings

import pytest
import torch

from quire.core.types import Row
from tests.cpu.engine_of import request, run
from tests.cpu.test_paths import spoils
from tests.gpu.test_invariance import WIDE, engine_of


def drain(engine):
    out = {}
    while not engine.idle:
        for u in engine.step():
            out.setdefault((u.request_id, u.index), []).extend(u.token_ids)
    engine.drain()
    return out


def add(engine, count, tokens, **params):
    for i in range(count):
        engine.add(request(str(i), range(3 + i, 20 + i), tokens, **params))


@pytest.fixture
def no_waiting():
    """Torch raises at every operation that would wait for the device."""
    with warnings.catch_warnings():  # once in a process, and here all warnings are errors
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")

    def within(engine):
        lane = engine._executor.runner.worker
        real = engine._executor.submit

        def submit(plan):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return real(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        engine._executor.submit = submit
        return lane

    yield within
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"logprobs": 2},
        {"repetition_penalty": 1.2, "logit_bias": {5: 3.0}},
        {"temperature": 1.1, "min_p": 0.1, "presence_penalty": 0.4, "logprobs": 0},
    ],
    ids=["greedy", "random", "logprobs", "penalties", "all"],
)
def test_nothing_waits_in_submit(no_waiting, params, eager):
    engine = engine_of(WIDE, depth=2, eager=eager, budget=64)
    add(engine, 7, 12, **params)
    no_waiting(engine)
    assert {len(tokens) for tokens in drain(engine).values()} == {12}


def test_a_row_whose_logits_are_not_finite_ends_and_no_other_does():
    engine = engine_of(WIDE, depth=2)
    want, _ = run(engine_of(WIDE, depth=2), [request("good", range(5, 25), 10)])
    engine.add(request("bad", range(40, 60), 10, logits_processors=[spoils]))
    engine.add(request("good", range(5, 25), 10))
    ends, out = {}, {}
    while not engine.idle:
        for u in engine.step():
            out.setdefault((u.request_id, u.index), []).extend(u.token_ids)
            if u.finish:
                ends[u.request_id] = (u.finish, u.error)
    assert ends["bad"][0] == "error"
    assert "not finite" in ends["bad"][1]
    assert ends["good"] == ("length", None)
    assert out["good", 0] == want["good", 0]


def test_a_non_finite_row_is_reported_inside_a_graph_too():
    engine = engine_of(WIDE, depth=2, prefix=False)
    add(engine, 3, 8)
    want = drain(engine)
    add(engine, 3, 8)
    assert drain(engine) == want
    model = engine._executor.runner.model
    kept = model.lm_head.weight.clone()
    add(engine, 3, 30)
    for _ in range(8):
        engine.step()
    with torch.no_grad():
        torch.cuda.synchronize()
        model.lm_head.weight.fill_(math.nan)
    errors = []
    while not engine.idle:
        errors += [u.error for u in engine.step() if u.finish]
    with torch.no_grad():
        model.lm_head.weight.copy_(kept)
    assert len(errors) == 3
    assert all("not finite" in error for error in errors)


def test_no_memory_is_allocated_from_the_driver_for_known_sizes():
    engine = engine_of(WIDE, depth=2, prefix=False)
    for _ in range(3):
        add(engine, 9, 12, temperature=0.7)
        drain(engine)
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(3):
        add(engine, 9, 12, temperature=0.7)
        drain(engine)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


def test_two_engines_of_one_process_do_not_touch_each_other():
    one, two = engine_of(WIDE, depth=2), engine_of(WIDE, depth=2)
    for engine in (one, two):
        add(engine, 4, 10)
    want = None
    for _ in range(60):
        one.step()
        two.step()
        if one.idle and two.idle:
            break
    for engine in (one, two):
        add(engine, 4, 10)
        got = drain(engine)
        assert want is None or got == want
        want = got


def test_a_plan_can_be_prepared_and_launched_by_hand():
    engine = engine_of(WIDE, depth=1)
    engine.add(request("a", range(9), 3))
    plan = engine._scheduler.plan()
    assert isinstance(plan.rows[0], Row)
    result = engine._executor.submit(plan).wait()
    assert len(result.token_ids[0]) == 1
    assert result.errors == {}


def test_a_sleeping_engine_returns_its_memory_and_wakes_when_used():
    engine = engine_of(WIDE, depth=2, num_blocks=4000)
    for _ in range(2):
        add(engine, 5, 12)
        want = drain(engine)
    before = torch.cuda.memory_allocated()
    assert engine.release_kv_memory()
    freed = before - torch.cuda.memory_allocated()
    assert freed >= 4000 * 16 * 2 * 2 * 16 * 4 * 2
    for _ in range(3):
        add(engine, 5, 12)
        assert drain(engine) == want
    assert torch.cuda.memory_allocated() >= before - freed // 2
