"""Experts spread over the ranks of an engine, through LLM: the tokens of one rank."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from tests import tiers
from tests.cpu.large_messages import large_answer
from tests.cpu.models.peers import peer
from tests.cpu.quant.oracle import tiny, tiny_tensors, write_folder
from tests.cpu.tiny_models import write_model

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow("engines of two processes")]

SIZES = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 60, "device": "cpu"}
SIZES |= {"skip_tokenizer_init": True, "max_num_batched_tokens": 32, "max_num_seqs": 4}
PROMPTS = [[1], [70, 70, 5], list(range(3, 93)), list(range(20, 50))]


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


@pytest.mark.long("two engines of two processes")
def test_taped_steps_give_the_tokens_of_eager_ones(tmp_path, caplog):
    """Experts of four bits in bfloat16 have a kernel that tapes record."""
    hf = tiny("qwen3_moe", unit=128, num_experts=8)
    folder = str(write_folder(tmp_path / "m", hf, tiny_tensors(hf, torch.bfloat16)))
    sizes = SIZES | {"dtype": "bfloat16", "quantization": "int4", "tensor_parallel_size": 2}
    found = []
    for eager in (False, True):
        caplog.clear()
        with caplog.at_level("INFO"):
            llm = LLM(folder, **sizes, enable_expert_parallel=True, enforce_eager=eager)
            found.append(ids(llm, temperature=0))
        assert "decode steps run eagerly" not in caplog.text
        llm.llm_engine.engine.shutdown()
    assert found[0] == found[1]


RANKS = (
    {"tensor_parallel_size": 2, "steps_in_flight": 2},
    {"data_parallel_size": 2},
    *tiers.long(
        {"tensor_parallel_size": 2, "data_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_experts_move_between_steps_and_tokens_stay(folder, caplog, ranks):
    config = {"step_interval": 5, "window_size": 4, "num_redundant_experts": 8}
    llm = LLM(
        folder, **SIZES, **ranks, enable_expert_parallel=True, enable_eplb=True,
        eplb_config=config | {"log_balancedness": True},
    )  # fmt: skip
    with caplog.at_level("INFO"):
        got = ids(llm, temperature=0)
    assert got == ids(LLM(folder, **SIZES), temperature=0)
    stats = llm.llm_engine.engine.snapshot().experts
    assert stats.rebalances > 3
    assert stats.moved_experts > 0
    assert 0 < stats.balancedness <= 1
    assert "experts: balancedness" in caplog.text
    balanced = llm.llm_engine.engine.executor
    with large_answer(balanced.inner.group):  # ranks exchange weights while they are called
        balanced.inner.call("balance_experts", balanced._intervals)
    llm.llm_engine.engine.shutdown()


REFUSED = {
    "needs enable_expert_parallel": {"enable_expert_parallel": False},
    "choose one of 0, 2, 4, 6": {"eplb_config": {"num_redundant_experts": 3}},
    "is for enable_eplb": {"enable_eplb": False, "eplb_config": {"window_size": 10}},
    "has no key 'window'; allowed are": {"eplb_config": {"window": 10}},
    "experts are moved between two steps": {"eplb_config": {"use_async": True}},
    "must be 1 or more": {"eplb_config": {"step_interval": 0}},
    "leave out enable_lora": {"enable_lora": True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_cannot_be_balanced_are_refused(folder, message):
    given = {"enable_expert_parallel": True, "enable_eplb": True, "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=message):
        LLM(folder, **SIZES, **given | REFUSED[message])


def test_models_without_experts_are_refused(tmp_path):
    dense = str(write_model(tmp_path, "llama"))
    with pytest.raises(ConfigError, match="llama has no experts"):
        LLM(dense, device="cpu", enable_expert_parallel=True)
