"""What is read of an adapter is what peft merges, in each of peft's variants."""

import pytest
import torch

from quire.weights.adapters.read import read_adapter
from tests.cpu.weights.adapters.oracle import PeftCase, assert_equals_merged

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft"),
]

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


def test_embedding_and_head(case):
    made = case("llama", target_modules=["embed_tokens", "lm_head", "q_proj"])
    assert assert_equals_merged(read(made), made) == 4


@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True},
        {"rank_pattern": {"k_proj": 3, r"layers\.1\..*_proj": 2, "q_proj": 7}},  # sorted in files
        {"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 1, r"layers.[01].*k_proj": 20}},
        {"use_rslora": True, "rank_pattern": {"k_proj": 3}, "alpha_pattern": {"k_proj": 1}},
        {"use_dora": True},
        {"use_dora": True, "target_modules": ["embed_tokens", "lm_head", "down_proj"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"layers_to_transform": [1]},
        {"trainable_token_indices": {"embed_tokens": [9, 3], "lm_head": [5]}},
    ],
    ids=lambda lora: "-".join(lora),
)
def test_options(case, lora):
    def change(model):
        for name, value in model.named_parameters():
            if value.requires_grad and "lora_A" not in name and "lora_B" not in name:
                value.data += 0.1 * torch.randn_like(value)

    given = {"target_modules": ["q_proj", "k_proj"], **lora}
    made = case("llama", change, **given)
    assert assert_equals_merged(read(made), made) >= 2


def test_fused_layers_with_magnitudes(case):
    for variant in ("phi3", "gpt2"):
        made = case(variant, target_modules=LINEARS[variant], use_dora=True)
        assert_equals_merged(read(made), made)


BANK = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_parameters_of_experts(case, variant):
    made = case(
        variant,
        target_modules=["q_proj"],
        target_parameters=BANK,
        rank_pattern={"experts.gate_up_proj": 3},
        alpha_pattern={"experts.down_proj": 11},
    )
    assert assert_equals_merged(read(made), made) >= 4
