"""FP8 and FP4 of ModelOpt, FBGEMM and Quark: their fields, names and scales."""

import json
from functools import partial

import pytest
import torch

from quire.config.facts import read_hf_config
from quire.config.quant.read import read_quantization
from quire.errors import ConfigError, WeightError
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import prompt_of
from tests.cpu.quant.oracle import build, check_logits, tiny, write_pair

E4M3 = torch.float8_e4m3fn
HALF = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([HALF, -HALF])
PLAIN = ("plain", "packed")


def fp8_tensor(name, weight):
    """One scale for the tensor, and one for its inputs."""
    if name == "lm_head":
        return None
    scale = weight.abs().amax() / 448
    data = (weight / scale).to(E4M3)
    tensors = {"weight": data, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    return tensors, data.float() * scale


def fp8_rows(name, weight):
    """One scale per output."""
    if name == "lm_head":
        return None
    scale = weight.abs().amax(1, keepdim=True) / 448
    data = (weight / scale).to(E4M3)
    return {"weight": data, "weight_scale": scale}, data.float() * scale


def fp4(name, weight, group):
    """Codes of the nearest values below a scale per group, two to a byte: (bytes, codes)."""
    parts = weight.unflatten(1, (-1, group))
    codes = (parts[..., None] - E2M1).abs().argmin(-1).flatten(1)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), codes


def nvfp4(name, weight):
    """As ModelOpt has it: the scale of the tensor multiplies."""
    if name == "lm_head":
        return None
    whole = weight.abs().amax() / (448 * 6)
    scale = (weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6 / whole).to(E4M3)
    wide = (scale.float() * whole).repeat_interleave(16, 1)
    packed, codes = fp4(name, weight / wide, 16)
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": whole}
    return tensors | {"input_scale": torch.tensor(0.5)}, E2M1[codes] * wide


def mxfp4(name, weight):
    """As Quark has it."""
    if name == "lm_head":
        return None
    power = (weight.unflatten(1, (-1, 32)).abs().amax(-1) / 6).log2().ceil()
    wide = torch.exp2(power).repeat_interleave(32, 1)
    packed, codes = fp4(name, weight / wide, 32)
    return {"weight": packed, "weight_scale": (power + 127).to(torch.uint8)}, E2M1[codes] * wide


SIDE = {
    "producer": {"name": "modelopt", "version": "0.33"},
    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
FP8_SPEC = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
MX_SPEC = {
    "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0",
    "is_dynamic": False, "ch_axis": -1,
}  # fmt: skip
ROWS_SPEC = {"dtype": "fp8_e4m3", "qscheme": "per_token", "is_dynamic": True}


INT8_SPEC = {"dtype": "int8", "qscheme": "per_channel", "symmetric": True, "is_dynamic": False}
INT8_ROWS = {"dtype": "int8", "qscheme": "per_channel", "symmetric": True, "is_dynamic": True}
INT8_FIXED = {"dtype": "int8", "qscheme": "per_tensor", "symmetric": False, "is_dynamic": False}


def int8_rows(name, weight, zero=11):
    """As Quark has it: with the zeros of weights, and of rows that have a fixed scale."""
    if name == "lm_head":
        return None
    scale = weight.abs().amax(1) / 127
    data = (weight / scale[:, None]).round().to(torch.int8)
    tensors = {
        "weight": data, "weight_scale": scale,
        "weight_zero_point": torch.zeros(len(scale), dtype=torch.int8),
        "input_scale": torch.tensor([0.04]),
        "input_zero_point": torch.tensor([zero], dtype=torch.int8),
    }  # fmt: skip
    return tensors, data * scale[:, None]


def quark(weight, inputs, **changes):
    layer = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    export = {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"}
    found = {"quant_method": "quark", "global_quant_config": layer, "export": export}
    return found | {"exclude": ["*lm_head"], "layer_quant_config": {}} | changes


@pytest.mark.parametrize(
    ("config", "quantize"),
    [
        (MODELOPT, fp8_tensor),
        (MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, fp8_rows),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_rows),
        (quark(FP8_SPEC, FP8_SPEC), fp8_tensor),
        (quark({**FP8_SPEC, "qscheme": "per_channel"}, ROWS_SPEC), fp8_rows),
    ],
)
def test_fp8_weights_are_those_of_their_scales(tmp_path, config, quantize):
    pair = write_pair(tmp_path, tiny("llama"), quantize, config)
    model, _ = build(pair.folder)
    dense, _ = build(pair.dense)
    for ours, theirs in zip(model.layers, dense.layers):
        for path in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            weight = ours.get_submodule(path).weight
            assert weight.kind == "fp8"
            assert (weight.input_scale is not None) == (quantize is fp8_tensor)
            assert torch.equal(weight.dequantize(), theirs.get_submodule(path).weight.dequantize())
    assert model.lm_head.weight.kind in PLAIN


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    ("config", "quantize"),
    [
        (MODELOPT | {"quant_algo": "NVFP4", "exclude_modules": ["*.mlp.gate"]}, nvfp4),
        (quark(MX_SPEC, {**MX_SPEC, "is_dynamic": True}), mxfp4),
    ],
)
def test_fp4_gives_the_logits_of_its_values(tmp_path, config, quantize, model):
    pair = write_pair(tmp_path, tiny(model, num_hidden_layers=2), quantize, config)
    built = check_logits(pair)[0]
    assert built.layers[0].mlp.down_proj.weight.kind not in (*PLAIN, "fp8")
    assert built.lm_head.weight.kind in PLAIN


