"""Models with recurrent layers on the GPU: graphs, chunks, checkpoints, forks and drafts change no
token.

Float32 without TF32. The states of a captured step are at fixed addresses; rows that pad it must
write none that is in use.
"""

import pytest
import torch

from quire.runner.gpu.cuda_graphs import DecodeGraph
from quire.runner.gpu.mixed_batch_graphs import GraphShape
from tests.cpu import engine_of as tiny
from tests.cpu.engine_of import run
from tests.cpu.gpu_kernels.test_recurrent import (
    last_first,  # noqa: F401
    scan,  # noqa: F401
    test_a_prompt_gives_the_same_bits_however_it_is_cut,  # noqa: F401
    test_drafts_are_tokens_one_by_one,  # noqa: F401
    test_padding_is_zeros_and_reads_and_writes_no_state,  # noqa: F401
)
from tests.cpu.test_recurrent import MAMBA2, QWEN3_NEXT, proposing, workload
from tests.gpu.test_invariance import engine_of, watch_graphs

WIDE = {
    "hidden_size": 64,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
CASES = {
    "mamba2": MAMBA2 | {"hidden_size": 64, "num_heads": 8},
    "qwen3_next": QWEN3_NEXT | WIDE,
}
SETTINGS = {
    "chunks of 7": dict(budget=7, seqs=8),
    "two slots": dict(seqs=2),
    "two checkpoints": dict(checkpoints=2, stagger=2, seqs=8),
    "overlap, little memory": dict(depth=2, num_blocks=40, stagger=1, seqs=8),
}


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture(scope="module", params=CASES)
def case(request):
    hf, want = CASES[request.param], {}
    for one in workload():
        alone = engine_of(hf, prefix=False, budget=4000, checkpoints=0, eager=True)
        want.update(run(alone, [one])[0])
    return hf, want


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_do_not_depend_on(case, name):
    hf, want = case
    settings = dict(SETTINGS[name])
    stagger = settings.pop("stagger", 0)
    engine = engine_of(hf, **settings)
    assert run(engine, workload(), stagger=stagger)[0] == want


@pytest.mark.parametrize("drafts", [0, 5])
def test_all_steps_are_graphs_also_from_checkpoints(case, drafts):
    hf, want = case
    propose = proposing(want) if drafts else None
    engine = engine_of(hf, budget=256, seqs=8, drafts=drafts, propose=propose)
    graphs = watch_graphs(engine)
    for _ in range(2):  # the second time with prefix hits
        for one in workload():
            engine.add(one)
        got, cached = {}, 0
        while not engine.idle:
            for update in engine.step():
                got.setdefault(update[:2], []).extend(update.token_ids)
                cached = max(cached, update.cached_tokens)
        assert got == want
    assert cached >= 64
    assert {type(key) for key in graphs} == {DecodeGraph, GraphShape}
    assert any(getattr(key, "drafts", False) for key in graphs) == bool(drafts)
    if drafts:
        assert sum(engine._scheduler.draft_counts.accepted) > 100


def test_the_gpu_gives_the_tokens_of_the_cpu(case):
    hf, want = case
    works = [one for one in workload() if one.n == 1][:3]
    got, _ = run(tiny.engine_of(hf, prefix=False, checkpoints=0), works)
    assert got == {key: want[key] for key in got}


def test_bfloat16_runs(case):
    hf, want = case
    got, _ = run(engine_of(hf, dtype=torch.bfloat16), workload())
    assert got.keys() == want.keys()
