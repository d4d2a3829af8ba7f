"""GPT-OSS as it is published: experts in four bits, on disk and in memory."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ConfigError, WeightError
from quire.kernels.quantizers.floats import e2m1_table
from quire.models.build import build_model, read_model_config
from quire.quant._e2m1 import e8m0_to_bfloat16, unpack_pairs
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import peer
from tests.cpu.plain_param import plain_param

PLAIN = ("plain", "packed")
"""Kinds of unquantized weights."""
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
NAMES = ("gate_up_proj", "down_proj")


def packed(experts, rows, inputs, powers=(110, 130)):
    blocks = torch.randint(0, 256, (experts, rows, inputs // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(*powers, blocks.shape[:3], dtype=torch.uint8)


def dequantize(blocks, scales):
    """The values [X, rows, inputs], as transformers computes them."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    return mxfp4.convert_moe_packed_tensors(blocks, scales).transpose(1, 2)


def test_codes_and_powers_of_two_are_those_of_the_format():
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = unpack_pairs(torch.tensor([[0x10, 0xF8]], dtype=torch.uint8))
    assert codes.tolist() == [[0, 1, 8, 15]]
    table = e2m1_table(torch.device("cpu"))
    assert table.tolist() == half + [-one for one in half]
    powers = e8m0_to_bfloat16(torch.arange(256, dtype=torch.uint8))
    assert powers[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert powers[255].isnan()


@pytest.mark.slow("a model of transformers, and its import")
def test_a_published_checkpoint_loads_as_the_plain_one_does(tmp_path):
    peer("gpt_oss", tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    plain = {}
    for layer in range(hf["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp.experts."
        for name in NAMES:
            experts, inputs, rows = tensors.pop(at + name).shape
            blocks, scales = packed(experts, rows, inputs)
            tensors |= {f"{at}{name}_blocks": blocks, f"{at}{name}_scales": scales}
            plain[f"layers.{layer}.mlp.experts.{name}"] = dequantize(blocks, scales)
    save_file(tensors, tmp_path / "model.safetensors")
    model_type, config = read_model_config(hf | MXFP4)
    model = build_model(model_type, config, folder=tmp_path, dtype=torch.bfloat16, progress=False)
    for name, want in plain.items():
        if "gate_up" in name:
            want = torch.cat([want[:, 0::2], want[:, 1::2]], 1)
        assert torch.equal(plain_param(model, name), want)


def packed_checkpoint(folder, powers=(110, 130), **changes):
    """A tiny checkpoint with MXFP4 experts."""
    peer("gpt_oss", folder)
    hf = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for layer in range(hf["num_hidden_layers"]):
        for name in NAMES:
            at = f"model.layers.{layer}.mlp.experts.{name}"
            experts, inputs, rows = tensors.pop(at).shape
            tensors[f"{at}_blocks"], tensors[f"{at}_scales"] = packed(experts, rows, inputs, powers)
    save_file(
        {k: v for k, v in {**tensors, **changes}.items() if v is not None},
        folder / "model.safetensors",
    )
    return hf


@pytest.mark.parametrize(
    ("scales", "problem"),
    [
        (
            torch.zeros(2, 8, 4, dtype=torch.uint8),
            r"down_proj_scales is \[2, 8, 4\], the model has",
        ),
        (None, r"1 missing .*mlp\.experts\.down_proj_scales"),
    ],
)
def test_scales_that_do_not_fit_their_blocks_are_refused(tmp_path, scales, problem):
    hf = packed_checkpoint(tmp_path, **{"model.layers.0.mlp.experts.down_proj_scales": scales})
    model_type, config = read_model_config(hf)
    with pytest.raises(WeightError, match=problem):
        build_model(model_type, config, folder=tmp_path, dtype=torch.bfloat16, progress=False)


def test_experts_stay_in_four_bits_and_compute_what_their_values_do(tmp_path):
    model_type, config = read_model_config(packed_checkpoint(tmp_path, [118, 122]))
    settings = {"folder": tmp_path, "dtype": torch.float32, "progress": False}
    small = build_model(model_type, config, **settings)
    experts = small.layers[0].mlp.experts
    for name in NAMES:
        bank = getattr(experts, name)
        assert bank.kind not in PLAIN
        x, rows, inputs = bank.shape
        assert bank.nbytes <= x * rows * inputs * (4 + 16 / 32) / 8 + x * 512
    ids = list(range(3, 30))
    got = Stepper(small, config).logits(ids)
    for layer in small.layers:
        for name in NAMES:
            layer.mlp.experts.set_param(name, getattr(layer.mlp.experts, name).dequantize())
    torch.testing.assert_close(got, Stepper(small, config).logits(ids), atol=2e-5, rtol=2e-5)


def test_config_alone_gives_dummy_experts_in_four_bits(tmp_path):
    model_type, config = read_model_config(packed_checkpoint(tmp_path) | MXFP4)
    assert config.quantized.quant_method == "mxfp4"
    model = build_model(model_type, config, load_format="dummy", dtype=torch.bfloat16)
    assert model.layers[0].mlp.experts.down_proj.kind not in PLAIN
    assert model.layers[0].self_attn.o_proj.weight.kind in PLAIN


def test_a_plain_copy_that_kept_the_setting_is_plain(tmp_path):
    peer("gpt_oss", tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text()) | MXFP4
    model_type, config = read_model_config(hf)
    model = build_model(model_type, config, folder=tmp_path, dtype=torch.bfloat16, progress=False)
    assert model.layers[0].mlp.experts.down_proj.kind == "plain"


def test_another_method_quantizes_what_was_dequantized(tmp_path):
    model_type, config = read_model_config(packed_checkpoint(tmp_path) | MXFP4)
    settings = {"folder": tmp_path, "dtype": torch.bfloat16, "progress": False}
    four = build_model(model_type, config, **settings).layers[0].mlp.experts
    small = build_model(model_type, config, quant="fp8", **settings).layers[0].mlp.experts
    for name in NAMES:
        want, got = getattr(four, name), getattr(small, name)
        assert got.kind == "fp8"
        torch.testing.assert_close(
            got.dequantize(torch.bfloat16), want.dequantize(torch.bfloat16), rtol=0.08, atol=0.1
        )


def test_unknown_fields_are_refused_by_name():
    with pytest.raises(ConfigError, match="fields that quire does not know: block_size"):
        read_model_config(
            {
                "model_type": "gpt_oss",
                "quantization_config": {"quant_method": "mxfp4", "block_size": 16},
            }
        )
