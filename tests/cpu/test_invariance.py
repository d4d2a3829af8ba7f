"""The heart: the same requests give the same tokens whatever the engine does to run them.

A real tiny model in float32, every invariant checked after each step. The first run is the plainest:
one request at a time, no cache, no chunks.
"""

import random

import pytest
import torch

from quire.kernels.native import library
from tests import tiers
from tests.cpu.engine_of import TINY, WINDOWED, engine_of, request, run
from tests.cpu.same_bits import needs_same_bits


def workload(hf, seed=0):
    """Prompts that repeat themselves, of 1 to 150 tokens; greedy and sampled; n up to 3."""
    rng = random.Random(seed)
    heads = [[rng.randrange(97) for _ in range(rng.randrange(1, 90))] for _ in range(3)]
    found = []
    for i in range(9):
        prompt = rng.choice(heads) + rng.choice(heads)[: rng.randrange(60)]
        sampled = i % 3 == 2
        params = dict(temperature=0.9, top_p=0.95) if sampled else {}
        if i == 4:
            params = dict(repetition_penalty=1.3, frequency_penalty=0.2)
        found.append(
            request(
                str(i),
                prompt,
                rng.randrange(4, 40),
                n=rng.choice((1, 3)) if sampled else 1,
                seed=100 * i,
                priority=rng.randrange(3),
                **params,
            )
        )
    return found


def plain(hf, dtype):
    """Each request alone in an engine of its own, every step through Python."""
    out = {}
    for one in workload(hf):
        out.update(run(engine_of(hf, dtype=dtype, prefix=False, budget=4000, eager=True), [one])[0])
    return out


CASES = {
    "full": (TINY, torch.float32),
    "windows": (WINDOWED, torch.float32),
    "bfloat16": (TINY, torch.bfloat16),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """(model, dtype, the tokens wanted)."""
    hf, dtype = CASES[request.param]
    if dtype is torch.bfloat16 and not library.available():
        pytest.skip("only the native kernels give a row the same bits in any company")
    return hf, dtype, plain(hf, dtype)


SETTINGS = {
    "together": dict(),
    "eager": dict(eager=True),
    "staggered": dict(stagger=3),
    "small chunks": dict(budget=7),
    "block of 8": dict(block_size=8, num_blocks=800),
    "block of 1": dict(block_size=1, num_blocks=4000),
    "no prefix cache": dict(prefix=False),
    "whole prompts": dict(chunked=False),
    "two seats": dict(seqs=2),
    "long prompts in parts": dict(threshold=20, budget=64),
    "priority": dict(policy="priority", stagger=2),
    "little memory": dict(num_blocks=30, expect_preemption=True),
    "little memory, host tier": dict(num_blocks=30, host_blocks=60, expect_preemption=True),
    "little memory, priority, small host tier": dict(
        num_blocks=30, host_blocks=24, policy="priority", stagger=1, expect_preemption=True
    ),
    "overlap": dict(depth=2),
    "overlap, small chunks, little memory": dict(depth=2, budget=9, num_blocks=30, stagger=1),
    "overlap, host tier": dict(depth=2, num_blocks=30, host_blocks=60, expect_preemption=True),
}


IN_BFLOAT16 = ("together", "small chunks", "block of 8", "overlap, host tier")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_do_not_depend_on(case, name):
    hf, dtype, want = case
    if dtype is torch.bfloat16 and name not in IN_BFLOAT16 and not tiers.LONG:
        pytest.skip("--long: all settings in bfloat16 too")
    settings = dict(SETTINGS[name])
    stagger = settings.pop("stagger", 0)
    expected = settings.pop("expect_preemption", False)
    if expected and hf is WINDOWED:
        settings["num_blocks"] = 50  # three layers in groups of one: three tables a sequence
    engine = engine_of(hf, dtype=dtype, **settings)
    got, _ = run(engine, workload(hf), stagger=stagger)
    assert got == want
    if expected:
        assert engine.stats().preemptions > 0


def test_the_prefix_cache_is_hit_and_changes_nothing(case):
    hf, dtype, want = case
    engine = engine_of(hf, dtype=dtype)
    for one in workload(hf):
        engine.add(one)
    hits = 0
    while not engine.idle:
        hits = max([hits, *(u.cached_tokens for u in engine.step())])
    again, updates = run(engine, workload(hf))
    assert again == want
    assert max(u.cached_tokens for u in updates) > 16


@pytest.mark.sampled(3)
@pytest.mark.parametrize("depth", [1, 2])
def test_the_host_tier_is_hit_and_changes_nothing(case, depth):
    hf, dtype, want = case
    small = dict(block_size=4, num_blocks=160 if hf is WINDOWED else 60, seqs=4)
    engine = engine_of(hf, dtype=dtype, host_blocks=2000, depth=depth, **small)
    for one in workload(hf):
        engine.add(one)
    while not engine.idle:
        engine.step()
    engine.drain()
    loaded = engine.stats().host_loaded_blocks
    again, updates = run(engine, workload(hf))
    assert again == want
    stats = engine.stats()
    assert stats.host_loaded_blocks - loaded > 20
    assert stats.tier_hit_tokens > 100
    assert sum(u.cached_tokens for u in updates if u.finish) > 100


def test_tokens_do_not_depend_on_aborted_requests(case):
    hf, dtype, want = case
    engine = engine_of(hf, dtype=dtype, num_blocks=60)
    work = workload(hf)
    for one in work:
        engine.add(one)
    out, gone = {}, set()
    for step in range(5000):
        if engine.idle:
            break
        if step in (3, 6, 9):
            gone.add(str(step))
            assert all(u.finish == "abort" for u in engine.abort(str(step)))
        for u in engine.step():
            out.setdefault((u.request_id, u.index), []).extend(u.token_ids)
    assert {k: v for k, v in out.items() if k[0] not in gone} == {
        k: v for k, v in want.items() if k[0] not in gone
    }
    assert engine.stats().held_blocks == 0


@needs_same_bits
def test_logprobs_do_not_depend_on_the_batch():
    def ask():
        return [
            request(str(i), range(1 + 7 * i, 20 + 9 * i), 12, logprobs=3, prompt_logprobs=2)
            for i in range(4)
        ]

    def told(updates):
        rows = [
            (u.request_id, p.ids, p.ranks, [round(v, 4) for v in p.values])
            for u in updates
            for p in u.logprobs or []
        ]
        prompts = [
            (u.request_id, p.ids, p.ranks, [round(v, 4) for v in p.values])
            for u in updates
            for p in u.prompt_logprobs or []
        ]
        return sorted(rows), prompts

    alone = [], []
    for one in ask():
        for into, found in zip(alone, told(run(engine_of(budget=4000), [one])[1])):
            into.extend(found)
    together = told(run(engine_of(budget=13), ask())[1])
    assert sorted(alone[0]) == together[0]
    assert sorted(alone[1]) == sorted(together[1])
    assert len(alone[1]) == sum(len(one.prompt) - 1 for one in ask())
