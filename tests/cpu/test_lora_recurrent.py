"""Adapters of models with recurrent layers, under PEFT's names: tokens and logprobs of peft."""

import functools

import pytest

from tests import tiers
from tests.cpu.lora_cases import PATHS, LoraCase

pytestmark = [pytest.mark.slow("peft and engines of several models")]

MLP, ATTENTION = ["gate_proj", "up_proj", "down_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {
    "mamba": (["in_proj", "x_proj", "dt_proj"], ["x_proj"]),
    "mamba2": (["in_proj"], ["embeddings", "in_proj"]),
    "falcon_mamba": (["in_proj", "x_proj", "dt_proj"], ["in_proj"]),
    "jamba": (["in_proj", "x_proj", "out_proj", *MLP], ATTENTION),
    "bamba": (["in_proj", "out_proj", *MLP], ATTENTION),
    "falcon_h1": (["in_proj", *MLP], ATTENTION),
    "nemotron_h": (["in_proj", "up_proj", "down_proj"], ATTENTION),
    "granitemoehybrid": (["in_proj", "out_proj"], ATTENTION),
    "lfm2": (["in_proj", "out_proj", "w1", "w2", "w3"], ["q_proj", "k_proj", "v_proj"]),
    "qwen3_next": (["in_proj_qkvz", "in_proj_ba", "out_proj", *MLP], ATTENTION),
    "qwen3_5_text": (["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"], MLP),
}
EVERYDAY = ("jamba", "qwen3_next")


WITHOUT_KV = ("mamba", "mamba2", "falcon_mamba")


class MergedCase(LoraCase):
    """The peer's adapters are merged: transformers reads the weight of dt_proj past its adapter."""

    @functools.cache  # noqa: B019 - lives as long as its test module
    def peft(self, name=None):
        model = super().peft(name)
        return model if name is None else model.merge_and_unload()


@pytest.fixture(
    scope="module",
    params=[*EVERYDAY, *tiers.long(*(one for one in TARGETS if one not in EVERYDAY))],
)
def case(request, tmp_path_factory):
    made = MergedCase(tmp_path_factory.mktemp(request.param), request.param)
    for name, targets in zip(("first", "second"), TARGETS[request.param]):
        made.add(name, target_modules=targets)
    return made


NAMES = (None, "first", "second", "first", None, "second", "first")


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_mixed_batch_is_as_peft_computes_each_alone(case, path):
    if "block_size" in path and case.variant in WITHOUT_KV:
        pytest.skip("there are no blocks")
    llm = case.llm(**path)
    case.check_batch(llm, NAMES)
    case.check_batch(llm, NAMES[::-1])
    case.check_batch(llm, NAMES)  # from checkpoints of the same adapter alone


@pytest.mark.usefixtures("forked")
def test_two_ranks(case):
    llm = case.llm(tensor_parallel_size=2)
    try:
        case.check_batch(llm, NAMES)
    finally:
        llm.llm_engine.engine.shutdown()
