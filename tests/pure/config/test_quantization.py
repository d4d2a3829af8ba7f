"""Quantization settings in config.json and in options."""

import copy

import pytest

from quire.config.quant.facts import QuantFacts
from quire.config.quant.fp8 import Fp8Format
from quire.config.quant.read import read_quantization
from quire.errors import ConfigError

FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**FLOAT, "strategy": "channel", "dynamic": False},
            "input_activations": {**FLOAT, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}


def read(said, asked=None):
    return read_quantization({"quantization_config": said}, asked)


def changed(path, value):
    made = copy.deepcopy(COMPRESSED)
    at = made["config_groups"]["group_0"]
    *parents, last = path.split(".")
    for name in parents:
        at = at[name]
    at[last] = value
    return made


def test_weights_stay_unquantized_unless_requested():
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}) is None
    made = QuantFacts(quant_method="fp8", default=Fp8Format(is_stored=False))
    assert read_quantization({}, "fp8") == made
    assert read_quantization({}, "fp8_block").default.block == 128


@pytest.mark.parametrize("fmt", ["e4m3", "float8_e4m3fn"])
def test_blocks_of_deepseek_and_minimax(fmt):
    found = read({"quant_method": "fp8", "fmt": fmt, "weight_block_size": [128, 128]})
    assert found.default == Fp8Format(block=128, scale="weight_scale_inv")
    assert found.is_stored


def test_one_scale_per_tensor_with_fixed_activations():
    found = read({"quant_method": "fp8", "activation_scheme": "static"})
    assert found.default == Fp8Format(static_activations=True)


def test_compressed_tensors():
    found = read(COMPRESSED)
    assert (found.default, found.quant_method) == (Fp8Format(), "compressed-tensors")
    under_its_older_name = read_quantization({"compression_config": COMPRESSED})
    assert under_its_older_name == found


def test_layers_are_left_plain_by_whole_components_or_by_pattern():
    found = read(COMPRESSED)
    assert found.format_of(["lm_head"]) is None
    assert found.format_of(["layers.3.mlp.gate", "model.layers.3.mlp.gate"]) is None
    assert found.format_of(["layers.3.mlp.gate_proj"]) == Fp8Format()
    named = read({"quant_method": "fp8", "modules_to_not_convert": ["self_attn", "layers.1.mlp"]})
    assert named.format_of(["model.layers.0.self_attn.o_proj"]) is None
    assert named.format_of(["layers.1.mlp.up_proj"]) is None
    assert named.format_of(["layers.11.mlp.up_proj"]) is not None
    assert named.format_of(["layers.1.mlp2.up_proj"]) is not None


@pytest.mark.parametrize("asked", [None, "fp8", "compressed-tensors"])
def test_naming_what_the_checkpoint_has_is_no_contradiction(asked):
    assert read(COMPRESSED, asked).is_stored


@pytest.mark.parametrize(
    ("said", "asked", "says"),
    [
        ({"quant_method": "awx"}, None, "has the quantization method 'awx'; supported"),
        ({}, "awq", "quantization='awq', but the checkpoint is not quantized, .* allowed: fp8, "),
        (COMPRESSED, "fp8_block", "already quantized .compressed-tensors."),
        ("fp8", None, "quantization_config is 'fp8'; it must be an object"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, None, "fmt is 'e5m2'"),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            None,
            r"weight_block_size is \[64, 64\]; supported: None or \[128, 128\]",
        ),
        (
            {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "activation_scheme": "static",
            },
            None,
            'with weight_block_size it must be "dynamic"',
        ),
        (changed("weights.num_bits", 4), None, r"group_0\.weights\.num_bits is 4; supported: 8"),
        (changed("weights.type", "int"), None, r"weights\.type is 'int'"),
        (changed("weights.strategy", "group"), None, r"weights\.strategy is 'group'"),
        (changed("input_activations", None), None, r"input_activations\.num_bits is None"),
        (changed("input_activations.strategy", "tensor"), None, "strategy is 'tensor'"),
        (changed("targets", ["Conv2d"]), None, "targets is .'Conv2d'"),
        ({**COMPRESSED, "config_groups": {}}, None, "must have one entry in config_groups"),
        ({**COMPRESSED, "sparsity_config": {"format": "dense"}}, None, "no sparsity"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(said, asked, says):
    with pytest.raises(ConfigError, match=says):
        read(said, asked)
