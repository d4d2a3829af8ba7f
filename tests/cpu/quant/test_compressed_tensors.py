"""compressed-tensors in every format: bit for bit what its own library reads, and the same tokens."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.quant.read import read_quantization
from quire.errors import ConfigError, WeightError
from quire.models.build import build_model, read_model_config
from quire.quant._bit_fields import factors
from tests import tiers
from tests.cpu.quant.oracle import (
    build,
    check_logits,
    check_pair,
    check_ranks,
    tiny,
    write_pair,
)

ct = pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.quant_scheme import (  # noqa: E402
    PRESET_SCHEMES,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import (  # noqa: E402
    calculate_qparams,
    generate_gparam,
)

PLAIN = ("plain", "packed")
"""Kinds of unquantized weights."""
INT = {"type": "int", "dynamic": False}
GROUPED = {**INT, "num_bits": 4, "strategy": "group", "group_size": 32}
PACKED = "pack-quantized"
NV = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
MX = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32}
FP8 = {"type": "float", "num_bits": 8, "dynamic": False}
CASES = {
    "w4 group": (GROUPED, PACKED),
    "w4 group asymmetric": ({**GROUPED, "symmetric": False}, PACKED),
    "w2 group": ({**GROUPED, "num_bits": 2}, PACKED),
    "w3 group": ({**GROUPED, "num_bits": 3}, PACKED),
    "w5 asymmetric": ({**GROUPED, "num_bits": 5, "symmetric": False}, PACKED),
    "w6 channel": ({**INT, "num_bits": 6, "strategy": "channel"}, PACKED),
    "w7 group": ({**GROUPED, "num_bits": 7}, PACKED),
    "w8 channel asymmetric": ({**INT, "num_bits": 8, "strategy": "channel", "symmetric": False},)
    * 1
    + (PACKED,),
    "w4 tensor": ({**INT, "num_bits": 4, "strategy": "tensor"}, PACKED),
    "w4 tensor asymmetric": ({**INT, "num_bits": 4, "strategy": "tensor", "symmetric": False},) * 1
    + (PACKED,),
    "int8 unpacked": ({**INT, "num_bits": 8, "strategy": "channel"}, "naive-quantized"),
    "int4 unpacked group": ({**GROUPED, "symmetric": False}, "int-quantized"),
    "fp8 channel": ({**FP8, "strategy": "channel"}, "float-quantized"),
    "fp8 tensor": ({**FP8, "strategy": "tensor"}, "naive-quantized"),
    "fp8 group": ({**FP8, "strategy": "group", "group_size": 32}, "float-quantized"),
    "fp8 block": ({**FP8, "strategy": "block", "block_structure": [128, 128]}, "float-quantized"),
    "mxfp8": (
        {**FP8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        "mxfp8-quantized",
    ),
    "nvfp4": (NV, "nvfp4-pack-quantized"),
    "mxfp4": (MX, "mxfp4-pack-quantized"),
}


def scheme_of(weights):
    given = dict(weights)
    if given["type"] == "float" and given["num_bits"] == 4:
        given["scale_dtype"] = "torch.uint8" if given["group_size"] == 32 else "torch.float8_e4m3fn"
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**given))


def compress(weight, weights, fmt, dtype=torch.float32):
    """What the library writes of a matrix, and what it reads of that."""
    scheme = scheme_of(weights)
    args, whole = scheme.weights, None
    columns = args.group_size or weight.shape[1]
    parts = weight.unflatten(1, (-1, columns))
    low, high = parts.amin(-1), parts.amax(-1)
    if args.strategy == "tensor":
        low, high = weight.amin().view(1), weight.amax().view(1)
    if args.strategy == "block":
        squares = blocks_of(weight, 128)
        low, high = squares.amin((1, 3)), squares.amax((1, 3))
    state = {"weight": weight}
    if args.strategy == "tensor_group":
        whole = state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    state |= {"weight_scale": scale.to(dtype), "weight_zero_point": zero.to(torch.int8)}
    compressor = BaseCompressor.get_value_from_registry(fmt)
    made = compressor.compress(state, scheme)
    if not fmt.endswith("pack-quantized") and args.symmetric:
        made.pop("weight_zero_point", None)
    read = compressor.decompress({k: v.clone() for k, v in made.items()}, scheme)
    return made, read["weight"]


def blocks_of(weight, side):
    """[O / side, side, I / side, side], zeros beyond the end."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % side, 0, -rows % side))
    return padded.unflatten(1, (-1, side)).unflatten(0, (-1, side))


