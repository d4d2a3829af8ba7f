"""Experts spread over the ranks of an engine, through LLM: the tokens of one rank."""

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from tests.cpu.models.peers import peer
from tests.cpu.tiny_models import write_model

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow("engines of two processes")]

SIZES = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 60, "device": "cpu"}
SIZES |= {"skip_tokenizer_init": True, "max_num_batched_tokens": 32, "max_num_seqs": 4}
PROMPTS = [[1], [70, 70, 5], list(range(60, 160)), list(range(20, 50))]


def ids(llm, **params):
    params = SamplingParams(max_tokens=24, ignore_eos=True, **params)
    prompts = [{"prompt_token_ids": one} for one in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(each.token_ids) for output in outputs for each in output.outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    peer("qwen3_moe", folder)
    return str(folder)


def test_tokens_are_those_of_one_rank(folder):
    one = LLM(folder, **SIZES)
    llm = LLM(
        folder, **SIZES, tensor_parallel_size=2, enable_expert_parallel=True,
        expert_placement_strategy="round_robin",
    )  # fmt: skip
    for params in ({"temperature": 0}, {"temperature": 0.9, "seed": 7, "n": 3, "top_p": 0.8}):
        assert ids(llm, **params) == ids(one, **params)
    llm.llm_engine.engine.shutdown()


def test_models_without_experts_are_refused(tmp_path):
    dense = str(write_model(tmp_path, "llama"))
    with pytest.raises(ConfigError, match="llama has no experts"):
        LLM(dense, device="cpu", enable_expert_parallel=True)
