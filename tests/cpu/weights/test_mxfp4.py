"""GPT-OSS as it is published: experts in four bits, plain once they are read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import WeightError
from quire.models.build import build_model, read_model_config
from quire.quant.mxfp4 import dequantize
from tests.cpu.models.peers import peer
from tests.cpu.plain_param import plain_param

NAMES = ("gate_up_proj", "down_proj")


def packed(experts, rows, inputs):
    blocks = torch.randint(0, 256, (experts, rows, inputs // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(110, 130, blocks.shape[:3], dtype=torch.uint8)


def test_values_are_those_of_transformers():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = packed(3, 40, 96)
    want = mxfp4.convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(dequantize(blocks, scales), want)


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
            plain[f"layers.{layer}.mlp.experts.{name}"] = dequantize(blocks, scales).transpose(1, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    hf["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    model_type, config = read_model_config(hf)
    model = build_model(model_type, config, folder=tmp_path, dtype=torch.bfloat16, progress=False)
    for name, want in plain.items():
        if "gate_up" in name:
            want = torch.cat([want[:, 0::2], want[:, 1::2]], 1)
        assert torch.equal(plain_param(model, name), want)


def packed_checkpoint(folder, **changes):
    """A tiny checkpoint with MXFP4 experts."""
    peer("gpt_oss", folder)
    hf = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for layer in range(hf["num_hidden_layers"]):
        for name in NAMES:
            at = f"model.layers.{layer}.mlp.experts.{name}"
            experts, inputs, rows = tensors.pop(at).shape
            tensors[f"{at}_blocks"], tensors[f"{at}_scales"] = packed(experts, rows, inputs)
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


def test_another_method_quantizes_what_was_dequantized(tmp_path):
    model_type, config = read_model_config(packed_checkpoint(tmp_path))
    settings = {"folder": tmp_path, "dtype": torch.bfloat16, "progress": False}
    plain = build_model(model_type, config, **settings).layers[0].mlp.experts
    small = build_model(model_type, config, quant="fp8", **settings).layers[0].mlp.experts
    for name in NAMES:
        want, got = getattr(plain, name), getattr(small, name)
        assert (want.kind, got.kind) == ("plain", "fp8")
        torch.testing.assert_close(
            got.dequantize(torch.bfloat16), want.dequantize(), rtol=0.08, atol=0.1
        )
