"""GPTQ checkpoints against dense models of their values, by packers that share no code."""

import json
import logging
from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from quire import LLM, SamplingParams
from quire.config.quant.gptq import GptqFormat
from quire.config.quant.read import read_quantization
from quire.errors import ConfigError, WeightError
from quire.layers import ColumnLinear, QKVLinear
from quire.models.build import build_model, read_model_config
from quire.quant import gptq, int_words
from tests import tiers
from tests.cpu.models.harness import Stepper
from tests.cpu.quant.oracle import (
    build,
    check_logits,
    check_pair,
    check_ranks,
    tiny,
    write_pair,
)
from tests.cpu.quant.packers_int import dense, gptq_tensors, rtn
from tests.cpu.quant.single_layer import load_layer

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


def quantizer(bits=4, group=32, symmetric=True, shuffle=False, skip=("lm_head",), **stored):
    """A function for write_pair."""

    def quantize(name, weight):
        if any(one in name for one in skip):
            return None
        order = None
        if shuffle:
            order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5))
        made = rtn(weight, bits, group, symmetric=symmetric, order=order)
        return gptq_tensors(*made, bits, **stored), dense(*made)

    return quantize


FORMATS = {
    "4 bits": ({}, {}),
    "8 bits, one group, asymmetric": (
        {"bits": 8, "group_size": -1, "sym": False},
        {"bits": 8, "group": -1, "symmetric": False},
    ),
    "3 bits, order of activations": (
        {"bits": 3, "desc_act": True},
        {"bits": 3, "shuffle": True},
    ),
    "2 bits, v2, asymmetric": (
        {"bits": 2, "checkpoint_format": "gptq_v2", "sym": False},
        {"bits": 2, "version": 2, "symmetric": False},
    ),
}
EVERYDAY = [
    ("llama", "3 bits, order of activations"),
    ("qwen3_moe", "4 bits"),
    ("deepseek_v2", "2 bits, v2, asymmetric"),
]
ALL = [(model, kind) for model in ("llama", "qwen3_moe", "deepseek_v2") for kind in FORMATS]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "kind"), [*EVERYDAY, *tiers.long(*(one for one in ALL if one not in EVERYDAY))]
)
def test_a_checkpoint_computes_what_its_values_do(model, kind, tmp_path):
    changes, how = FORMATS[kind]
    hf = tiny(model)
    if model == "deepseek_v2":
        hf["qk_rope_head_dim"] = 32  # zeros of 3 bits are whole words of 32 outputs
    check_pair(write_pair(tmp_path, hf, quantizer(**how), CONFIG | changes))


@pytest.mark.parametrize("shuffle", [False, True])
def test_one_tensor_for_several_projections(shuffle, tmp_path):
    config = CONFIG | {"desc_act": shuffle}
    check_logits(write_pair(tmp_path, tiny("phi3"), quantizer(shuffle=shuffle), config))


def test_one_tensor_whose_heads_are_in_another_order():
    made = rtn(torch.randn(8 * 8, 64), 4, 32, order=torch.randperm(64))
    order = [2, 0, 1, 4, 6, 3, 5, 7]  # where our heads are in the checkpoint
    form = GptqFormat(bits=4, group=32, symmetric=True, zero_offset=1, act_order=True)
    layer = QKVLinear(64, 4, 2, 8, head_order=order)
    layer = load_layer(layer, gptq.Method(form), gptq_tensors(*made, 4))
    heads = dense(*made).unflatten(0, (8, 8))[order]
    assert torch.equal(layer.weight.dequantize(torch.float32), heads.flatten(0, 1))