def settings(weights, fmt, **changes):
    """The quantization_config for all linear layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    found = {"quant_method": "compressed-tensors", "format": fmt, "ignore": ["re:.*mlp\\.gate$"]}
    return found | {"config_groups": {"group_0": group}} | changes


def quantizer(weights, fmt):
    """A function for write_pair."""

    def quantize(name, weight):
        if fmt.startswith("nvfp4"):
            made, _ = compress(weight, weights, fmt)
            return made, dequantize_nvfp4(made)
        return compress(weight, weights, fmt)

    return quantize


def pair_of(folder, case, model="llama", **changes):
    weights, fmt = CASES[case]
    if "block" in case:
        changes.setdefault("unit", 128)
    hf = tiny(model, **changes)
    return write_pair(folder, hf, quantizer(weights, fmt), settings(weights, fmt))


def dequantize_nvfp4(made):
    """In float64: the library divides two 16-bit numbers first."""
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat([half, -half])
    packed = made["weight_packed"]
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    scale = made["weight_scale"].double() / made["weight_global_scale"].double()
    return (table[codes.long()] * scale.repeat_interleave(16, 1)).float()


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_the_library_reads(tmp_path, case):
    pair = pair_of(tmp_path, case, num_hidden_layers=1)
    model, _ = build(pair.folder)
    dense = load_file(pair.dense / "model.safetensors")
    exact = "nvfp4" not in case
    for ours, theirs in {
        "mlp.down_proj": ["mlp.down_proj"],
        "self_attn.qkv_proj": ["q", "k", "v"],
    }.items():
        names = [t if "." in t else f"self_attn.{t}_proj" for t in theirs]
        want = torch.cat([dense[f"model.layers.0.{name}.weight"] for name in names])
        got = model.layers[0].get_submodule(ours).weight.dequantize()
        if exact:
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, rtol=3e-7, atol=0)
    assert model.lm_head.weight.kind not in PLAIN


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["fp8 channel", "fp8 group", "fp8 block", "mxfp8"])
def test_rows_beside_weights_of_fp8_stay_in_the_model_s_dtype(tmp_path, case):
    pair = pair_of(tmp_path, case, "qwen3_moe")
    if "block" not in case:  # ranks would cut squares of a model so small
        check_ranks(pair)
    assert check_logits(pair)[0].layers[0].mlp.down_proj.weight.bits == 8
    check_logits(pair, torch.bfloat16)


@pytest.mark.parametrize("case", ["w4 group", "w3 group", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_in_16_bits_stay_exact(case, dtype):
    scale = torch.rand(7, 9).to(dtype).float()
    kept = factors(scale)
    assert kept.values.itemsize == 2
    assert torch.equal(kept.expand(), scale)


@pytest.mark.sampled(4)
@pytest.mark.slow("engines on five paths, and two ranks")
@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize(
    "case",
    [
        "w4 group asymmetric",
        *tiers.long(
            "w3 group", "w8 channel asymmetric", "fp8 channel", "fp8 block", "nvfp4", "mxfp4"
        ),
    ],
)
def test_tokens_are_those_of_the_dequantized_weights(tmp_path, case, model):
    changes = {}
    if "block" in case:  # two ranks cut between squares of 128
        changes |= {"unit": 256, "vocab_size": 256}
        if model == "deepseek_v2":
            changes |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 128}
    check_pair(pair_of(tmp_path, case, model, **changes))


def padded(values, bits):
    """Fields of unsigned values along rows, 32 // bits to a word, as files before 2026 have them."""
    each = 32 // bits
    fields = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % each))
    words = torch.zeros(len(values), fields.shape[1] // each, dtype=torch.long)
    for j in range(each):
        words += fields[:, j::each] << j * bits
    return torch.where(words >= 2**31, words - 2**32, words).int()


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_older_files_that_pad_words_read_the_same(tmp_path, bits):
    weights = {**GROUPED, "num_bits": bits}

    def quantize(name, weight):
        made, wide = compress(weight, weights, PACKED)
        scale = made["weight_scale"].repeat_interleave(32, 1)
        codes = (wide / scale).round() + 2 ** (bits - 1)
        return made | {"weight_packed": padded(codes, bits)}, wide

    pair = write_pair(tmp_path, tiny("llama"), quantize, settings(weights, PACKED))
    check_logits(pair)


def test_old_files_with_inputs_in_the_order_of_activations(tmp_path):
    weights = {**GROUPED, "actorder": "group"}
    draw = torch.Generator().manual_seed(5)
    orders = {}

    def quantize(name, weight):
        layer = name.rpartition(".")[0]  # projections of one input have one order
        order = orders.setdefault(
            (layer, weight.shape[1]), torch.randperm(weight.shape[1], generator=draw)
        )
        made, wide = compress(weight[:, order], GROUPED, PACKED)
        groups = torch.empty(weight.shape[1], dtype=torch.int32)
        groups[order] = torch.arange(weight.shape[1], dtype=torch.int32) // 32
        # on disk the inputs are in the model's order, each with its group
        back = order.argsort()
        codes = (wide / made["weight_scale"].repeat_interleave(32, 1)).round() + 8
        packed = padded(codes[:, back], 4)
        return made | {"weight_packed": packed, "weight_g_idx": groups}, wide[:, back]

    pair = write_pair(tmp_path, tiny("llama"), quantize, settings(weights, PACKED))
    model = check_logits(pair)[0]
    assert model.layers[0].mlp.down_proj.weight.perm is not None
    check_ranks(pair)


def test_groups_of_several_formats_and_targets(tmp_path):
    """A mixed-precision file: a pattern, an exact name, the class, and what is ignored."""
    four, eight = GROUPED, {**INT, "num_bits": 8, "strategy": "channel"}
    groups = {
        "a": {"targets": ["Linear"], "weights": four, "format": PACKED},
        "b": {"targets": ["re:.*down_proj$"], "weights": eight, "format": PACKED},
        "c": {
            "targets": ["model.layers.1.mlp.down_proj"],
            "weights": MX,
            "format": "mxfp4-pack-quantized",
        },
    }
    config = settings(
        four,
        "mixed-precision",
        config_groups=groups,
        ignore=["lm_head", "re:.*layers\\.0\\.self_attn.*"],
    )

    def quantize(name, weight):
        if name == "lm_head" or "layers.0.self_attn" in name:
            return None
        if name == "model.layers.1.mlp.down_proj":
            return compress(weight, MX, "mxfp4-pack-quantized")
        return compress(weight, eight if "down_proj" in name else four, PACKED)

    pair = write_pair(tmp_path, tiny("llama"), quantize, config)
    model = check_logits(pair)[0]
    first, second = model.layers
    assert first.mlp.down_proj.weight.bits == 8
    assert second.mlp.down_proj.weight.table is not None
    assert first.mlp.gate_up_proj.weight.bits == 4
    assert first.self_attn.qkv_proj.weight.kind in PLAIN
    assert second.self_attn.qkv_proj.weight.kind not in PLAIN
    assert model.lm_head.weight.kind in PLAIN


def test_a_preset_names_its_arguments(tmp_path):
    weights = {**GROUPED, "group_size": 128, "symmetric": False}
    config = settings(weights, PACKED, config_groups={"W4A16_ASYM": ["Linear"]})
    hf = tiny("llama", unit=128, num_hidden_layers=1)
    pair = write_pair(tmp_path, hf, lambda name, w: compress(w, weights, PACKED), config)
    check_logits(pair)


def test_parts_of_a_fused_layer_may_differ(tmp_path):
    eight = {**GROUPED, "num_bits": 8, "symmetric": False}
    groups = {
        "a": {"targets": ["Linear"], "weights": GROUPED},
        "b": {"targets": ["re:.*k_proj"], "weights": eight},
        "c": {"targets": ["re:.*up_proj"], "weights": MX, "format": "mxfp4-pack-quantized"},
    }

    def quantize(name, weight):
        if "up_proj" in name:
            return compress(weight, MX, "mxfp4-pack-quantized")
        return compress(weight, eight if "k_proj" in name else GROUPED, PACKED)

    config = settings(GROUPED, PACKED, config_groups=groups)
    model = check_logits(write_pair(tmp_path, tiny("llama"), quantize, config))[0]
    assert model.layers[0].self_attn.qkv_proj.weight.kind == "parts"


@pytest.mark.parametrize("name", ["W4A8", "W4A4", "W4AFP8"])
def test_finer_activations_than_weights_stay_in_16_bits(tmp_path, name):
    weights = {**GROUPED, "group_size": 128}
    config = settings(weights, PACKED, config_groups={name: ["Linear"]})
    hf = tiny("llama", unit=128, num_hidden_layers=1)
    check_logits(write_pair(tmp_path, hf, lambda n, w: compress(w, weights, PACKED), config))


def edited(pair, **changes):
    """Change tensors of the quantized folder, by their name after the first down_proj."""
    path = pair.folder / "model.safetensors"
    tensors = load_file(path)
    for suffix, change in changes.items():
        name = f"model.layers.0.mlp.down_proj.{suffix}"
        made = change(tensors.pop(name, None)) if callable(change) else change
        if made is not None:
            tensors[name] = made.contiguous()
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("case", "changes", "says"),
    [
        ("w4 group", {"weight_scale": lambda t: None}, r"missing .*0\.mlp\.down_proj\.weight_scale"),
        ("w4 group", {"weight_scale": lambda t: t[:, :-1]}, r"down_proj\.weight_scale is \[64, 3\]"),
        ("w4 group", {"weight_packed": lambda t: t[:, :-1]}, r"15\] words a row; 128 inputs of 4"),
        ("w3 group", {"weight_packed": lambda t: t[:-1]}, r"weight_packed is \[63, 12\]"),
        ("w4 group", {"weight_packed": lambda t: t.view(torch.uint8)[:, ::4]}, "weight_packed is uint8"),
        ("w4 group", {"weight_shape": torch.tensor([64, 120])}, r"weight_shape states \[64, 120\]"),
        ("w4 group", {"weight_shape": torch.tensor([2**40, 2**40])}, "weight_shape states"),
        ("w4 group", {"weight_shape": torch.tensor([64.0, 128.0])}, "weight_shape is float32"),
        ("w4 group", {"weight_zero_point": torch.zeros(8, 4, dtype=torch.int32)}, "1 unexpected"),
        ("w4 group asymmetric", {"weight_zero_point": lambda t: None}, "missing .*weight_zero_point"),
        ("w4 group asymmetric", {"weight_zero_point": lambda t: t[:-1]}, r"is \[7, 4\], the model"),
        ("int4 unpacked group", {"weight": lambda t: t * 16}, "integers of 4 bits go from -8 to 7"),
        ("int4 unpacked group", {"weight": lambda t: t.int()}, "weight is int32; .* need int8"),
        ("fp8 group", {"weight_scale": lambda t: t[:, :-1]}, r"weight_scale is \[64, 3\]"),
        ("fp8 channel", {"weight": lambda t: t.view(torch.int8)}, "weight is int8; .* need float8"),
        ("fp8 channel", {"weight_scale": lambda t: t[:-1]}, r"weight_scale is \[63, 1\]"),
        ("nvfp4", {"weight_global_scale": lambda t: t * 0}, "weight_global_scale has values from 0.0"),
        ("nvfp4", {"weight_global_scale": lambda t: t * torch.nan}, "a scale is a positive number"),
        ("nvfp4", {"weight_scale": lambda t: t.view(torch.uint8)}, "weight_scale is uint8"),
        ("mxfp4", {"weight_packed": lambda t: t[:, :-1]}, r"weight_packed is \[64, 63\]"),
        ("mxfp4", {"weight_scale": lambda t: t.float()}, "weight_scale is float32; .* need uint8"),
    ],
)  # fmt: skip
def test_a_broken_tensor_is_named(tmp_path, case, changes, says):
    pair = pair_of(tmp_path, case, num_hidden_layers=1)
    edited(pair, **changes)
    with pytest.raises(WeightError, match=says):
        build(pair.folder)


