"""Checkpoints of bitsandbytes: values bit for bit, tokens, layers left out, damaged files."""

import json

import pytest
import torch
from safetensors.torch import save_file

from quire.config.quant.bitsandbytes import TABLES
from quire.errors import ConfigError, WeightError
from quire.layers import Linear
from quire.weights.files import iterate_tensors, read_headers
from tests.cpu.quant.oracle import build, check_logits, check_pair, tiny, write_pair

KINDS_OF_CODES = ("grouped", "panel_codes", "tiled")


def functional():
    """Imported by what uses it: that takes 2 s, which each test process would spend."""
    return pytest.importorskip("bitsandbytes.functional")


def config(**changes):
    usual = {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
    }
    return usual | changes


EIGHT = config(load_in_4bit=False, load_in_8bit=True, _load_in_4bit=False, _load_in_8bit=True)


def four_bits(kind="nf4", nested=False, storage=torch.uint8, skip=("lm_head",)):
    """A `quantize` for write_pair: as bitsandbytes writes a Linear4bit."""

    def quantize(name, weight):
        if any(one in name for one in skip):
            return None
        data, state = functional().quantize_4bit(
            weight, quant_type=kind, blocksize=64, compress_statistics=nested,
            quant_storage=storage,
        )  # fmt: skip
        parts = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        return {"weight": data, **parts}, dequantized(data, state)

    return quantize


def dequantized(data, state):
    """What a Linear4bit's codes stand for. bitsandbytes' own (0.50, on a CPU) has blocks begin anew
    in each row."""
    scale = state.absmax
    if state.nested:
        scale = functional().dequantize_blockwise(scale, state.state2) + state.offset
    octets = data.view(torch.uint8).flatten()
    values = state.code[torch.stack((octets >> 4, octets & 15), 1).flatten().long()]
    values = values[: state.shape.numel()]
    return (values * scale.repeat_interleave(64)[: len(values)]).view(state.shape)


