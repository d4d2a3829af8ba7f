"""Rows whose prompts begin alike answer as when each reads its keys alone, from graphs."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.framework import late_work
from quire.runner import shared_prefixes
from quire.runner.gpu.cuda_graphs import CudaGraphCache
from tests.cpu.tiny_models import write_model

OPTIONS = {
    "device": "cuda", "dtype": "float32", "num_gpu_blocks_override": 800, "max_model_len": 512,
    "max_num_seqs": 48, "use_tqdm_on_load": False,
}  # fmt: skip


def prompts():
    """Two prefixes, prompts of their own, and forks."""
    first, second = [*range(20, 320)], [*range(200, 60, -1)]
    made = [{"prompt_token_ids": [*first, 30 + i]} for i in range(20)]
    made += [{"prompt_token_ids": [*second, 30 + i, 9]} for i in range(9)]
    return [*made, *({"prompt_token_ids": [40 + i, 7]} for i in range(5))]


def answers(llm, params):
    found = llm.generate(prompts(), params, use_tqdm=False)
    return [
        ([*one.token_ids], [next(iter(at.values())).logprob for at in one.logprobs or ()])
        for output in found
        for one in output.outputs
    ]


@pytest.mark.slow("engines on a GPU")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_rows_with_one_prefix_answer_as_alone(tmp_path, monkeypatch, eager, cache):
    folder = write_model(tmp_path / "llama", "llama")
    ran, run = set(), CudaGraphCache.run
    monkeypatch.setattr(
        CudaGraphCache, "run", lambda own, key: (ran.add((key.variant, key in own)), run(own, key))
    )
    options = OPTIONS | {"enforce_eager": eager, "kv_cache_dtype": cache}
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 1 << 30)
    alone = LLM(str(folder), **options)
    want = [answers(alone, params) for params in (greedy, scored)]
    assert {name for name, _ in ran} == {""}
    del alone
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 16)
    llm = LLM(str(folder), **options)
    before = late_work.counts()
    found = [answers(llm, params) for params in (greedy, scored)]
    assert late_work.counts() == before
    assert ("shared prefixes", not eager) in ran
    assert ("shared prefixes", eager) not in ran
    for ours, theirs in zip(found, want):
        for (ids, numbers), (other, others) in zip(ours, theirs):
            assert ids == other
            assert numbers == pytest.approx(others, abs=2e-3)
    torch.cuda.empty_cache()