def test_powers_of_two_may_have_a_dtype_of_their_own(tmp_path):
    pair = pair_of(tmp_path, "mxfp4", num_hidden_layers=1)
    edited(pair, weight_scale=lambda t: t.view(torch.float8_e8m0fnu))
    check_logits(pair)


def test_dummy_weights_of_every_format_are_finite():
    for weights, fmt in CASES.values():
        hf = tiny("qwen3_moe", 128) | {"quantization_config": settings(weights, fmt)}
        model_type, config = read_model_config(copy.deepcopy(hf))
        model = build_model(model_type, config, load_format="dummy", dtype=torch.bfloat16)
        wide = model.layers[1].mlp.experts.down_proj.dequantize()
        assert wide.isfinite().all()
        assert 0.01 < float(wide.std()) * 256**0.5 < 20, (weights, float(wide.std()))


def found_in(config):
    return read_quantization({"quantization_config": config})


@pytest.mark.parametrize("name", sorted(PRESET_SCHEMES))
def test_every_preset_of_the_library_is_read_or_refused_by_name(name):
    written = preset_name_to_scheme(name, ["Linear"]).model_dump(mode="json")
    config = {"quant_method": "compressed-tensors"}
    forms = ({"group_0": written}, {name: ["Linear"]})
    if name.startswith("MXFP6"):
        for groups in forms:
            with pytest.raises(ConfigError):
                found_in({**config, "config_groups": groups})
    else:
        first, second = (found_in({**config, "config_groups": groups}) for groups in forms)
        assert first == second
