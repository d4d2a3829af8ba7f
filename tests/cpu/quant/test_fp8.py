"""Weights in e4m3: what a checkpoint brings and what is made on load are one thing."""

import weakref

import pytest
import torch

import quire.models.build
import quire.quant.fp8
from quire.errors import ConfigError, WeightError
from quire.kernels.formats.fp8_weight import Fp8Weight
from quire.kernels.gpu.runtime.target import GpuTarget, describe_target
from quire.layers import Linear
from quire.models.build import read_model_config
from quire.quant.none import Method as Plain
from tests.cpu.quant.checkpoints import BLOCKS, CHANNELS, LLAMA, compressed, load, plain, quantized

QKV = "layers.0.self_attn.qkv_proj"
LINEAR_LAYERS = 8  # qkv, o, gate_up and down, of two layers


def linears(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


def small(model):
    return {n: m.weight for n, m in linears(model).items() if isinstance(m.weight, Fp8Weight)}


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(bits(one[name].data), bits(other[name].data)), name
        assert torch.equal(one[name].scale, other[name].scale), name


@pytest.mark.parametrize(
    ("asked", "style", "said"),
    [
        ("fp8", {}, {"quant_method": "fp8"}),
        ("fp8", {"channel": 2}, CHANNELS),
        ("fp8_block", {"block": 1, "name": "weight_scale_inv"}, BLOCKS),
        (
            "fp8_block",
            {"block": 1},
            compressed(
                {"strategy": "block", "block_structure": [128, 128]},
                {"strategy": "group", "group_size": 128, "dynamic": True},
            ),
        ),
    ],
)
def test_quantizing_on_load_equals_a_checkpoint_quantized_before(tmp_path, asked, style, said):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    made = load(tmp_path / "a", plain(), quant=asked)
    read = load(tmp_path / "b", quantized(style), said)
    assert len(small(made)) == LINEAR_LAYERS
    same(small(made), small(read))


def test_one_scale_per_tensor_stays_each_part_s_own(tmp_path):
    said = compressed({"strategy": "tensor"}, {"strategy": "token", "dynamic": True})
    tensors = quantized({"tensor": (1,)})
    weight = small(load(tmp_path, tensors, said))[QKV]
    for i, part in enumerate("qkv"):
        at = f"model.layers.0.self_attn.{part}_proj"
        rows = slice(128 * i, 128 * (i + 1))
        assert torch.equal(bits(weight.data[rows]), bits(tensors[f"{at}.weight"]))
        assert weight.scale[rows].unique().tolist() == tensors[f"{at}.weight_scale"].tolist()


def test_a_scale_without_axes_is_one_number_too(tmp_path):
    weight = small(load(tmp_path, quantized({"tensor": ()}), {"quant_method": "fp8"}))[QKV]
    assert len(weight.scale.unique()) == 3


@pytest.mark.parametrize(
    "names",
    [{}, {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}],
    ids=["usual names", "names of transformers"],
)
def test_a_fixed_scale_of_activations_is_the_largest_of_the_parts(tmp_path, names):
    said = {"quant_method": "fp8", "activation_scheme": "static"}
    tensors = quantized({"tensor": (), "static": 1})
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    found = small(load(tmp_path, tensors, said))
    assert found[QKV].input_scale.tolist() == pytest.approx([0.03])
    assert found["layers.0.mlp.down_proj"].input_scale.tolist() == pytest.approx([0.02])


def test_head_and_norms_stay_as_they_are(tmp_path):
    model, tensors = load(tmp_path, plain(), quant="fp8"), plain()
    assert isinstance(model.lm_head.method, Plain)
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"])


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("modules_to_not_convert", "model.layers.1.self_attn.o_proj"),
        ("ignored_layers", "layers.1.self_attn.o_proj"),
        ("modules_to_not_convert", "re:.*1[.]self_attn[.]o_proj"),
    ],
)
def test_layers_that_the_checkpoint_leaves_plain_are_plain(tmp_path, key, pattern):
    skip = ("embed", "norm", "lm_head", "layers.1.self_attn.o_proj")
    tensors = quantized({"block": 1, "name": "weight_scale_inv"}, skip)
    model = load(tmp_path, tensors, BLOCKS | {key: [pattern, "lm_head"]})
    plain_ones = set(linears(model)) - set(small(model))
    assert plain_ones == {"lm_head", "layers.1.self_attn.o_proj"}


