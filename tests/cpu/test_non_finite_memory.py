"""NaN that a sequence leaves in memory reaches no other: KV is read only where it was written."""

import pytest
import torch

from quire.errors import NotFinite
from tests.cpu.engine_of import TINY, WINDOWED, engine_of, request, run

ASKED = [
    ("a", range(1, 30), 20, {}),
    ("b", range(1, 30), 20, {"temperature": 1.0, "n": 3}),
    ("c", range(5, 9), 30, {}),
    ("d", range(40, 90), 5, {"prompt_logprobs": 1}),
]


def said(spoil, **setup):
    engine = engine_of(num_blocks=40, **setup)
    if spoil is not None:
        for cache in engine._executor.runner.worker._cache:
            cache.fill_(spoil)
    requests = [request(name, list(p), n, **more) for name, p, n, more in ASKED]
    return run(engine, requests, stagger=2)[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("spoil", [float("nan"), float("inf")])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("hf", [TINY, WINDOWED], ids=["full", "windowed"])
@pytest.mark.parametrize("eager", [False, True])
def test_nan_in_free_memory_reaches_no_row(hf, depth, eager, spoil):
    setup = {"hf": hf, "depth": depth, "eager": eager, "budget": 24}
    assert said(spoil, **setup) == said(None, **setup)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_nor_in_half_precision(dtype):
    assert said(float("nan"), dtype=dtype) == said(None, dtype=dtype)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_whose_memory_is_spoilt_ends_alone(depth):
    want = said(None, depth=depth)
    engine = engine_of(num_blocks=40, depth=depth)
    for name, p, n, more in ASKED:
        engine.add(request(name, list(p), n, **more))
    found, ends = {}, {}
    for number in range(200):
        seqs = {seq.request.id: seq for seq in engine._scheduler.sequences()}
        if number == 9:
            for cache in engine._executor.runner.worker._cache:
                cache[seqs["c"].tables[0][0]] = float("nan")
        for u in engine.step():
            found.setdefault(u[:2], []).extend(u.token_ids)
            if u.finish:
                ends[u[:2]] = u
    assert engine.idle
    engine.shutdown()
    assert ends["c", 0].fault == "numbers"
    assert isinstance(ends["c", 0].to_exception(), NotFinite)
    before = found.pop(("c", 0))
    assert before == want.pop(("c", 0))[: len(before)]
    assert found == want
    assert engine.stats().corrupt_rows == 1
