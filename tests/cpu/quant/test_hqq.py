"""HQQ checkpoints against dense models of their values, by a packer that shares no code."""

import copy

import pytest
import torch

from quire.config.quant.read import read_quantization
from quire.errors import ConfigError, WeightError
from quire.models.build import build_model, read_model_config
from tests import tiers
from tests.cpu.quant.oracle import build, check_logits, check_pair, check_ranks, tiny, write_pair

TEXTS = {"packing": "4bit_u8", "unpack_view_dtype": "torch.uint8", "compute_dtype": "torch.float16"}


def weights_config(bits=4, group=32, **changes):
    found = {"nbits": bits, "group_size": group, "axis": 1, "channel_wise": True}
    return found | {"optimize": True, "round_zero": bits == 4, "view_as_float": False} | changes


def layer_config(*args, **changes):
    weights = weights_config(*args, **changes)
    others = {"scale_quant_params": None, "zero_quant_params": None, "offload_meta": False}
    return {"weight_quant_params": weights, **others}


def config(*args, **changes):
    found = {"quant_method": "hqq", "skip_modules": ["lm_head"]}
    return found | {"quant_config": layer_config(*args, **changes)}


def packed(rows, bits):
    """Words whose highest field is of the first part of the rows: one integer at a time."""
    if bits in (5, 6, 8):
        return rows.to(torch.uint8)
    each = {4: 2, 3: 10, 2: 4, 1: 8}[bits]
    count = -(-len(rows) // each)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, count * each - len(rows)))
    words = torch.zeros(count, rows.shape[1], dtype=torch.long)
    for row in range(count):
        for part in range(each):
            words[row] += rows[part * count + row] << bits * (each - 1 - part)
    return words.to(torch.int32 if bits == 3 else torch.uint8)


def quantizer(bits=4, group=32, kinds=None, skip=("lm_head",), as_float=False):
    """A function for write_pair. kinds: part of a name -> (bits, group)."""

    def quantize(name, weight):
        if any(one in name for one in skip):
            return None
        b, g = next((v for k, v in (kinds or {}).items() if k in name), (bits, group))
        g = g or weight.shape[1]
        rows = weight.reshape(-1, g)
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        scale = ((high - low) / (2**b - 1)).half().float()
        zero = (-low / scale).half().float()
        q = (rows / scale + zero).round().clamp(0, 2**b - 1).long()
        words = packed(q, b)
        tensors = {
            "W_q": words.view(torch.float16) if as_float else words,
            "scale": scale.half(), "zero": zero.half(),
            "nbits": torch.tensor(b, dtype=torch.int32),
            "group_size": torch.tensor(g, dtype=torch.int32),
            "shape": torch.tensor(weight.shape), "axis": torch.tensor(1, dtype=torch.int32),
        }  # fmt: skip
        flags = ("quant_zero", "quant_scale", "offload_meta", "round_zero")
        tensors |= {one: torch.tensor(0, dtype=torch.uint8) for one in flags}
        flags = ("channel_wise", "optimize", "encoded_state_dict", "stores_quant_config")
        tensors |= {one: torch.tensor(1, dtype=torch.uint8) for one in flags}
        tensors["view_as_float"] = torch.tensor(int(as_float), dtype=torch.uint8)
        tensors |= {k: torch.tensor([*v.encode()], dtype=torch.uint8) for k, v in TEXTS.items()}
        return tensors, ((q - zero) * scale).reshape(weight.shape)

    return quantize


@pytest.mark.slow("engines on five paths, and two ranks")
@pytest.mark.parametrize(
    ("model", "bits", "group"),
    tiers.long(
        ("qwen3_moe", 4, 64), *(("llama", bits, 32) for bits in (2, 3, 8)), ("deepseek_v2", 4, None)
    ),
)
def test_a_checkpoint_computes_what_its_values_do(model, bits, group, tmp_path):
    quantize = quantizer(bits, group)
    check_pair(write_pair(tmp_path, tiny(model), quantize, config(bits, group)))


def test_experts(tmp_path):
    check_logits(write_pair(tmp_path, tiny("qwen3_moe"), quantizer(4, 64), config(4, 64)))


@pytest.mark.parametrize(
    ("bits", "group"), [(8, 64), (6, 16), (3, 32), (2, 16), (1, 32), (4, None)]
)
def test_values_are_those_of_the_definition(bits, group, tmp_path):
    hf = tiny("llama", num_hidden_layers=1)
    pair = write_pair(tmp_path, hf, quantizer(bits, group), config(bits, group))
    model, dense = build(pair.folder)[0], build(pair.dense)[0]
    for path in ("self_attn.qkv_proj", "mlp.down_proj"):
        ours, theirs = (one.layers[0].get_submodule(path).weight for one in (model, dense))
        assert ours.bits == max(bits, 2)
        assert torch.equal(ours.dequantize(), theirs.dequantize())


def test_codes_that_are_stored_as_floats(tmp_path):
    settings = config(view_as_float=True)
    check_logits(write_pair(tmp_path, tiny("llama"), quantizer(as_float=True), settings))


def test_layers_of_several_kinds_and_ranks(tmp_path):
    """q and k differ within a fused layer; what no kind names is plain."""
    kinds = {"q_proj": (8, 64), "k_proj": (3, 32), "v_proj": (4, 32), "mlp.down_proj": (2, 16)}
    own = {tag: layer_config(*how) for tag, how in kinds.items() if "down" in tag}
    own |= {f"self_attn.{tag}": layer_config(*kinds[tag]) for tag in kinds if "down" not in tag}
    found = {"quant_method": "hqq", "quant_config": own, "skip_modules": ["lm_head"]}
    skip = ("lm_head", "o_proj", "gate_proj", "up_proj")
    pair = write_pair(tmp_path, tiny("llama"), quantizer(kinds=kinds, skip=skip), found)
    model, _ = check_logits(pair)
    assert model.layers[0].self_attn.qkv_proj.weight.kind == "parts"
    assert model.layers[0].mlp.gate_up_proj.method.name == "none"
    check_ranks(pair)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (config(7), r"weight_quant_params\.nbits is 7; supported: 8 or 6"),
        (config(4, 0), "group_size is 0; it must be a number of inputs from 1 to 16777216 or None"),
        (config(axis=0), "axis is 0: groups across outputs"),
        (config(channel_wise=False), "channel_wise is False"),
        (config(new=1), "weight_quant_params has fields that quire does not know: new"),
        (config() | {"new": 1}, "fields that quire does not know: new"),
        (config() | {"quant_config": {}}, "has no weight_quant_params"),
        (config() | {"quant_config": [4]}, r"quant_config is \[4\]; it must be an object"),
        (config() | {"quant_config": {"q_proj": 4}}, "q_proj is 4; it must be an object"),
        (config() | {"skip_modules": "lm_head"}, "skip_modules is 'lm_head'; it must be a list"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(found, says):
    with pytest.raises(ConfigError, match=says):
        read_quantization({"quantization_config": found})


@pytest.mark.parametrize(
    ("suffix", "change", "says"),
    [
        ("W_q", lambda t: None, r"down_proj\.W_q is missing; the layer has axis, "),
        ("W_q", lambda t: t[:-1], r"W_q is torch.uint8 \[127, 32\]; \[64, 128\] with 4 bits in"),
        ("W_q", lambda t: t.int(), r"W_q is torch.int32 .* is torch.uint8 \[128, 32\]"),
        ("W_q", lambda t: t.float(), "W_q is torch.float32"),
        ("scale", lambda t: None, r"missing in the checkpoint: .*down_proj\.scale"),
        ("scale", lambda t: t[:-1], r"scale is \[255, 1\]; it must have \[64, 4\]"),
        ("zero", lambda t: t.int(), r"zero is int32; .* need float32"),
        ("zero", lambda t: t.repeat(1, 2), r"zero is \[256, 2\]; it must have"),
        ("nbits", lambda t: t * 2, r"nbits is \[8\]; by config.json and the model it is \[4\]"),
        ("group_size", lambda t: t * 2, r"group_size is \[64\]; by"),
        ("axis", lambda t: t * 0, r"axis is \[0\]; by"),
        ("quant_zero", lambda t: t + 1, r"quant_zero is \[1\]; by"),
        ("shape", lambda t: t * 2**40, r"shape is \[70368744177664, .*; by .* it is \[64, 128\]"),
        ("shape", lambda t: torch.zeros(0), r"shape is \[\]; by"),
        ("meta", lambda t: torch.zeros(1), r"unexpected .*down_proj\.meta"),
    ],
)
def test_a_broken_tensor_is_named(tmp_path, suffix, change, says):
    def edit(tensors):
        name = f"model.layers.0.mlp.down_proj.{suffix}"
        if (made := change(tensors.pop(name, None))) is not None:
            tensors[name] = made

    hf = tiny("llama", num_hidden_layers=1)
    pair = write_pair(tmp_path, hf, quantizer(), config(), edit=edit)
    with pytest.raises(WeightError, match=says):
        build(pair.folder)


def test_dummy_weights_are_finite():
    hf = tiny("qwen3_moe") | {"quantization_config": config()}
    model_type, read = read_model_config(copy.deepcopy(hf))
    model = build_model(model_type, read, load_format="dummy", dtype=torch.bfloat16)
    wide = model.layers[1].mlp.experts.down_proj.dequantize()
    assert 0.05 < float(wide.std()) * 128**0.5 < 5