def test_a_layer_fused_of_plain_and_quantized_parts(tmp_path):
    name = "model.layers.0.self_attn.k_proj"
    said = BLOCKS | {"ignored_layers": [name]}
    style = {"block": 1, "name": "weight_scale_inv"}
    model = load(tmp_path, quantized(style, ("embed", "norm", "lm_head", name)), said)
    whole = load(tmp_path, quantized(style), BLOCKS)
    weight = model.get_submodule(QKV).weight
    assert [one.kind == "fp8" for one in weight.parts] == [True, False, True]
    want = whole.get_submodule(QKV).weight.dequantize(torch.float32)
    want[128:256] = plain()[f"{name}.weight"].float()
    assert torch.equal(weight.dequantize(), want)


@pytest.fixture
def older_gpu():
    """Stands for all devices: it has no FP8 products."""
    describe_target(GpuTarget((8, 0), 108))
    yield
    describe_target(None)


@pytest.mark.parametrize(
    ("quant", "style", "said"),
    [
        (None, {"channel": 2}, CHANNELS),
        (None, {"block": 1, "name": "weight_scale_inv"}, BLOCKS),
        (None, {"tensor": (), "static": 1}, {"quant_method": "fp8", "activation_scheme": "static"}),
        ("fp8", None, None),
        ("fp8_block", None, None),
    ],
)
def test_rows_stay_in_16_bits_on_an_older_gpu(tmp_path, request, quant, style, said):
    tensors = plain() if style is None else quantized(style)
    usual = load(tmp_path, tensors, said, quant=quant)
    request.getfixturevalue("older_gpu")
    older = load(tmp_path, tensors, said, quant=quant)
    assert not small(older)
    for name, weight in small(usual).items():
        held = linears(older)[name].weight
        assert held.bits == 8
        assert torch.equal(held.dequantize(torch.float32), weight.dequantize(torch.float32))


def test_scales_must_all_be_there_and_no_others(tmp_path):
    tensors = quantized({"channel": 2})
    name = "model.layers.1.mlp.up_proj.weight_scale"
    scale = tensors.pop(name)
    with pytest.raises(WeightError, match=r"1 missing .* layers\.1\.mlp\.up_proj\.weight_scale"):
        load(tmp_path, tensors, CHANNELS)
    tensors[name] = scale[:100].clone()
    with pytest.raises(WeightError, match=r"up_proj\.weight_scale is \[100, 1\]"):
        load(tmp_path, tensors, CHANNELS)
    tensors[name] = scale
    tensors["model.norm.weight_scale"] = scale.clone()
    with pytest.raises(WeightError, match=r"1 unexpected .* model\.norm\.weight_scale"):
        load(tmp_path, tensors, CHANNELS)


def test_parts_that_do_not_fill_blocks_are_refused(tmp_path):
    hf = LLAMA | {"num_key_value_heads": 2, "quantization_config": BLOCKS}
    model_type, config = read_model_config(hf)
    with pytest.raises(ConfigError, match=r"parts of \[128, 64, 64\] outputs share one matrix"):
        quire.models.build.build_model(
            model_type, config, load_format="dummy", dtype=torch.bfloat16
        )


def test_only_one_layer_is_held_plain_at_a_time(tmp_path, monkeypatch):
    seen, real = [], quire.quant.fp8.quantize

    def watched(weight, block):
        assert sum(ref() is not None for ref in seen) == 0
        seen.append(weakref.ref(weight.untyped_storage()))
        return real(weight, block)

    monkeypatch.setattr(quire.quant.fp8, "quantize", watched)
    load(tmp_path, plain(), quant="fp8")
    assert len(seen) == LINEAR_LAYERS


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "fp8", "activation_scheme": "static"},
        BLOCKS,
        CHANNELS,
    ],
)
def test_stand_in_weights_have_scales_and_keep_numbers_finite(said):
    model_type, config = read_model_config(LLAMA | {"quantization_config": said})
    model = quire.models.build.build_model(
        model_type, config, load_format="dummy", dtype=torch.bfloat16
    )
    assert len(small(model)) == LINEAR_LAYERS
    for weight in small(model).values():
        assert 0.05 < weight.dequantize().std() * weight.shape[1] ** 0.5 < 2


def test_a_model_is_reloaded_from_its_own_checkpoint(tmp_path):
    model = load(tmp_path, quantized({"channel": 2}), CHANNELS)
    before = small(model)
    _, config = read_model_config(LLAMA | {"quantization_config": CHANNELS})
    quire.models.build.load_weights(
        model, config, tmp_path, "auto", torch.bfloat16, torch.device("cpu"), progress=False, seed=0
    )
    assert all(small(model)[name] is not before[name] for name in before)
    same(small(model), before)