def test_a_side_file_states_the_settings(tmp_path):
    pair = write_pair(tmp_path, tiny("llama"), nvfp4, None)
    (pair.folder / "hf_quant_config.json").write_text(json.dumps(SIDE))
    hf = read_hf_config(pair.folder)
    (pair.folder / "config.json").write_text(json.dumps(hf))
    assert read_quantization(hf).quant_method == "modelopt"
    check_logits(pair)


def test_layers_of_several_formats(tmp_path):
    layers = {f"model.layers.0.mlp.{one}_proj": {"quant_algo": "fp8"} for one in ("gate", "up")}
    layers["model.layers.1.mlp.down_proj"] = {"quant_algo": "NVFP4", "group_size": 16}

    def quantize(name, weight):
        if name in layers:
            return (fp8_tensor if layers[name]["quant_algo"] == "fp8" else nvfp4)(name, weight)
        return None

    config = MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    model, _ = build(write_pair(tmp_path, tiny("llama"), quantize, config).folder)
    assert model.layers[0].mlp.gate_up_proj.weight.kind == "fp8"
    assert model.layers[1].mlp.down_proj.weight.kind not in (*PLAIN, "fp8")
    assert model.layers[1].mlp.gate_up_proj.weight.kind in PLAIN


def test_a_head_in_eight_bits(tmp_path):
    def quantize(name, weight):
        return fp8_rows("", weight) if name == "lm_head" else None

    config = quark({**FP8_SPEC, "qscheme": "per_channel"}, ROWS_SPEC, exclude=[])
    model, _ = build(write_pair(tmp_path, tiny("llama"), quantize, config).folder)
    assert model.lm_head.weight.kind == "fp8"
    assert model.layers[0].mlp.down_proj.weight.kind in PLAIN


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    ("inputs", "zero"), [(INT8_FIXED, 11), (INT8_FIXED | {"symmetric": True}, 0), (INT8_ROWS, None)]
)
def test_quark_in_bytes_equals_compressed_tensors(tmp_path, inputs, zero, model):
    """The same tensors under both configurations, which test_int8.py checks for the latter."""
    fixed, symmetric = not inputs["is_dynamic"], inputs["symmetric"]

    def quantize(name, weight, theirs=False):
        if (made := int8_rows(name, weight, zero or 0)) is None:
            return None
        extra = [] if fixed else ["input_scale", "input_zero_point"]
        if theirs:
            extra.append("weight_zero_point")
            extra += ["input_zero_point"] if symmetric and fixed else []
        return {k: v for k, v in made[0].items() if k not in extra}, made[1]

    rows = {"num_bits": 8, "type": "int", "strategy": "tensor" if fixed else "token"}
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        "input_activations": rows | {"dynamic": not fixed, "symmetric": symmetric},
    }
    other = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}
    other |= {"config_groups": {"group_0": group}}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ours = write_pair(tmp_path / "a", tiny(model), quantize, quark(INT8_SPEC, inputs))
    theirs = write_pair(tmp_path / "b", tiny(model), partial(quantize, theirs=True), other)
    built, ids = build(ours.folder), prompt_of(30, 96)
    assert built[0].layers[0].mlp.down_proj.weight.kind in ("int8", "panel_int8")
    assert torch.equal(Stepper(*built).logits(ids), Stepper(*build(theirs.folder)).logits(ids))


@pytest.mark.parametrize("suffix", ["weight_zero_point", "input_zero_point"])
def test_zeros_of_quark_that_are_not_zero_are_refused(tmp_path, suffix):
    def edit(tensors):
        tensors[f"model.layers.0.mlp.down_proj.{suffix}"][0] = 3

    config = quark(INT8_SPEC, INT8_FIXED | {"symmetric": True})
    hf = tiny("llama", num_hidden_layers=1)
    pair = write_pair(tmp_path, hf, partial(int8_rows, zero=0), config, edit=edit)
    with pytest.raises(WeightError, match=f"down_proj: {suffix} is not zero"):
        build(pair.folder)


