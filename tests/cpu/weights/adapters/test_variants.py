"""What is read of an adapter is what peft merges, in each of peft's variants."""

import pytest
import torch

from quire.weights.adapters.read import read_adapter
from tests.cpu.weights.adapters.oracle import PeftCase, assert_equals_merged

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

LINEARS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc", "attn.c_proj"],
    "falcon": ["query_key_value", "dense_h_to_4h"],
    "gpt_neox": ["query_key_value", "dense"],
    "deepseek_v2": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
}


@pytest.fixture
def case(tmp_path):
    return lambda *args, **lora: PeftCase(tmp_path, *args, **lora)


def read(case, **how):
    return read_adapter(case.folder, case.modules, torch.float32, **how)


@pytest.mark.parametrize("variant", LINEARS)
def test_linear_layers(case, variant):
    made = case(variant, target_modules=LINEARS[variant])
    adapter = read(made)
    assert assert_equals_merged(adapter, made) >= 4
    assert adapter.rank == 4
