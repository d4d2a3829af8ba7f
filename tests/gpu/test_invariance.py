"""The same requests give the same tokens whatever the engine does to run them, on the GPU too.

Float32 without TF32. The first run is the plainest: one request at a time, kernel by kernel, no
cache, no chunks, one step in flight.
"""

import pytest
import torch

from quire.runner.gpu.cuda_graphs import DecodeGraph
from quire.runner.gpu.mixed_batch_graphs import GraphShape
from tests.cpu import engine_of as tiny
from tests.cpu.engine_of import request, run
from tests.cpu.test_invariance import SETTINGS, workload

WIDE = {**tiny.TINY, "hidden_size": 64, "head_dim": 16}
WINDOWED = {**tiny.WINDOWED, "hidden_size": 64, "head_dim": 16}
CASES = {"full": WIDE, "windows": WINDOWED}
MORE = {
    "overlap, eager": dict(depth=2, eager=True),
    "overlap, staggered": dict(depth=2, stagger=3),
    "three steps in flight": dict(depth=3, stagger=2),
    "overlap, priority, small host tier": dict(
        depth=2, num_blocks=30, host_blocks=24, policy="priority", expect_preemption=True
    ),
}
SLOW = ("block of 8", "block of 1")  # by the reference, launch by launch
PATHS = {name: how for name, how in SETTINGS.items() if name not in SLOW} | MORE


def engine_of(hf, **settings):
    """An engine with all graphs, as a start leaves it."""
    engine = tiny.engine_of(hf, device="cuda", **settings)
    engine.executor.call("warm_up_kernels")
    engine.executor.call("capture_graphs", 0)
    return engine


def watch_graphs(engine):
    """A list of the graphs that steps run from now on, of which each must be captured."""
    graphs, keys = engine.executor.runner.worker._graphs, []
    run = graphs.run

    def spy(key):
        assert key in graphs
        keys.append(key)
        run(key)

    graphs.run = spy
    return keys


@pytest.fixture(scope="module", params=CASES)
def case(request):
    hf, want = CASES[request.param], {}
    for one in workload(hf):
        engine = engine_of(hf, prefix=False, budget=4000, eager=True)
        want.update(run(engine, [one])[0])
        assert {len(want[one.id, i]) for i in range(one.n)} == {one.stop.max_tokens}
    return hf, want


@pytest.mark.parametrize("name", PATHS)
def test_tokens_do_not_depend_on(case, name):
    hf, want = case
    settings = dict(PATHS[name])
    stagger = settings.pop("stagger", 0)
    expected = settings.pop("expect_preemption", False)
    if expected and hf is WINDOWED:
        settings["num_blocks"] = 50
    engine = engine_of(hf, **settings)
    got, _ = run(engine, workload(hf), stagger=stagger)
    assert got == want
    if expected:
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("block_size", [8, 32])
def test_tokens_do_not_depend_on_the_block_size(block_size):
    work = workload(WIDE)[:3]
    want = {}
    for one in work:
        want.update(run(engine_of(WIDE, prefix=False, budget=4000, eager=True), [one])[0])
    engine = engine_of(WIDE, block_size=block_size, num_blocks=800)
    assert run(engine, work)[0] == want


def test_the_prefix_cache_is_hit_and_changes_nothing(case):
    hf, want = case
    engine = engine_of(hf, depth=2)
    for one in workload(hf):
        engine.add(one)
    while not engine.idle:
        engine.step()
    engine.drain()
    again, updates = run(engine, workload(hf))
    assert again == want
    assert max(u.cached_tokens for u in updates) > 16


def test_a_second_round_replays_graphs_with_the_same_tokens(case):
    hf, want = case
    engine = engine_of(hf, depth=2, prefix=False)
    graphs, replayed = engine.executor.runner.worker._graphs, watch_graphs(engine)
    captured = len(graphs)
    for _ in range(3):
        for one in workload(hf):
            engine.add(one)
        out = {}
        while not engine.idle:
            for u in engine.step():
                out.setdefault((u.request_id, u.index), []).extend(u.token_ids)
        assert out == want
    decodes = {key for key in replayed if isinstance(key, DecodeGraph)}
    assert {graph.kind for graph in decodes} >= {"greedy", "random"}
    assert {graph.part for graph in decodes} == {"whole", "forward", "sampling"}
    assert len(graphs) == captured > 40


def test_steps_with_prompts_are_replayed_with_the_same_tokens(case):
    hf, want = case
    engine = engine_of(hf, depth=2, prefix=False, budget=300)
    replayed = watch_graphs(engine)
    for _ in range(3):
        out, waiting, step = {}, workload(hf), 0
        while waiting or not engine.idle:
            if waiting and step % 2 == 0:
                engine.add(waiting.pop(0))
            for u in engine.step():
                out.setdefault((u.request_id, u.index), []).extend(u.token_ids)
            step += 1
        assert out == want
    assert any(isinstance(key, GraphShape) and key.decodes for key in replayed)


def test_logprobs_do_not_depend_on_the_batch():
    def ask():
        return [
            request(str(i), range(1 + 7 * i, 20 + 9 * i), 12, logprobs=3, prompt_logprobs=2)
            for i in range(4)
        ]

    def told(updates):
        found = {}
        for u in updates:
            kept = found.setdefault(u.request_id, ([], []))
            kept[0].extend(u.logprobs or [])
            kept[1].extend(u.prompt_logprobs or [])
        return found

    want = {}
    for one in ask():
        want |= told(run(engine_of(WIDE, budget=4000), [one])[1])
    for settings in (dict(budget=13), dict(budget=13, depth=2)):
        got = told(run(engine_of(WIDE, **settings), ask())[1])
        assert got.keys() == want.keys()
        for name in want:
            for some, others in zip(got[name], want[name], strict=True):
                assert [p.ids for p in some] == [p.ids for p in others]
                for p, o in zip(some, others, strict=True):
                    assert torch.allclose(torch.tensor(p.values), torch.tensor(o.values), atol=1e-4)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_host_tier_is_hit_and_changes_nothing(case, depth):
    hf, want = case
    small = dict(block_size=4, num_blocks=160 if hf is WINDOWED else 60, seqs=4)
    engine = engine_of(hf, host_blocks=2000, depth=depth, **small)
    for one in workload(hf):
        engine.add(one)
    while not engine.idle:
        engine.step()
    engine.drain()
    again, _ = run(engine, workload(hf))
    assert again == want
    assert engine.stats().host_loaded_blocks > 20
