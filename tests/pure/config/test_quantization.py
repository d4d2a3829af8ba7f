"""Quantization settings in config.json and in options."""

import copy

import pytest

from quire.config.quant.compressed_tensors import PackedIntFormat
from quire.config.quant.facts import QuantFacts
from quire.config.quant.fp8 import Fp8Format
from quire.config.quant.int8 import Int8Format
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


def transformed(location, **fields):
    apply = [{"targets": ["Linear"], "location": location, **fields}]
    group = {"type": "hadamard", "apply": apply}
    return {**COMPRESSED, "transform_config": {"config_groups": {"R1": group}}}


def cached(**changes):
    scheme = {**FLOAT, "strategy": "tensor", "dynamic": False, "symmetric": True}
    return {**COMPRESSED, "kv_cache_scheme": scheme | changes}


@pytest.mark.parametrize(
    "found", [COMPRESSED, transformed("weight_output"), transformed("weight_input")]
)
def test_settings_that_change_nothing_here_are_accepted(found):
    extra = {"sparsity_config": {"format": "dense"}, "quantization_status": "compressed"}
    assert read(found | extra) == read(COMPRESSED)


INT8 = {"num_bits": 8, "type": "int"}
ROWS = {**INT8, "strategy": "token", "dynamic": True}


def group(weights, inputs=None, fmt="int-quantized", **extra):
    one = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    named = {"quant_method": "compressed-tensors", "format": fmt}
    return read({**named, "config_groups": {"group_0": one | extra}}).default