def eight_bits(name, weight):
    """As bitsandbytes writes a Linear8bitLt."""
    if "lm_head" in name:
        return None
    data, scale, _ = functional().int8_vectorwise_quant(weight.half())
    tensors = {"weight": data, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, functional().int8_vectorwise_dequant(data, scale)


@pytest.mark.parametrize(
    ("kind", "nested", "storage"),
    [
        ("nf4", False, torch.uint8),
        ("nf4", True, torch.uint8),
        ("nf4", True, torch.bfloat16),
        ("fp4", False, torch.float32),
    ],
)
def test_values_are_those_of_bitsandbytes(tmp_path, kind, nested, storage):
    quantize = four_bits(kind, nested, storage)
    pair = write_pair(tmp_path, tiny("llama", 64), quantize, config(bnb_4bit_quant_type=kind))
    model, _ = build(pair.folder)
    dense = dict(iterate_tensors(pair.dense, progress=False))
    for i, layer in enumerate(model.layers):
        at = f"model.layers.{i}"
        for ours, theirs in [
            (layer.self_attn.o_proj, [f"{at}.self_attn.o_proj"]),
            (layer.mlp.gate_up_proj, [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"]),
        ]:
            assert ours.weight.kind in KINDS_OF_CODES
            want = torch.cat([dense[f"{name}.weight"] for name in theirs])
            assert torch.equal(ours.weight.dequantize(), want)


@pytest.mark.slow("engines on all paths, and two ranks")
@pytest.mark.parametrize("model", ["deepseek_v2"])
def test_all_paths_of_the_engine(tmp_path, model):
    made = config(bnb_4bit_use_double_quant=True)
    check_pair(write_pair(tmp_path, tiny(model, 64), four_bits(nested=True), made))


def test_experts_are_read_one_by_one(tmp_path):
    pair = write_pair(tmp_path, tiny("qwen3_moe", 64), four_bits(), config())
    model, _ = check_logits(pair)
    assert model.layers[1].mlp.experts.down_proj.kind in KINDS_OF_CODES


def test_llm_int8_is_a_weight_of_eight_bits(tmp_path, caplog):
    pair = write_pair(tmp_path, tiny("qwen3_moe", 64), eight_bits, EIGHT)
    caplog.set_level("INFO")
    model, _ = check_logits(pair)
    assert "results differ slightly from those of bitsandbytes" in caplog.text
    assert model.layers[0].self_attn.o_proj.weight.bits == 8


@pytest.mark.parametrize(("width", "group"), [(96, 32), (80, 16), (72, None)])
def test_blocks_that_cross_rows(tmp_path, caplog, width, group):
    hf = tiny("llama", 64, intermediate_size=width)
    pair = write_pair(tmp_path, hf, four_bits(), config())
    model, _ = check_logits(pair)
    if group:
        assert model.layers[0].mlp.down_proj.weight.group == group
    else:
        assert model.layers[0].mlp.down_proj.weight.kind not in KINDS_OF_CODES
        assert "a matrix of 72 inputs has blocks of 64 that cross its rows" in caplog.text


def test_an_odd_matrix_ends_within_a_byte(tmp_path):
    codes = torch.randint(0, 16, (15,), dtype=torch.uint8)
    pairs = torch.cat((codes, codes.new_zeros(1))).view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [3, 5]}
    text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    tensors = {
        "weight": (pairs[:, 0] << 4 | pairs[:, 1])[:, None].contiguous(),
        "weight.absmax": torch.tensor([2.5]),
        "weight.quant_map": torch.tensor(TABLES["nf4"]),
        "weight.quant_state.bitsandbytes__nf4": text,
    }
    save_file({f"x.{name}": one for name, one in tensors.items()}, tmp_path / "model.safetensors")
    found = dict(iterate_tensors(tmp_path, progress=False))
    assert torch.equal(found["x.bnb_codes"], codes.view(3, 5))
    assert torch.equal(found["x.bnb_scale"], torch.full((3, 5), 2.5))


def test_modules_that_were_skipped_stay_plain(tmp_path):
    skip = ["lm_head", "model.layers.1.mlp", "o_proj"]
    made = config(llm_int8_skip_modules=skip)
    pair = write_pair(tmp_path, tiny("llama", 64), four_bits(skip=skip), made)
    model, _ = check_logits(pair)
    layers = {n: m.weight for n, m in model.named_modules() if isinstance(m, Linear)}
    small = {name for name, weight in layers.items() if weight.kind in KINDS_OF_CODES}
    assert small == {
        "layers.0.self_attn.qkv_proj", "layers.1.self_attn.qkv_proj",
        "layers.0.mlp.gate_up_proj", "layers.0.mlp.down_proj",
    }  # fmt: skip


def test_dummy_weights_keep_numbers_finite():
    from quire.models.build import build_model, read_model_config
    from tests.cpu.models.harness import Stepper

    for made in (config(), EIGHT):
        model_type, facts = read_model_config(tiny("qwen3_moe") | {"quantization_config": made})
        settings = {"dtype": torch.bfloat16, "load_format": "dummy"}
        model = build_model(model_type, facts, **settings)
        logits = Stepper(model, facts, dtype=torch.bfloat16).logits(list(range(3, 20)))
        assert logits.isfinite().all()
        assert 0.01 < logits.std() < 100
        weight = model.layers[0].self_attn.o_proj.weight.dequantize()
        assert 0.05 < weight.std() * weight.shape[1] ** 0.5 < 4


def state_of(tensors, name):
    key = f"{name}.weight.quant_state.bitsandbytes__nf4"
    return key, json.loads(bytes(tensors[key].numpy()).decode())


O_PROJ = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"blocksize": 128}, "blocksize is 128; supported: 64"),
        ({"quant_type": "fp4"}, "quant_type is 'fp4'; supported: 'nf4'"),
        ({"shape": [1 << 40, 1 << 40]}, "shape is .* supported: two sizes"),
        ({"shape": [64]}, "shape is .64.; supported: two sizes"),
        ({"shape": [64, 65]}, "a matrix of 64 x 65 in nf4 needs 2080 bytes"),
        ({"shape": [128, 64]}, "o_proj.bnb_codes is .128, 64., the model has .64, 128."),
        ({"nested_offset": 0.5}, "nested_blocksize is None; supported: 256"),
        ("{", "is no JSON"),
        ("[" * 5000, "is no JSON"),
        (" " * 70000, "has 70000 bytes; allowed: 65536"),
    ],
)
def test_a_quant_state_that_lies_is_refused_by_name(tmp_path, change, says):
    def edit(tensors):
        key, state = state_of(tensors, O_PROJ)
        text = change if isinstance(change, str) else json.dumps(state | change)
        tensors[key] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    pair = write_pair(tmp_path, tiny("llama", 64), four_bits(), config(), edit=edit)
    with pytest.raises(WeightError, match=says):
        build(pair.folder)


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("absmax", None, "o_proj.weight.absmax is missing"),
        (
            "absmax",
            lambda t: t[:5],
            "o_proj.weight.absmax is F32 .5.; a matrix of 64 x 128 in nf4 ",
        ),
        ("absmax", lambda t: t.half(), "needs 512 bytes of F32"),
        ("quant_map", lambda t: t + 0.1, "quant_map is not the table of nf4"),
        ("quant_map", lambda t: t[:8], "needs 64 bytes of F32"),
    ],
)
def test_a_damaged_part_is_named(tmp_path, part, change, says):
    def edit(tensors):
        tensor = tensors.pop(f"{O_PROJ}.weight.{part}")
        if change is not None:
            tensors[f"{O_PROJ}.weight.{part}"] = change(tensor).contiguous()

    pair = write_pair(tmp_path, tiny("llama", 64), four_bits(), config(), edit=edit)
    with pytest.raises(WeightError, match=says):
        build(pair.folder)


def test_int8_columns_layouts_are_refused(tmp_path):
    def edit(tensors):
        tensors[f"{O_PROJ}.weight_format"] = torch.tensor(1, dtype=torch.uint8)

    pair = write_pair(tmp_path, tiny("llama", 64), eight_bits, EIGHT, edit=edit)
    with pytest.raises(WeightError, match=r"o_proj\.weight_format is 1; supported: 0"):
        build(pair.folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"load_in_4bit": False}, "load_in_8bit is False; supported: True"),
        ({"load_in_8bit": True}, "load_in_8bit is True; supported: False"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is 'int4'; supported: 'nf4' or"),
        ({"bnb_5bit": 1}, "fields that quire does not know: bnb_5bit"),
    ],
)
def test_settings_are_refused_by_name(changes, says):
    from quire.config.quant.read import read_quantization

    with pytest.raises(ConfigError, match=says):
        read_quantization({"quantization_config": config(**changes)})


def test_headers_are_those_of_the_tensors(tmp_path):
    pair = write_pair(tmp_path, tiny("llama", 64), four_bits(nested=True), config())
    shapes = {name: tuple(t.shape) for name, t in iterate_tensors(pair.folder, progress=False)}
    assert {name: one.shape for name, one in read_headers(pair.folder).items()} == shapes
