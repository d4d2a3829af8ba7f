"""Prompts as embeddings on the GPU: the vectors of a token prompt give the answer of that prompt."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from tests.cpu.tiny_models import write_model

IDS = [70 + 7 * i % 200 for i in range(53)]
SETTINGS = {
    "alone": {},
    "in chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "eager": {"enforce_eager": True},
    "bfloat16": {"dtype": "bfloat16"},
    "preempted": {"num_gpu_blocks_override": 24, "enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "llama", "llama"))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_vectors_of_a_prompt_give_its_answer(folder, name):
    settings = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 600}
    llm = LLM(folder, device="cuda", enable_prompt_embeds=True, **settings | SETTINGS[name])
    table = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight.detach()
    prompts = [IDS[i:] for i in range(6)]
    vectors = [{"prompt_embeds": table[one].cuda()} for one in prompts]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for _ in range(2):  # the second time from the prefix cache, and from graphs
        mixed = [one for pair in zip(prompts, vectors) for one in pair]
        outputs = llm.generate(mixed, params, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        assert tokens[1::2] == tokens[::2]


def test_penalties_do_not_count_vectors(folder):
    llm = LLM(folder, device="cuda", enable_prompt_embeds=True, dtype="float32", max_model_len=128)
    params = SamplingParams(temperature=0, logit_bias={0: 60.0}, repetition_penalty=50.0)
    output = llm.generate({"prompt_embeds": torch.randn(9, 32)}, params, use_tqdm=False)[0]
    first, second, *_ = output.outputs[0].token_ids
    assert first == 0
    assert second != 0
