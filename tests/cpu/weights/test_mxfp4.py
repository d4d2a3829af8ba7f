"""GPT-OSS as it is published: experts in four bits, plain once they are read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import WeightError
from quire.models.build import build_model, plain_param, read_model_config
from quire.quant.mxfp4 import dequantize, dequantized_shapes
from tests.cpu.models.peers import peer

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


def test_shapes_are_those_of_the_plain_checkpoint():
    shapes = [("a_blocks", (2, 8, 3, 16)), ("b", (5,)), ("a_scales", (2, 8, 3)), ("c_scales", (1,))]
    assert dequantized_shapes(shapes) == [("a", (2, 96, 8)), ("b", (5,)), ("c_scales", (1,))]


def test_scales_that_do_not_fit_their_blocks_are_refused():
    with pytest.raises(WeightError, match=r"a_blocks is .* a_scales \[2, 8, 4\]"):
        dequantized_shapes([("a_blocks", (2, 8, 3, 16)), ("a_scales", (2, 8, 4))])