def test_the_most_specific_target_decides_and_ignore_goes_first():
    def one(bits, *targets):
        return {"targets": list(targets), "weights": {"num_bits": bits, "group_size": 32}}

    groups = {
        "a": one(4, "Linear"),
        "b": one(3, "re:.*mlp.*"),
        "c": one(8, "layers.0.mlp.up_proj", "lm_head"),
    }
    ignored = ["lm_head", "re:.*layers.1.mlp.*"]
    found = read({"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignored})
    bits = {
        name: None if (form := found.format_of([name])) is None else form.bits
        for name in ("layers.0.self_attn.o_proj", "layers.0.mlp.down_proj", "layers.0.mlp.up_proj")
    }
    assert list(bits.values()) == [4, 3, 8]
    assert found.format_of(["lm_head"]) is None
    assert found.format_of(["layers.1.mlp.up_proj"]) is None
    with pytest.raises(ConfigError, match="2 groups with the target 'Linear'"):
        read(
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": one(4, "Linear"), "b": one(8, "Linear")},
            }
        )


def test_integers_of_eight_bits_multiply_rows_in_bytes():
    channel = {**INT8, "strategy": "channel"}
    fixed = {**INT8, "strategy": "tensor"}
    assert group(channel, ROWS) == Int8Format()
    assert group(channel, {**ROWS, "symmetric": False}) == Int8Format(symmetric_inputs=False)
    assert group(fixed, fixed) == Int8Format(static_activations=True)
    assert group(channel, fixed, "naive-quantized") == Int8Format(static_activations=True)
    with pytest.raises(ConfigError, match=r"input_activations\.strategy is 'tensor'"):
        group(channel, {**ROWS, "strategy": "tensor"})


def test_other_integers_multiply_activations_in_16_bits():
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
    assert group(four, fmt="pack-quantized") == PackedIntFormat(bits=4, group=64)
    assert group(four, ROWS, "pack-quantized").wide_inputs
    assert group({**INT8, "strategy": "group", "group_size": 32}, ROWS) == PackedIntFormat(
        bits=8, group=32, packed=False, wide_inputs=True
    )
    assert group({"num_bits": 3, "group_size": -1}, fmt="pack-quantized").group is None
    with pytest.raises(ConfigError, match=r"weights\.num_bits is 16"):
        group({**four, "num_bits": 16}, fmt="pack-quantized")
    with pytest.raises(ConfigError, match="format is 'float-quantized'"):
        group(four, fmt="float-quantized")


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
        (changed("weights.num_bits", 4), None, r"group_0\.weights\.group_size is 0; supported: 16"),
        (
            changed("weights.num_bits", 6),
            None,
            r"group_0\.weights\.num_bits is 6; supported: 4 or 8",
        ),
        (changed("weights.type", "complex"), None, r"weights\.type is 'complex'"),
        (changed("weights.strategy", "group"), None, r"weights\.strategy is 'group'"),
        (changed("input_activations.num_bits", 4), None, r"input_activations\.num_bits is 4"),
        (changed("input_activations.strategy", "tensor"), None, "strategy is 'tensor'"),
        (changed("targets", ["Conv2d"]), None, "targets has the class 'Conv2d'"),
        (changed("targets", "Linear"), None, "targets is 'Linear'; it must be a list of names"),
        (changed("targets", ["re:(a*)*b"]), None, "targets has the pattern"),
        (changed("weights", None), None, "input_activations is .*; supported: None"),
        (changed("weights", [8]), None, r"weights is \[8\]; it must be an object"),
        (changed("weights.zero", 1), None, r"weights has fields that quire does not know: zero"),
        (changed("output_activations", FLOAT), None, "output_activations is"),
        (changed("format", "mxfp6-pack-quantized"), None, "format is 'mxfp6-pack-quantized'; supp"),
        (changed("format", "mxfp8-quantized"), None, r"strategy is 'channel'; supported: 'group'"),
        (changed("extra", 1), None, "group_0 has fields that quire does not know: extra"),
        ({**COMPRESSED, "config_groups": {}}, None, "config_groups has no entry"),
        ({**COMPRESSED, "config_groups": [1]}, None, r"config_groups is \[1\]; it must be"),
        ({**COMPRESSED, "config_groups": {"W9A9": ["Linear"]}}, None, "presets: FP8, FP8_BLOCK"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, None, "sparse-24"),
        ({**COMPRESSED, "format": "marlin-24"}, None, "format is 'marlin-24'"),
        ({**COMPRESSED, "format": "dense"}, None, "format is 'dense'"),
        ({**COMPRESSED, "new_field": 1}, None, "fields that quire does not know: new_field"),
        (transformed("input"), None, "R1.apply.location is 'input': a rotation of activations"),
        (transformed("output"), None, r"use a checkpoint whose .* \(weight_input or weight_output"),
        (transformed("k_cache"), None, "apply.location is 'k_cache': a rotation"),
        (transformed("q_attn"), None, "apply.location is 'q_attn': a rotation"),
        (transformed("bias"), None, "apply.location is 'bias'; supported: 'weight_input' or"),
        (transformed("weight_input", when=1), None, "R1.apply has fields .* not know: when"),
        (cached(num_bits=4), None, r"kv_cache_scheme\.num_bits is 4; supported: 8"),
        (
            cached(type="uint"),
            None,
            r"kv_cache_scheme\.type is 'uint'; supported: 'float' or 'int'",
        ),
        (cached(strategy="token"), None, r"kv_cache_scheme\.strategy is 'token'"),
        (cached(dynamic=True), None, r"kv_cache_scheme\.dynamic is True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(said, asked, says):
    with pytest.raises(ConfigError, match=says):
        read(said, asked)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "float8_e4m3fn"),
        ({"strategy": "attn_head"}, "float8_e4m3fn"),
        ({"type": "int"}, "int8"),
    ],
)
def test_the_cache_that_a_checkpoint_has_scales_for(changes, name):
    assert read(cached(**changes)).kv_cache == name
    alone = read({**cached(**changes), "config_groups": {}})
    assert (alone.kv_cache, alone.default, alone.is_stored) == (name, None, False)
    assert read(COMPRESSED).kv_cache is None
    made = read({**cached(**changes), "config_groups": {}}, "int8")
    assert (made.quant_method, made.kv_cache, made.is_stored) == ("int8", name, False)
