"""Tensors decide where config.json describes a quantization that the checkpoint does not have."""

import logging

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import WeightError
from quire.models.build import build_model, read_model_config
from tests.cpu.quant.checkpoints import BLOCKS, CHANNELS, LLAMA, load, plain, quantized

SCALES = {"quant_method": "fp8", "activation_scheme": "static"}


@pytest.mark.parametrize("config", [BLOCKS, CHANNELS, SCALES])
def test_a_plain_checkpoint_that_kept_its_setting_is_used_as_it_is(tmp_path, caplog, config):
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, plain(), config)
    assert model.layers[0].mlp.down_proj.weight.kind in ("plain", "packed")
    (warning,) = [one for one in caplog.messages if "quantization_config" in one]
    assert config["quant_method"] in warning


def test_some_layers_may_be_plain_and_no_warning_is_given(tmp_path, caplog):
    tensors = quantized({"channel": 2})
    at = "model.layers.1.mlp.down_proj"
    del tensors[f"{at}.weight_scale"]
    tensors[f"{at}.weight"] = plain()[f"{at}.weight"]
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, tensors, CHANNELS)
    assert model.layers[1].mlp.down_proj.weight.kind != "fp8"
    assert model.layers[0].mlp.down_proj.weight.kind == "fp8"
    assert not [one for one in caplog.messages if "quantization_config" in one]


def test_codes_without_their_scales_are_no_plain_weight(tmp_path):
    tensors = quantized({"channel": 2})
    del tensors["model.layers.1.mlp.down_proj.weight_scale"]
    with pytest.raises(WeightError, match=r"missing .*layers\.1\.mlp\.down_proj\.weight_scale"):
        load(tmp_path, tensors, CHANNELS)


@pytest.mark.parametrize(
    ("name", "dtype", "says"),
    [
        ("weight", torch.bfloat16, r"down_proj\.weight is bfloat16; .* need float8_e4m3fn"),
        ("weight", torch.uint8, r"down_proj\.weight is uint8"),
        ("weight_scale", torch.int32, r"down_proj\.weight_scale is int32; .* need float32"),
        ("weight_scale", torch.float8_e4m3fn, r"weight_scale is float8_e4m3fn"),
    ],
)
def test_a_tensor_of_another_kind_is_not_converted(tmp_path, name, dtype, says):
    tensors = quantized({"channel": 2})
    name = f"model.layers.1.mlp.down_proj.{name}"
    tensors[name] = tensors[name].float().to(dtype)
    with pytest.raises(WeightError, match=says):
        load(tmp_path, tensors, CHANNELS)


def test_pickles_decide_as_safetensors_do(tmp_path):
    torch.save(plain(), tmp_path / "pytorch_model.bin")
    model_type, config = read_model_config(LLAMA | {"quantization_config": CHANNELS})
    settings = {"folder": tmp_path, "dtype": torch.bfloat16, "progress": False}
    model = build_model(model_type, config, **settings)
    assert model.layers[0].mlp.down_proj.weight.kind != "fp8"
    (tmp_path / "pytorch_model.bin").unlink()
    save_file(plain(), tmp_path / "model.safetensors")
    assert build_model(model_type, config, **settings).layers[0].mlp.down_proj.weight.kind != "fp8"