def test_a_side_file_and_names_of_the_option_through_the_offline_api(tmp_path):
    pair = write_pair(tmp_path, tiny("llama"), quantizer(), None)
    stated = {key: value for key, value in CONFIG.items() if key != "quant_method"}
    (pair.folder / "quantize_config.json").write_text(json.dumps(stated))
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64}
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False)
    answers = []
    for folder, name in [(pair.dense, None), (pair.folder, None), (pair.folder, "gptq_marlin")]:
        llm = LLM(str(folder), quantization=name, use_tqdm_on_load=False, **settings)
        (out,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        answers.append(out.outputs[0].token_ids)
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(ConfigError, match=r"quantization='awq', .* already quantized \(gptq\)"):
        LLM(str(pair.folder), quantization="awq", **settings)


DUMMY = {
    "gptq": CONFIG,
    "gptq, asymmetric, 3 bits": CONFIG | {"sym": False, "bits": 3, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32},
    "awq, gemv": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
    "squeezellm": {"quant_method": "squeezellm", "wbits": 4},
}


@pytest.mark.parametrize("kind", DUMMY)
def test_dummy_weights_have_random_codes_and_finite_outputs(kind):
    hf = tiny("llama") | {"quantization_config": DUMMY[kind]}
    model_type, config = read_model_config(hf)
    model = build_model(model_type, config, load_format="dummy", dtype=torch.float32)
    weight = model.layers[0].self_attn.o_proj.weight.dequantize(torch.float32)
    _, counts = weight[0].unique(return_counts=True)
    assert len(counts) >= 7
    assert int(counts.max()) < weight.shape[1] // 2
    assert 0.3 < float(weight.std()) * weight.shape[1] ** 0.5 < 3
    assert Stepper(model, config).logits([3, 1, 4, 1, 5]).isfinite().all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_start_on_a_gpu_finds_its_kernels_without_values(model, shuffle, tmp_path):
    config = CONFIG | {"desc_act": shuffle}
    pair = write_pair(tmp_path, tiny(model), quantizer(shuffle=shuffle), config)
    made, _ = build(pair.folder, device="meta", dtype=torch.bfloat16)
    weight = made.layers[0].self_attn.o_proj.weight
    assert (weight.group, weight.bits, weight.zero) == (32, 4, 8)
    assert (weight.perm is not None) == shuffle


def test_groups_of_128_and_activations_in_16_bits(tmp_path):
    pair = write_pair(
        tmp_path,
        tiny("llama", 128),
        quantizer(group=128),
        CONFIG | {"group_size": 128},
        dtype=torch.bfloat16,
    )
    check_logits(pair)
    check_logits(pair, torch.bfloat16)
    check_ranks(pair)


@pytest.mark.parametrize("stated", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("version", [1, 2])
def test_words_of_symmetric_zeros_decide_their_version(stated, version, tmp_path):
    config = CONFIG | {"checkpoint_format": stated}
    check_logits(write_pair(tmp_path, tiny("llama"), quantizer(version=version), config))


def test_asymmetric_zeros_are_read_as_stated_with_a_warning(tmp_path, caplog):
    config = CONFIG | {"sym": False}
    quantize = quantizer(symmetric=False, version=2)
    pair = write_pair(tmp_path, tiny("llama"), quantize, config)
    with caplog.at_level(logging.WARNING), pytest.raises(AssertionError):
        check_logits(pair)  # a config that states v1
    assert "checkpoint_format 'gptq'" in caplog.text


def test_zeros_that_vary_although_sym_is_true_are_used_with_a_warning(tmp_path, caplog):
    quantize = quantizer(symmetric=False)
    check_logits(write_pair(tmp_path, tiny("llama"), quantize, CONFIG))
    assert "sym is true, but stored zeros are from" in caplog.text


def test_tensors_that_a_checkpoint_may_be_without(tmp_path):
    quantize = quantizer(keep_zeros=False, keep_g_idx=False)
    check_logits(write_pair(tmp_path, tiny("llama"), quantize, CONFIG))
    with pytest.raises(WeightError, match=r"missing in the checkpoint: .*q_proj\.qzeros"):
        build_with(tmp_path, {"sym": False}, quantize)


def build_with(tmp_path, changes, quantize, model="llama", **settings):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    return build(write_pair(folder, tiny(model), quantize, CONFIG | changes, **settings).folder)


def test_rules_of_dynamic_by_sign_and_order(tmp_path):
    def quantize(name, weight):
        if "lm_head" in name or "layers.0.mlp" in name:
            return None
        bits, group = (8, -1) if "down_proj" in name else (2, 16) if "o_proj" in name else (4, 32)
        made = rtn(weight, bits, group)
        return gptq_tensors(*made, bits), dense(*made)

    dynamic = {
        r".*\.o_proj": {"bits": 2, "group_size": 16},
        r"+:.*\.down_proj": {"bits": 8, "group_size": -1},
        r".*\.down": {"bits": 3},
        r"-:model\.layers\.0\.mlp": {},
    }
    check_logits(write_pair(tmp_path, tiny("llama"), quantize, CONFIG | {"dynamic": dynamic}))


@pytest.mark.parametrize(
    ("model", "part", "pattern"),
    [
        ("qwen3_moe", "down_proj", r".*experts\..*down_proj"),
        ("qwen3_moe", "k_proj", r".*\.k_proj"),
        ("llama", "up_proj", r".*\.up_proj"),
    ],
)
def test_a_rule_about_one_part_of_a_layer(model, part, pattern, tmp_path):
    def quantize(name, weight):
        bits = 8 if part in name and (".experts." in name or part != "down_proj") else 4
        return quantizer(bits=bits)(name, weight)

    config = CONFIG | {"dynamic": {pattern: {"bits": 8}}}
    check_logits(write_pair(tmp_path, tiny(model), quantize, config))


def test_rules_about_all_experts(tmp_path):
    def quantize(name, weight):
        bits = 8 if ".experts." in name else 4
        return quantizer(bits=bits)(name, weight)

    dynamic = {r".*\.experts\.\d+\.\w+_proj$": {"bits": 8}}
    check_logits(write_pair(tmp_path, tiny("qwen3_moe"), quantize, CONFIG | {"dynamic": dynamic}))


def test_a_quantized_head(tmp_path):
    config = CONFIG | {"lm_head": True}
    check_logits(write_pair(tmp_path, tiny("llama"), quantizer(skip=()), config))
    with pytest.raises(WeightError, match=r"lm_head\.qweight"):
        build_with(tmp_path, {}, quantizer(skip=()))


@pytest.mark.parametrize("nested", [False, True])
def test_named_modules_of_a_block(nested, tmp_path):
    names = ["mlp.down_proj", "self_attn.o_proj"]
    listed = [[one] for one in names] if nested else names
    quantize = quantizer(skip=("lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    config = CONFIG | {"modules_in_block_to_quantize": listed}
    pair = write_pair(tmp_path, tiny("llama"), quantize, config)
    model, _ = check_logits(pair)
    assert model.layers[0].mlp.down_proj.method.name == "gptq"
    assert model.layers[0].self_attn.qkv_proj.method.name == "none"


def test_layers_that_the_checkpoint_has_plain_stay_plain(tmp_path):
    quantize = quantizer(skip=("lm_head", "layers.1."))
    check_logits(write_pair(tmp_path, tiny("llama"), quantize, CONFIG))


def with_biases(value):
    def edit(tensors):
        for name in [one for one in tensors if one.endswith(".qweight")]:
            outputs = tensors[name].shape[1]
            tensors[name.replace("qweight", "bias")] = torch.full((outputs,), value).half()

    return edit


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_biases_that_no_config_announces_must_be_zero(model, tmp_path):
    pair = write_pair(tmp_path, tiny(model), quantizer(), CONFIG, edit=with_biases(0.0))
    check_logits(pair)
    with pytest.raises(WeightError, match=r"model\.layers\.0\.\w+\.\w+_proj\.bias is not zero"):
        build_with(tmp_path, {}, quantizer(), model, edit=with_biases(0.25))


def test_parts_with_other_orders_are_kept_right(tmp_path, caplog):
    def quantize(name, weight):
        if "lm_head" in name:
            return None
        seed = 1 if "k_proj" in name or "up_proj" in name else 2
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
        made = rtn(weight, 4, 32, order=order)
        return gptq_tensors(*made, 4), dense(*made)

    config = CONFIG | {"desc_act": True}
    check_logits(write_pair(tmp_path, tiny("qwen3_moe"), quantize, config))
    assert "is unquantized in memory" in caplog.text


def test_ranks_that_cut_shuffled_groups_are_right(tmp_path, caplog):
    pair = write_pair(tmp_path, tiny("llama"), quantizer(shuffle=True), CONFIG | {"desc_act": True})
    check_ranks(pair)
    assert "fewer ranks may help" in caplog.text


def test_a_group_that_ranks_cut_is_split(tmp_path, caplog):
    check_ranks(
        write_pair(tmp_path, tiny("llama"), quantizer(group=-1), CONFIG | {"group_size": -1})
    )
    assert "is unquantized in memory" not in caplog.text


@st.composite
def layers(draw):
    """(bits, version, group, a layer's tensors as rtn() returns them) with zeros at both ends."""
    bits = draw(st.sampled_from([2, 3, 4, 8]))
    group = draw(st.sampled_from([-1, 32, 64, 128]))
    outputs = 32 * draw(st.integers(1, 3))
    inputs = 32 * draw(st.integers(1, 9))
    seed = draw(st.integers(0, 2**31))
    ordered = draw(st.booleans())
    g = torch.Generator().manual_seed(seed)
    size = inputs if group == -1 else group
    groups = -(-inputs // size)
    order = torch.arange(inputs) if ordered else torch.randperm(inputs, generator=g)
    g_idx = torch.empty(inputs, dtype=torch.long)
    g_idx[order] = torch.arange(inputs) // size
    q = torch.randint(0, 1 << bits, (outputs, inputs), generator=g)
    zero = torch.randint(0, 1 << bits, (outputs, groups), generator=g)
    zero[0], zero[1] = 0, (1 << bits) - 1
    scale = torch.rand(outputs, groups, generator=g).half()
    return bits, draw(st.sampled_from([1, 2])), group, (q, zero, scale, g_idx)


@given(layers())
def test_a_layer_gives_its_values_back(drawn):
    bits, version, group, made = drawn
    form = GptqFormat(bits=bits, group=max(group, 0), symmetric=False, zero_offset=2 - version)
    q = made[0]
    layer = load_layer(
        ColumnLinear(q.shape[1], q.shape[0]),
        gptq.Method(form),
        gptq_tensors(*made, bits, version=version),
    )
    assert torch.equal(layer.weight.dequantize(torch.float32), dense(*made))


@pytest.mark.parametrize(
    ("inputs", "group", "shuffle", "held"),
    [(384, 128, False, 128), (384, 128, True, 128), (96, -1, False, 96), (160, 128, False, 32)],
)
def test_groups_are_held_as_large_as_they_are(inputs, group, shuffle, held, monkeypatch):
    found = []
    monkeypatch.setattr(int_words, "pack", lambda codes, dtype: found.append(codes))
    order = torch.randperm(inputs) if shuffle else None
    made = rtn(torch.randn(32, inputs), 4, group, order=order)
    form = GptqFormat(bits=4, group=max(group, 0), symmetric=True, zero_offset=1)
    load_layer(ColumnLinear(inputs, 32), gptq.Method(form), gptq_tensors(*made, 4))
    (codes,) = found
    assert (codes.group, codes.zero) == (held, 8)
    assert (codes.perm is not None) == shuffle
    assert codes.scale.values.dtype == torch.float16
    assert torch.equal(codes.dequantize(), dense(*made))


def test_a_cut_through_words_of_zeros_is_refused_with_the_numbers():
    form = GptqFormat(bits=3, group=32, symmetric=False, zero_offset=1)
    spec = gptq.Method(form).params(ColumnLinear(64, 64), "weight")["qzeros"]
    assert spec.outputs_per == Fraction(32, 3)


REFUSED = {
    "checkpoint_format": ["marlin", "gptq_p", "bitblas"],
    "bits": [5, 16, "four", None],
    "group_size": [0, -2, "128", None, 2.5, True],
    "sym": ["yes", None],
    "pack_dtype": ["int64", "int16"],
    "rotation": ["hadamard"],
    "adapter": [{"name": "lora"}],
    "is_marlin_format": [True],
    "dynamic": [["a"], {".*": {"bits": 5}}, {".*": {"colour": 1}}, {".*": 4}, {"(a+)+": {}}],
    "modules_in_block_to_quantize": ["q_proj", [1]],
    "what_is_this": [1],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values]
)
def test_a_field_that_is_not_understood_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=rf"config\.json: quantization_config.*{field}|{field}"):
        read_quantization({"quantization_config": CONFIG | {field: value}})


def broken(change):
    def edit(tensors):
        name = "model.layers.1.self_attn.o_proj."
        change(tensors, name)

    return edit


def cut(tensors, name):
    tensors[name + "qweight"] = tensors[name + "qweight"][:-1]


def wide(tensors, name):
    tensors[name + "scales"] = tensors[name + "scales"].repeat(2, 1)


def lost(tensors, name):
    del tensors[name + "scales"]


def beyond(tensors, name):
    tensors[name + "g_idx"] = tensors[name + "g_idx"] + 1


def below(tensors, name):
    tensors[name + "g_idx"] = tensors[name + "g_idx"] - 1


def other(tensors, name):
    tensors[name + "qscales"] = tensors[name + "scales"].clone().clone()


def floats(tensors, name):
    tensors[name + "qweight"] = tensors[name + "qweight"].float()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, r"o_proj\.qweight is \[15, 64\], the model has \[16, 64\]"),
        (wide, r"o_proj\.scales is \[8, 64\], the model has \[4, 64\]"),
        (lost, r"missing in the checkpoint: .*o_proj\.scales"),
        (beyond, r"layers\.1\.self_attn\.o_proj: g_idx .* from 1 to 4; there are scales of 4"),
        (below, r"g_idx .* from -1 to 2"),
        (other, r"unexpected in the checkpoint: .*o_proj\.qscales"),
        (floats, r"o_proj\.qweight is float32; config\.json and the model need int32"),
    ],
)
def test_a_broken_tensor_is_named(change, message, tmp_path):
    with pytest.raises(WeightError, match=message):
        build_with(tmp_path, {}, quantizer(), edit=broken(change))
