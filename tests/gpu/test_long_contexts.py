"""Rows beside a long context answer as when each row has as many programs, from graphs."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.runner import long_contexts
from quire.runner.gpu.cuda_graphs import CudaGraphCache
from quire.runner.parts import long_contexts as part
from tests.cpu.tiny_models import write_model

OPTIONS = {
    "device": "cuda", "dtype": "bfloat16", "num_gpu_blocks_override": 2000, "max_model_len": 4096,
    "max_num_seqs": 24, "use_tqdm_on_load": False, "hf_overrides": {"max_position_embeddings": 4096},
}  # fmt: skip


@pytest.mark.slow("engines on a GPU")
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_rows_beside_a_long_context_answer_as_without(tmp_path, monkeypatch, cache):
    for module in (long_contexts, part):
        monkeypatch.setattr(module, "LONG_CONTEXT", 1024)
    monkeypatch.setattr(part, "LEAST_KEYS", 2048)
    ran, run = set(), CudaGraphCache.run
    monkeypatch.setattr(
        CudaGraphCache, "run", lambda own, key: (ran.add((key.variant, key in own)), run(own, key))
    )
    llm = LLM(str(write_model(tmp_path / "llama", "llama")), **OPTIONS, kv_cache_dtype=cache)
    prompts = [{"prompt_token_ids": [20 + i % 200 for i in range(3000)]}]
    prompts += [{"prompt_token_ids": [*range(20, 40 + 9 * i)]} for i in range(11)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)

    def answers():
        return [
            [(token, at[token].logprob) for token, at in zip(one.token_ids, one.logprobs)]
            for output in llm.generate(prompts, params, use_tqdm=False)
            for one in output.outputs
        ]

    with monkeypatch.context() as patch:
        patch.setattr(part.LongContextsPart, "prepare", classmethod(lambda *_: None))
        want = answers()
        assert "long contexts" not in {name for name, _ in ran}
    found = answers()
    assert ("long contexts", True) in ran
    for ours, theirs in zip(found, want, strict=True):
        for (token, number), (other, others) in zip(ours, theirs, strict=True):
            assert number == pytest.approx(others, abs=0.05)
            if token != other:
                break  # rounding: what follows has another past
    torch.cuda.empty_cache()
