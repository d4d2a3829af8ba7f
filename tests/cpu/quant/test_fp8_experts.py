"""Banks of experts in e4m3: read expert by expert, or made on load."""

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import ConfigError
from quire.kernels.formats.fp8_weight import (
    Fp8ExpertWeights,
    Fp8Weight,
    quantize_blocks,
    quantize_channels,
)
from quire.kernels.gpu.runtime.target import GpuTarget, describe_target
from quire.kernels.moe_experts import ExpertActivation, moe_experts
from quire.models.build import build_model, read_model_config
from tests.cpu.models.harness import Stepper
from tests.cpu.quant.checkpoints import BLOCKS, CHANNELS

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def plain(dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(5)
    e, f, v = 128, 128, 96
    shapes = {"embed_tokens": (v, e), "norm": (e,)}
    for i in range(2):
        at = f"layers.{i}."
        shapes |= {at + f"{name}_layernorm": (e,) for name in ("input", "post_attention")}
        shapes |= {at + f"self_attn.{name}_proj": (e, e) for name in "qkvo"}
        shapes |= {at + f"self_attn.{name}_norm": (32,) for name in "qk"}
        shapes[at + "mlp.gate"] = (4, e)
        for x in range(4):
            shapes |= {at + f"mlp.experts.{x}.{name}_proj": (f, e) for name in ("gate", "up")}
            shapes[at + f"mlp.experts.{x}.down_proj"] = (e, f)
    named = {f"model.{name}.weight": shape for name, shape in shapes.items()}
    named["lm_head.weight"] = (v, e)
    made = {name: torch.randn(shape, generator=draw) for name, shape in named.items()}
    return {
        name: (t / 128**0.5 if t.dim() > 1 else 1 + t / 50).to(dtype) for name, t in made.items()
    }


def quantized(make, scale_name):
    found = {}
    for name, tensor in plain().items():
        found[name] = tensor
        if "_proj" in name:
            made = make(tensor)
            scale = made.scale if made.block_size else made.scale[:, None]
            found |= {name: made.data, name.removesuffix("weight") + scale_name: scale.contiguous()}
    return found


def load(folder, tensors, said=None, dtype=torch.bfloat16, **settings):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    model_type, config = read_model_config(
        QWEN3_MOE | ({"quantization_config": said} if said else {})
    )
    settings |= {"folder": folder, "progress": False, "dtype": dtype}
    return build_model(model_type, config, **settings), config


@pytest.mark.parametrize(
    ("asked", "make", "scale_name", "said"),
    [
        ("fp8", quantize_channels, "weight_scale", CHANNELS),
        ("fp8_block", quantize_blocks, "weight_scale_inv", BLOCKS),
    ],
)
def test_banks_made_on_load_equal_those_of_a_checkpoint(tmp_path, asked, make, scale_name, said):
    key = "ignore" if asked == "fp8" else "modules_to_not_convert"
    ignore = {key: ["lm_head", "re:.*mlp.gate$"]}
    made, _ = load(tmp_path / "a", plain(), quant=asked)
    read, config = load(tmp_path / "b", quantized(make, scale_name), said | ignore)
    for layer in range(2):
        one, other = (model.layers[layer].mlp.experts for model in (made, read))
        for matrix in ("gate_up_proj", "down_proj"):
            a, b = getattr(one, matrix), getattr(other, matrix)
            assert isinstance(a, Fp8ExpertWeights)
            assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
            assert torch.equal(a.scale, b.scale)
        assert not isinstance(made.layers[layer].mlp.gate.weight, Fp8Weight)
    logits = Stepper(read, config, dtype=torch.bfloat16, max_tokens=32).logits(list(range(3, 30)))
    assert logits.isfinite().all()


def test_banks_of_an_older_gpu_are_held_in_eight_bits(tmp_path):
    tensors = quantized(quantize_blocks, "weight_scale_inv")
    ignore = {"modules_to_not_convert": ["lm_head", "re:.*mlp.gate$"]}
    usual, _ = load(tmp_path, tensors, BLOCKS | ignore)
    describe_target(GpuTarget((8, 6), 84))
    try:
        older, _ = load(tmp_path, tensors, BLOCKS | ignore)
    finally:
        describe_target(None)
    for one, other in zip(usual.layers, older.layers):
        for matrix in ("gate_up_proj", "down_proj"):
            a, b = (getattr(layer.mlp.experts, matrix) for layer in (one, other))
            assert b[0].bits == 8
            assert torch.equal(a.dequantize(torch.float32), b.dequantize(torch.float32))


@pytest.mark.parametrize("said", [CHANNELS, BLOCKS])
def test_stand_in_banks_keep_numbers_finite(said):
    model_type, config = read_model_config(QWEN3_MOE | {"quantization_config": said})
    model = build_model(model_type, config, load_format="dummy", dtype=torch.bfloat16)
    logits = Stepper(model, config, dtype=torch.bfloat16, max_tokens=32).logits(list(range(3, 30)))
    assert logits.isfinite().all()
    assert logits.std() > 0.01


def test_widths_that_do_not_fill_blocks_are_refused():
    hf = QWEN3_MOE | {"moe_intermediate_size": 96, "quantization_config": BLOCKS}
    model_type, config = read_model_config(hf)
    with pytest.raises(ConfigError, match="cannot be quantized in such blocks"):
        build_model(model_type, config, load_format="dummy", dtype=torch.bfloat16)


@pytest.mark.parametrize("make", [quantize_channels, quantize_blocks])
def test_experts_in_eight_bits_give_nearly_the_same(make):
    torch.manual_seed(0)
    plain_banks = torch.randn(4, 256, 128) / 11, torch.randn(4, 128, 128) / 11
    banks = []
    for bank in plain_banks:
        ones = [make(one) for one in bank]
        data, scale = (
            torch.stack([getattr(one, name) for one in ones]) for name in ("data", "scale")
        )
        banks.append(Fp8ExpertWeights(data, scale))
    x, ids = torch.randn(20, 128), torch.rand(20, 4).argsort(1)[:, :2].int()
    weights = torch.rand(20, 2)
    want = moe_experts(x, ids, weights, *plain_banks, ExpertActivation())
    got = moe_experts(x, ids, weights, *banks, ExpertActivation())
    assert 0.005 < (got - want).norm() / want.norm() < 0.08
    exact = moe_experts(x, ids, weights, *(bank.dequantize() for bank in banks), ExpertActivation())
    assert (got - exact).norm() / exact.norm() < 0.06
