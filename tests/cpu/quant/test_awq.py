"""AWQ checkpoints against dense models of their values, by packers that share no code."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from quire.config.quant.awq import AwqFormat
from quire.config.quant.read import read_quantization
from quire.errors import ConfigError, WeightError
from quire.layers import ColumnLinear
from quire.quant import awq
from tests import tiers
from tests.cpu.quant.oracle import build, check_logits, check_pair, check_ranks, tiny, write_pair
from tests.cpu.quant.packers_int import awq_gemm_tensors, awq_gemv_tensors, dense, rtn
from tests.cpu.quant.single_layer import load_layer

pytestmark = pytest.mark.sampled(2)

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def quantizer(group=32, layout="gemm", symmetric=False, zeros=True, skip=("lm_head",), bits=4):
    """A function for write_pair."""

    def quantize(name, weight):
        if any(one in name for one in skip):
            return None
        q, zero, scale, _ = made = rtn(weight, bits, group, symmetric=symmetric)
        if layout == "gemm":
            found = awq_gemm_tensors(q, zero, scale, bits)
        else:
            found = awq_gemv_tensors(q, zero, scale, group)
        if not zeros:
            del found["qzeros"]
        return found, dense(*made)

    return quantize


EVERYDAY = [("llama", "gemv", 64), ("qwen3_moe", "gemm", 32)]
ALL = [
    (model, layout, group)
    for model in ("llama", "qwen3_moe", "deepseek_v2")
    for layout in ("gemm", "gemv")
    for group in (32, 64, -1)
]


@pytest.mark.parametrize(
    ("model", "layout", "group"),
    [*EVERYDAY, *tiers.long(*(one for one in ALL if one not in EVERYDAY))],
)
def test_a_checkpoint_computes_what_its_values_do(model, layout, group, tmp_path):
    config = CONFIG | {"version": layout.upper(), "group_size": group}
    check_pair(write_pair(tmp_path, tiny(model), quantizer(group, layout), config))


def test_the_up_projection_of_latent_attention_becomes_plain(tmp_path):
    check_logits(write_pair(tmp_path, tiny("deepseek_v2"), quantizer(), CONFIG))


def test_groups_of_128_under_their_older_names_and_activations_in_16_bits(tmp_path):
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True}
    hf = tiny("llama", 128)
    pair = write_pair(tmp_path, hf, quantizer(128), config, dtype=torch.bfloat16)
    check_logits(pair)
    check_logits(pair, torch.bfloat16)
    check_ranks(pair)


@pytest.mark.parametrize(("model", "symmetric"), [("llama", True), ("qwen3_moe", False)])
def test_eight_bits(model, symmetric, tmp_path):
    config = CONFIG | {"bits": 8, "zero_point": not symmetric}
    pair = write_pair(tmp_path, tiny(model), quantizer(symmetric=symmetric, bits=8), config)
    assert check_logits(pair)[0].layers[0].mlp.down_proj.weight.bits == 8
    check_ranks(pair)


@pytest.mark.parametrize("zeros", [True, False])
def test_weights_without_zero_points_may_be_without_zeros(zeros, tmp_path):
    quantize = quantizer(symmetric=True, zeros=zeros)
    check_logits(write_pair(tmp_path, tiny("llama"), quantize, CONFIG | {"zero_point": False}))


def test_zeros_are_needed_where_there_are_zero_points(tmp_path):
    pair = write_pair(tmp_path, tiny("llama"), quantizer(zeros=False), CONFIG)
    with pytest.raises(WeightError, match=r"missing in the checkpoint: .*\.qzeros"):
        build(pair.folder)


@pytest.mark.parametrize("listed", [["self_attn"], None])
def test_tensors_decide_which_layers_are_plain(listed, tmp_path):
    config = CONFIG | {"modules_to_not_convert": listed}
    skip = ("lm_head", "self_attn")
    model, _ = check_logits(write_pair(tmp_path, tiny("llama"), quantizer(skip=skip), config))
    assert model.layers[0].mlp.down_proj.method.name == "awq"
    assert model.layers[0].self_attn.o_proj.method.name == "none"


def test_a_quantized_head(tmp_path):
    config = CONFIG | {"lm_head": True}
    check_logits(write_pair(tmp_path, tiny("llama"), quantizer(skip=()), config))


@st.composite
def layers(draw):
    """(layout, bits, group, codes, zeros at both ends, scales, groups of inputs) of a layer."""
    layout, bits = draw(st.sampled_from([("gemm", 4), ("gemm", 8), ("gemv", 4)]))
    group = draw(st.sampled_from([-1, 32, 64, 128]))
    outputs, inputs = 8 * draw(st.integers(1, 9)), 32 * draw(st.integers(4, 12))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = inputs if group == -1 else group
    groups = -(-inputs // size)
    q = torch.randint(0, 1 << bits, (outputs, inputs), generator=g)
    zero = torch.randint(0, 1 << bits, (outputs, groups), generator=g)
    zero[0], zero[1] = 0, (1 << bits) - 1
    scale = torch.rand(outputs, groups, generator=g).half()
    return layout, bits, group, q, zero, scale, torch.arange(inputs) // size


@given(layers())
def test_a_layer_gives_its_values_back(drawn):
    layout, bits, group, q, zero, scale, g_idx = drawn
    form = AwqFormat(bits=bits, layout=layout, group=max(group, 0), symmetric=False)
    if layout == "gemm":
        tensors = awq_gemm_tensors(q, zero, scale, bits)
    else:
        tensors = awq_gemv_tensors(q, zero, scale, group)
    layer = load_layer(ColumnLinear(q.shape[1], q.shape[0]), awq.Method(form), tensors)
    assert torch.equal(layer.weight.dequantize(torch.float32), dense(q, zero, scale, g_idx))


REFUSED = {
    "version": ["gemv_fast", "llm-awq", "marlin", "gemx"],
    "backend": ["llm-awq"],
    "bits": [2, 3, None],
    "group_size": [0, "128", 1.5],
    "zero_point": ["yes"],
    "desc_act": [True],
    "dynamic": [{".*": {}}],
    "what_is_this": [1],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values]
)
def test_a_field_that_is_not_understood_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=rf"config\.json: quantization_config.*{field}"):
        read_quantization({"quantization_config": CONFIG | {field: value}})


def test_version_gemv_has_four_bits():
    config = CONFIG | {"version": "gemv", "bits": 8}
    with pytest.raises(ConfigError, match=r"quantization_config\.bits is 8; supported: 4"):
        read_quantization({"quantization_config": config})


def cut(tensors, name):
    tensors[name + "qweight"] = tensors[name + "qweight"][:, :-1]


def turned(tensors, name):
    tensors[name + "qzeros"] = tensors[name + "qzeros"].t()


def floats(tensors, name):
    tensors[name + "scales"] = tensors[name + "scales"].int()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, r"o_proj\.qweight is \[128, 7\], the model has \[128, 8\]"),
        (turned, r"o_proj\.qzeros is \[8, 4\], the model has \[4, 8\]"),
        (floats, r"o_proj\.scales is int32; config\.json and the model need float32"),
    ],
)
def test_a_broken_tensor_is_named(change, message, tmp_path):
    def edit(tensors):
        change(tensors, "model.layers.1.self_attn.o_proj.")

    pair = write_pair(tmp_path, tiny("llama"), quantizer(), CONFIG, edit=edit)
    with pytest.raises(WeightError, match=message):
        build(pair.folder)


def test_a_lying_group_size_is_an_error(tmp_path):
    pair = write_pair(tmp_path, tiny("llama"), quantizer(32), CONFIG | {"group_size": 64})
    with pytest.raises(WeightError, match=r"qzeros is \[4, 8\], the model has \[2, 8\]"):
        build(pair.folder)