def test_names_with_wildcards_and_layers_of_their_own():
    mine = {"*o_proj": {"weight": MX_SPEC}, "*.k_proj": {"weight": None}}
    facts = read_quantization(
        {"quantization_config": quark(FP8_SPEC, FP8_SPEC, layer_quant_config=mine)}
    )
    assert facts.format_of(["model.layers.0.self_attn.o_proj"]).method == "mxfp4"
    assert facts.format_of(["model.layers.0.self_attn.k_proj"]) is None
    assert facts.format_of(["model.layers.0.self_attn.q_proj"]).method == "fp8"
    assert facts.format_of(["lm_head"]) is None
    excluded = MODELOPT | {"exclude_modules": ["model.layers.1.self_attn*"]}
    facts = read_quantization({"quantization_config": excluded})
    assert facts.format_of(["model.layers.1.self_attn.o_proj"]) is None
    assert facts.format_of(["model.layers.11.self_attn.o_proj"]) is not None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (MODELOPT | {"quant_algo": "W4A16_AWQ"}, "quant_algo is 'W4A16_AWQ'; supported: 'FP8'"),
        (MODELOPT | {"quant_algo": "MXFP8"}, "quant_algo is 'MXFP8'"),
        (MODELOPT | {"quant_algo": None}, "quant_algo is 'NONE'"),
        (MODELOPT | {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is 'NVFP4'"),
        (MODELOPT | {"kv_cache_scheme": {"num_bits": 4}}, r"kv_cache_scheme\.num_bits is 4"),
        (MODELOPT | {"pre_quant_scale": True}, "pre_quant_scale is True"),
        (MODELOPT | {"quant_algo": "NVFP4", "group_size": 32}, "group_size is 32; supported"),
        (MODELOPT | {"new": 1}, "fields that quire does not know: new"),
        (MODELOPT | {"quantization": {"new": 1}}, "fields that quire does not know: new"),
        (MODELOPT | {"exclude_modules": "lm_head"}, "exclude_modules is 'lm_head'; it must be a"),
        (MODELOPT | {"exclude_modules": ["*a*b*c*d*"]}, "exclude_modules has the pattern"),
        ({"quant_method": "fbgemm_fp8", "group": 1}, "fields that quire does not know: group"),
        (quark({"dtype": "int4"}, None), r"weight\.dtype is 'int4'; supported: 'fp8_e4m3'"),
        (quark(FP8_SPEC, None), r"input_tensors\.dtype is None"),
        (quark(INT8_SPEC, None), r"input_tensors\.dtype is None; supported: 'int8'"),
        (quark(INT8_SPEC | {"symmetric": False}, INT8_ROWS), r"weight\.symmetric is False"),
        (quark(INT8_SPEC, FP8_SPEC), r"input_tensors\.dtype is 'fp8_e4m3'; supported: 'int8'"),
        (quark(FP8_SPEC, {**FP8_SPEC, "qscheme": "per_token"}), "qscheme is 'per_token'"),
        (quark(MX_SPEC | {"scale_format": "float"}, None), "scale_format is 'float'"),
        (quark(FP8_SPEC, FP8_SPEC, algo_config=[{"name": "rotation"}]), "name is 'rotation'"),
        (quark(FP8_SPEC, FP8_SPEC, layer_quant_config={"*k": {"x": 1}}), "does not know: x"),
        (quark(FP8_SPEC, FP8_SPEC, other=1), "does not know: other"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config, says):
    with pytest.raises(ConfigError, match=says):
        read_quantization({"quantization_config": config})


@pytest.mark.parametrize(
    ("suffix", "change", "says"),
    [
        ("weight_scale_2", lambda t: None, "missing .*weight_scale_2"),
        ("weight_scale_2", lambda t: t * -1, "a scale is a positive number"),
        (
            "weight_scale",
            lambda t: t[:, :-1],
            r"weight_scale is \[64, 7\], the model has \[64, 8\]",
        ),
        ("weight", lambda t: t.to(torch.int8), "weight is int8; .* need uint8"),
        ("input_scale", lambda t: None, "missing .*input_scale"),
    ],
)
def test_a_broken_tensor_is_named(tmp_path, suffix, change, says):
    def edit(tensors):
        name = f"model.layers.0.mlp.down_proj.{suffix}"
        if (made := change(tensors.pop(name))) is not None:
            tensors[name] = made

    config = MODELOPT | {"quant_algo": "NVFP4"}
    pair = write_pair(tmp_path, tiny("llama", num_hidden_layers=1), nvfp4, config, edit=edit)
    with pytest.raises(WeightError, match=says):
        build(pair.folder)
