"""Every reader of a quantization's configuration against settings that are broken or lie.

Each field of each configuration is given values of other types and sizes, is removed, or has a
strange one beside it. What is read must be settings; what is not, a ConfigError that names a field.
"""

import copy
import tracemalloc

import pytest

from quire.config.quant.facts import QuantFacts
from quire.config.quant.read import READERS, read_quantization
from quire.errors import ConfigError

INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "group"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
NV = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
TRANSFORM = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}
QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
QUARK_INT8 = {"dtype": "int8", "qscheme": "per_channel", "symmetric": True, "is_dynamic": False}
HQQ = {"nbits": 4, "group_size": 64, "axis": 1, "channel_wise": True, "view_as_float": False}
GOOD = {
    "gptq": {
        "bits": 4, "group_size": 128, "sym": True, "desc_act": True, "lm_head": False,
        "checkpoint_format": "gptq", "pack_dtype": "int32", "damp_percent": 0.1,
        "dynamic": {"-:.*o_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 64}},
        "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]],
    },
    "awq": {
        "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    },
    "squeezellm": {"wbits": 4},
    "auto-round": {
        "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64}},
    },
    "fp8": {
        "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head"],
    },
    "bitsandbytes": {
        "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": ["lm_head"],
    },
    "compressed-tensors": {
        "format": "mixed-precision", "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {
            "a": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
            "b": {"targets": ["re:.*down_proj"], "weights": INT8, "input_activations": ROWS,
                  "format": "int-quantized"},
            "c": {"targets": ["re:.*o_proj"], "weights": FP8, "format": "float-quantized"},
            "d": {"targets": ["re:.*v_proj"], "weights": NV, "format": "nvfp4-pack-quantized"},
            "W4A16": ["model.layers.0.self_attn.q_proj"],
        },
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        "transform_config": {"config_groups": {"R1": TRANSFORM}},
        "sparsity_config": {"format": "dense"},
    },
    "mxfp4": {"modules_to_not_convert": ["model.layers.*.self_attn"]},
    "modelopt": {
        "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"], "group_size": 16,
        "quantized_layers": {"model.layers.0.mlp.down_proj": {"quant_algo": "FP8"}},
        "kv_cache_quant_algo": "FP8",
    },
    "fbgemm_fp8": {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    "quark": {
        "global_quant_config": {"weight": QUARK_FP8, "input_tensors": QUARK_FP8},
        "layer_quant_config": {
            "*o_proj": {"weight": QUARK_INT8, "input_tensors": QUARK_INT8 | {"is_dynamic": True}}
        },
        "exclude": ["*lm_head"], "export": {"kv_cache_group": [], "weight_format": "real_quantized"},
        "algo_config": [{"name": "awq"}],
    },
    "gguf": {"types": {"model.layers.0.mlp.down_proj": "Q4_K"}},
    "hqq": {
        "quant_config": {
            "weight_quant_params": HQQ, "scale_quant_params": None, "zero_quant_params": None,
            "offload_meta": False,
        },
        "skip_modules": ["lm_head"],
    },
}  # fmt: skip
SAME = {"intel/auto-round": "auto-round", "modelopt_fp4": "modelopt"}
"""Readers that share a configuration with another."""
BAD = (
    *(
        None,
        True,
        -1,
        0,
        3,
        2**63,
        1e308,
        float("nan"),
        "",
        "x",
        "re:(a+)+b",
        "*" * 300,
        [],
        [None],
    ),
    *([[]], [{}], {}, {"x": None}, {"a": {"b": {}}}, "x" * 100_000, [1] * 1000, b"\xff"),
)
MAX_BYTES, MAX_MESSAGE = 4 << 20, 1000


