"""Constrained rows on the GPU: late masks give the tokens of the plain run and delay no other."""

import pytest
import torch

from quire.core.types import ThinkingBudget
from quire.runner.gpu.cuda_graphs import DecodeGraph
from tests.cpu.engine_of import run
from tests.cpu.made_grammars import END, Grammars, whole
from tests.cpu.test_structured import ENOUGH, RANDOM, bound, told, workload
from tests.gpu.test_invariance import WIDE, engine_of, watch_graphs


def made(**settings):
    return engine_of(WIDE, grammars=Grammars(), **settings)


def work():
    thinking = ThinkingBudget(4, ENOUGH)
    return [*workload(), bound("thinks", None, 20, thinking=thinking, seed=5, **RANDOM)]


@pytest.fixture(scope="module")
def want():
    out = {}
    for one in work():
        out |= told(run(made(prefix=False, budget=4000, eager=True), [one])[1])
    return out


def test_every_text_is_whole(want):
    asked = {one.id: one for one in work()}
    for (name, _), (tokens, ends, _) in want.items():
        assert ends[0][0] in ("stop", "length")
        text = tokens[:-1] if tokens[-1] == END else tokens
        form = asked[name].constraint
        assert form is None or whole(form.form, text), (name, tokens)


PATHS = {
    "graphs": dict(),
    "overlap": dict(depth=2),
    "overlap, eager": dict(depth=2, eager=True),
    "overlap, staggered": dict(depth=2, stagger=2),
    "three in flight": dict(depth=3, stagger=1),
    "overlap, small chunks": dict(depth=2, budget=9),
    "overlap, preempted": dict(depth=2, num_blocks=24, stagger=1, expect_preemption=True),
    "overlap, host tier": dict(depth=2, num_blocks=24, host_blocks=60, expect_preemption=True),
}


@pytest.mark.parametrize("name", PATHS)
def test_tokens_do_not_depend_on(want, name):
    settings = dict(PATHS[name])
    stagger, expected = settings.pop("stagger", 0), settings.pop("expect_preemption", False)
    engine = made(**settings)
    got = told(run(engine, work(), stagger=stagger)[1])
    for key, (tokens, ends, logprobs) in want.items():
        assert (key, got[key][:2]) == (key, (tokens, ends))
        for (ids, values), (ids_too, values_too) in zip(got[key][2], logprobs, strict=True):
            assert ids == ids_too
            assert values == pytest.approx(values_too, abs=1e-3)
    if expected:
        assert engine.stats().preemptions > 0


def test_further_runs_on_one_engine_give_the_same(want):
    engine = made(depth=2, prefix=False)
    for _ in range(3):
        for one in work():
            engine.add(one)
        updates = []
        while not engine.idle:
            updates += engine.step()
        engine.drain()
        out = told(updates)
        assert {key: value[:2] for key, value in out.items()} == {
            key: value[:2] for key, value in want.items()
        }


def test_only_steps_with_constrained_rows_are_sampled_outside_graphs():
    engine = made(depth=2)
    replayed = watch_graphs(engine)

    def parts():
        return {(key.part, key.kind) for key in replayed if isinstance(key, DecodeGraph)}

    run_on(engine, [bound(str(i), None, 9, ignore_eos=True) for i in range(5)])
    assert parts() == {("whole", "greedy")}
    run_on(engine, [bound(str(i), "lists", 30) for i in range(5)])
    assert parts() == {("whole", "greedy"), ("forward", None)}


def run_on(engine, requests):
    for one in requests:
        engine.add(one)
    while not engine.idle:
        assert not [u for u in engine.step() if u.error]
    engine.drain()


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": 2}, RANDOM], ids=["greedy", "logprobs", "random"]
)
def test_nothing_waits_but_for_the_tokens(more):
    engine = made(depth=2)
    real = engine._executor.submit

    def submit(plan):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine._executor.submit = submit
    run_on(engine, [bound(str(i), "lists", 25, seed=i, **more) for i in range(6)])


def test_no_memory_is_allocated_from_the_driver_for_known_sizes():
    engine = made(depth=2, prefix=False)
    for _ in range(3):
        run_on(engine, [bound(str(i), "lists", 25) for i in range(9)])
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(3):
        run_on(engine, [bound(str(i), "lists", 25) for i in range(9)])
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
