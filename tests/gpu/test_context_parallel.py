"""Decode context parallelism on two GPUs: tokens are those of one, in float32."""

import pytest
import torch

from quire import LLM
from tests.cpu.test_context_parallel import MODELS, SHARED, ids

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

COMMON = {
    "device": "cuda", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8,
    "use_tqdm_on_load": False,
}  # fmt: skip
SETTINGS = {
    "graphs": {"num_gpu_blocks_override": 400},
    "chunks, preemption": {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 12},
    "eager": {"num_gpu_blocks_override": 100, "enforce_eager": True},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("model", MODELS)
def test_two_gpus_give_the_tokens_of_one(model, settings, tmp_path):
    MODELS[model](tmp_path)
    one = LLM(str(tmp_path), **COMMON, num_gpu_blocks_override=400)
    want = ids(one)
    two = LLM(str(tmp_path), **COMMON, **SETTINGS[settings], **SHARED)
    try:
        assert ids(two) == want
        assert ids(two) == want, "prompts found in the prefix cache"
    finally:
        two.llm_engine.engine.shutdown()