def fields(value, path=()):
    """The path of every field and list item below a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in items:
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from fields(one, (*path, key))


def changed(config, path, change):
    """A copy in which the holder of the last key of a path is changed."""
    made = copy.deepcopy(config)
    at = made
    for key in path[:-1]:
        at = at[key]
    change(at, path[-1])
    return made


def replace_by(value):
    def change(at, key):
        at[key] = value

    return change


def remove(at, key):
    del at[key]


def strange(at, key):
    if isinstance(at, dict):
        at["what_is_this"] = 1


def test_every_reader_is_here():
    assert GOOD.keys() | SAME.keys() == READERS.keys()


def outcome(config):
    """What is read, or the text of a ConfigError; and the peak of memory in bytes."""
    tracemalloc.start()
    try:
        found = read_quantization({"quantization_config": config})
        found.format_of(["model.layers.0.mlp.down_proj"])
        hash(found.default)
    except ConfigError as error:
        found = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return found, peak


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", GOOD)
def test_broken_settings_are_config_errors_or_read(method):
    good = {"quant_method": method, **GOOD[method]}
    assert isinstance(outcome(good)[0], QuantFacts)
    refused = 0
    for path in fields(GOOD[method]):
        for change in (remove, strange, *map(replace_by, BAD)):
            found, peak = outcome(changed(good, path, change))
            assert peak < MAX_BYTES, path
            if isinstance(found, str):
                refused += 1
                assert len(found) < MAX_MESSAGE, (path, found[:200])
            else:
                assert isinstance(found, QuantFacts), path
    assert refused > 5


LIES = [
    ("hqq", "quant_config.weight_quant_params.nbits", True, "nbits is True"),
    ("hqq", "quant_config.weight_quant_params.nbits", 4.0, "nbits is 4.0"),
    ("hqq", "quant_config.weight_quant_params.group_size", 2**63, "group_size is 92233720368"),
    ("gptq", "bits", 4.0, "bits is 4.0; supported: 2 or 3 or 4 or 8"),
    ("gptq", "group_size", 2**63, "from 1 to 16777216 or -1"),
    ("gptq", "sym", 1, "sym is 1; supported: True or False"),
    ("awq", "group_size", 1 << 25, "group_size is 33554432"),
    ("compressed-tensors", "config_groups.a.weights.group_size", 2**63, "group_size is 92233"),
    ("compressed-tensors", "config_groups.a.weights.num_bits", 4.0, "num_bits is 4.0"),
    ("compressed-tensors", "config_groups.b.weights.symmetric", "no", "symmetric is 'no'"),
    ("compressed-tensors", "config_groups.b.input_activations.num_bits", "x", "num_bits is 'x'"),
    ("compressed-tensors", "config_groups.b.input_activations.dynamic", 1, "dynamic is 1"),
    ("fp8", "what_is_this", 1, "fields that quire does not know: what_is_this"),
    ("fp8", "expert_dtype", "fp4", "expert_dtype is 'fp4'; supported: 'fp8'"),
    (
        "fp8",
        "modules_to_convert",
        ["q_proj"],
        r"modules_to_convert is \['q_proj'\]; supported: None",
    ),
    ("bitsandbytes", "load_in_4bit", "yes", "load_in_4bit is 'yes'"),
    ("modelopt", "group_size", "x", "group_size is 'x'"),
    ("modelopt", "quantized_layers.model/layers/0/mlp/down_proj.new", 1, "does not know: new"),
    ("quark", "global_quant_config.weight.new", 1, "weight has fields .* not know: new"),
    ("quark", "global_quant_config.input_tensors.is_dynamic", "no", "is_dynamic is 'no'"),
]


@pytest.mark.parametrize(("method", "path", "value", "says"), LIES)
def test_a_value_of_another_type_or_a_new_field_is_refused(method, path, value, says):
    keys = tuple(key.replace("/", ".") for key in path.split("."))
    bad = changed({"quant_method": method, **GOOD[method]}, keys, replace_by(value))
    with pytest.raises(ConfigError, match=says):
        read_quantization({"quantization_config": bad})
