"""Models with recurrent layers on the GPU: graphs, chunks, checkpoints and forks change no token.

Float32 without TF32. The states of a captured decode step are at fixed addresses; rows that pad it
must write none that is in use.
"""

import pytest
import torch

from tests.cpu import engine_of as tiny
from tests.cpu.engine_of import run
from tests.cpu.test_recurrent import MAMBA2, QWEN3_NEXT, workload
from tests.gpu.test_invariance import engine_of

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
    "together": dict(),
    "chunks of 7": dict(budget=7),
    "two slots": dict(seqs=2),
    "two checkpoints": dict(checkpoints=2, stagger=2),
    "no prefix cache": dict(prefix=False),
    "overlap": dict(depth=2, stagger=1),
    "overlap, little memory": dict(depth=2, num_blocks=40),
}


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


def test_the_gpu_gives_the_tokens_of_the_cpu(case):
    hf, want = case
    works = [one for one in workload() if one.n == 1][:3]
    got, _ = run(tiny.engine_of(hf, prefix=False, checkpoints=0), works)
    assert got == {key: want[key] for key in got}


def test_bfloat16_runs(case):
    hf, want = case
    got, _ = run(engine_of(hf, dtype=torch.bfloat16), workload())
    assert got.keys() == want.keys()
