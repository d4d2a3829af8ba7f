"""What is DeepSeek's own: spare layers in the checkpoint, eight bits, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.memory.kv_layout import LayerFacts
from quire.errors import ConfigError, WeightError
from quire.kernels.formats.fp8_weight import quantize_blocks
from quire.models.build import build_model, read_model_config
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import logprobs, ours, peer, prompt_of, tiny
from tests.cpu.plain_param import plain_param


def rewritten(folder, change):
    """The checkpoint of a folder with its tensors changed."""
    (path,) = folder.glob("*.safetensors")
    tensors = change(load_file(path))
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, {"format": "pt"})


def with_spare_layer(tensors, layer):
    """As a layer that predicts the token after next would stand there."""
    names = [name for name in tensors if name.startswith("model.layers.1.")]
    return tensors | {name.replace(".1.", f".{layer}.", 1): tensors[name].clone() for name in names}


@pytest.mark.parametrize(
    ("variant", "layer"), [("deepseek_v3", 3), ("glm4_moe", 3), ("minimax_m2", 4)]
)
def test_layers_that_predict_further_tokens_are_left_in_the_checkpoint(variant, layer, tmp_path):
    theirs = peer(variant, tmp_path)
    rewritten(tmp_path, lambda t: with_spare_layer(t, layer))
    model, config = ours(variant, tmp_path)
    ids = prompt_of(33, config.vocab)
    got = Stepper(model, config).logits(ids).log_softmax(-1)
    assert (got - logprobs(theirs, ids)).abs().max() < 1e-4


def test_a_layer_too_many_is_refused(tmp_path):
    peer("deepseek_v3", tmp_path)
    rewritten(tmp_path, lambda t: with_spare_layer(t, 4))
    with pytest.raises(WeightError, match=r"unexpected in the checkpoint: model\.layers\.4\."):
        ours("deepseek_v3", tmp_path)


def in_eight_bits(tensors, skipped=("embed_tokens", "lm_head", "norm")):
    out = {}
    for name, value in tensors.items():
        out[name] = value
        if value.ndim == 2 and not any(part in name for part in skipped):
            small = quantize_blocks(value)
            out[name] = small.data
            out[f"{name}_scale_inv"] = small.scale
    return out


def test_an_fp8_checkpoint_gives_the_absorbed_matrices_in_the_models_dtype(tmp_path, monkeypatch):
    hf, _ = tiny("deepseek_v3")
    dense = hf | {"first_k_dense_replace": 3, "q_lora_rank": 128, "qk_nope_head_dim": 32}
    dense |= {"v_head_dim": 32, "intermediate_size": 256}
    monkeypatch.setattr("tests.cpu.models.peers.tiny", lambda _: (dict(dense), {}))
    theirs = peer("deepseek_v3", tmp_path)
    rewritten(tmp_path, in_eight_bits)
    saved = json.loads((tmp_path / "config.json").read_text())
    method = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    saved |= {"quantization_config": method}
    model_type, config = read_model_config(saved)
    model = build_model(model_type, config, folder=tmp_path, dtype=torch.bfloat16, progress=False)
    name = "layers.1.self_attn.kv_b_proj.weight"
    got, want = plain_param(model, name), theirs.state_dict()[f"model.{name}"]
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).norm() < 0.05 * want.norm()
    ids = prompt_of(40, config.vocab)
    ours_said = Stepper(model, config, dtype=torch.bfloat16).logits(ids).log_softmax(-1)
    assert (ours_said - logprobs(theirs, ids)).abs().median() < 0.3


def test_weights_made_smaller_on_load_leave_the_absorbed_matrices_alone(tmp_path):
    theirs = peer("deepseek_v2_lite", tmp_path)
    model, _ = ours("deepseek_v2_lite", tmp_path, torch.float32, quant="fp8")
    name = "layers.1.self_attn.kv_b_proj.weight"
    assert torch.equal(plain_param(model, name), theirs.state_dict()[f"model.{name}"])


def test_a_layer_keeps_one_latent_per_token():
    _, config = read_model_config(tiny("deepseek_v2")[0])
    assert config.attention_layers() == (LayerFacts(1, 48, latent=32),) * 3


REFUSED = [
    ("deepseek_v2", {"attention_bias": True}, "attention_bias is True"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; supported: greedy"),
    ("deepseek_v2", {"topk_group": 5}, "n_group is 4 and topk_group 5"),
    (
        "deepseek_v2",
        {"num_experts_per_tok": 5},
        r"num_experts_per_tok is 5; it must be in \[1, 4\]",
    ),
    ("deepseek_v3", {"n_group": 3}, "n_group must divide n_routed_experts, which is 8"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported: sigmoid"),
    ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
]


@pytest.mark.parametrize(("variant", "changes", "says"), REFUSED)
def test_what_cannot_be_run_is_refused_by_the_field_that_asks(variant, changes, says):
    hf = {**tiny(variant)[0], **changes}
    with pytest.raises(ConfigError, match=says):
        read_model_config({key: value for key, value in hf.items() if value is not None})


def test_the_published_v3_config_is_read():
    hf = {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
        "first_k_dense_replace": 3,
        "torch_dtype": "bfloat16",
    }
    _, config = read_model_config(hf)
    assert config.max_len == 163840
    assert (config.moe.dense, config.moe.shared, config.spare_layers) == (3, 1, 1)
    routing = config.moe.routing
    assert (routing.groups, routing.top_groups, routing.scale) == (8, 4, 2.5)
    assert abs(config.scale / 192**-0.5 - (0.1 * 3.6888794541139363 + 1) ** 2) < 1e-9
    assert config.attention_layers()[60] == LayerFacts(1, 576, latent=512)
