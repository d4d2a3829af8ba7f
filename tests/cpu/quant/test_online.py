"""Weights quantized while a plain checkpoint is loaded: values, layers, memory, what is printed."""

import logging
import re
import weakref

import pytest
import torch

import quire.quant.online
from quire.config.facts import count_weights_in_headers
from quire.config.quant.online import ONLINE_FORMATS, OnlineFormat, find_online
from quire.errors import ConfigError
from quire.layers import Linear
from quire.models.build import build_model, read_model_config
from quire.quant.online import quantize
from quire.weights.files import read_headers
from tests import tiers
from tests.cpu.quant.oracle import (
    Pair,
    build,
    check_equal_paths,
    check_logits,
    check_pair,
    tiny,
    tiny_shapes,
    tiny_tensors,
    write_folder,
)

pytestmark = pytest.mark.sampled(2)

NAMES = [name for name, form in ONLINE_FORMATS.items() if isinstance(form, OnlineFormat)]
DISTINCT = {ONLINE_FORMATS[name]: name for name in reversed(NAMES)}
KINDS = sorted(DISTINCT.values())
KINDS_OF_CODES = ("grouped", "panel_codes", "tiled")
BITS = {"int8": 8.125, "int8_per_channel_weight_only": 8.0625, "experts_int8": 8.125} | {
    "int4": 4.125, "int4_asym": 4.1875, "mxfp4": 4.5, "nf4": 4.5
}  # fmt: skip
"""Bits per weight of rows of 256 inputs."""


def plain_folder(tmp_path, hf, **settings):
    return write_folder(tmp_path / "plain", hf, tiny_tensors(hf, **settings))


def quantized(model):
    """Layer and matrix -> weight, of those that were quantized."""
    found = {}
    for name, module in model.named_modules():
        for matrix in getattr(module, "matrices", ()):
            weight = getattr(module, matrix)
            if weight.kind in KINDS_OF_CODES:
                found[f"{name}.{matrix}"] = weight
    return found


def dense_of(tmp_path, name, hf, *, skip=("kv_b_proj", "lm_head")):
    """A Pair: a plain folder that is quantized on load, and one of the values that this makes."""
    form = ONLINE_FORMATS[name]
    tensors = tiny_tensors(hf)
    dense = {}
    for key, value in tensors.items():
        path = key.removesuffix(".weight")
        plain = value.dim() == 1 or path.endswith(("embed_tokens", "mlp.gate", *skip))
        if form.only_experts:
            plain = plain or ".experts." not in path
        dense[key] = value if plain else quantize(value, form).dequantize()

    def made(folder, **settings):
        return build(folder, quant=name, **settings)

    folder = write_folder(tmp_path / "plain", hf, tensors)
    return Pair(folder, write_folder(tmp_path / "dense", hf, dense), hf, made)


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_quantized_values(tmp_path, name):
    model, _ = check_logits(dense_of(tmp_path, name, tiny("qwen3_moe", 128)))
    attention = model.layers[0].self_attn.qkv_proj.weight
    assert (attention.kind in KINDS_OF_CODES) == (name != "experts_int8")
    assert model.layers[1].mlp.experts.gate_up_proj.kind in KINDS_OF_CODES
    assert model.lm_head.method.name == "none"


@pytest.mark.slow("engines on all paths, and two ranks")
@pytest.mark.parametrize("model", ["deepseek_v2"])
def test_all_paths_of_the_engine(tmp_path, model):
    check_pair(dense_of(tmp_path, "int4", tiny(model, 128)))


@pytest.mark.parametrize("name", ["int4", *tiers.long("int8", "nf4", "mxfp4")])
def test_experts_in_bfloat16_give_equal_tokens_on_all_paths(tmp_path, name, caplog):
    pair = dense_of(tmp_path, name, tiny("qwen3_moe", 128))
    with caplog.at_level(logging.INFO):
        check_equal_paths(pair)
    assert "run eagerly" not in caplog.text
    check_logits(pair, torch.bfloat16)


@pytest.mark.parametrize("name", KINDS)
def test_bits_per_weight_are_those_of_the_format(name):
    weight = torch.randn(64, 256)
    codes = quantize(weight.bfloat16(), ONLINE_FORMATS[name])
    made = quire.quant.online.pack(codes, torch.bfloat16)
    assert made.nbytes * 8 / weight.numel() == pytest.approx(BITS[name], rel=0.02)
    error = (made.dequantize() - weight).norm() / weight.norm()
    assert error < {8: 0.008}.get(codes.bits, 0.12)


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_quantized_alone(name, monkeypatch):
    weight = torch.randn(2, 12, 128).bfloat16()
    whole = quantize(weight, ONLINE_FORMATS[name])
    monkeypatch.setattr("quire.kernels.quantizers.search.CHUNK_ELEMENTS", 500)
    assert torch.equal(quantize(weight, ONLINE_FORMATS[name]).q, whole.q)
    one = quantize(weight[1], ONLINE_FORMATS[name]).dequantize()
    assert torch.equal(one, whole.dequantize()[1])


@pytest.mark.slow("imports bitsandbytes")
def test_nf4_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = (torch.randn(64, 192) * 0.02).to(dtype)
        weight[3] = 0
        q, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
        want = functional.dequantize_4bit(q, state)
        assert torch.equal(quantize(weight, ONLINE_FORMATS["nf4"]).dequantize().to(dtype), want)


def test_groups_divide_the_inputs():
    int4, nf4, mxfp4 = (ONLINE_FORMATS[name] for name in ("int4", "nf4", "mxfp4"))
    assert [int4.group_of(n) for n in (4096, 11008, 96, 720, 1000, 100, 17)] == [
        128, 128, 32, 16, 125, 100, 17,
    ]  # fmt: skip
    assert [nf4.group_of(n) for n in (4096, 96, 50)] == [64, 32, 50]
    assert [mxfp4.group_of(n) for n in (4096, 96, 48)] == [32, 32, None]
    assert ONLINE_FORMATS["int8_per_channel_weight_only"].group_of(4096) == 4096


@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_widths_that_no_group_divides(tmp_path, name):
    hf = tiny("llama", 40, num_attention_heads=2)  # o_proj 80 inputs, down_proj 80, others 40
    model, _ = build(plain_folder(tmp_path, hf), quant=name)
    assert len(quantized(model)) == (0 if name == "mxfp4" else 8)


def test_what_is_not_quantized(tmp_path):
    hf = tiny("deepseek_v2", 128)
    model, _ = build(plain_folder(tmp_path, hf), quant="int8")
    plain = {n for n, m in model.named_modules() if isinstance(m, Linear)} - {
        name.removesuffix(".weight") for name in quantized(model)
    }
    assert plain == {"lm_head", *(f"layers.{i}.self_attn.kv_b_proj" for i in range(2))}


def test_tied_heads_stay_plain_and_one(tmp_path):
    hf = tiny("llama", tie_word_embeddings=True)
    tensors = tiny_tensors(hf)
    del tensors["lm_head.weight"]
    model, _ = build(write_folder(tmp_path / "m", hf, tensors), quant="int4")
    assert model.lm_head.weight is model.embed_tokens.weight
    assert len(quantized(model)) == 8


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["int8", "experts_int8", "gguf:Q4_0"])
def test_heads_are_quantized_if_asked_for(tmp_path, name, tied):
    from tests.cpu.models.harness import Stepper

    hf = tiny("llama", 256, tie_word_embeddings=tied)
    tensors = tiny_tensors(hf)
    if tied:
        del tensors["lm_head.weight"]
    folder = write_folder(tmp_path / "plain", hf, tensors)
    facts = find_online(f"{name}+lm_head", 2)
    shared = "model.embed_tokens.weight" if tied else "lm_head.weight"
    head = quantize(tensors[shared], facts.head).dequantize()
    dense = write_folder(tmp_path / "dense", hf, tensors | {shared: head})
    built = build(folder, quant=f"{name}+lm_head")
    model, ids = built[0], list(range(3, 20))
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied
    assert model.lm_head.weight.kind in KINDS_OF_CODES
    assert (model.embed_tokens.weight.kind in KINDS_OF_CODES) == tied
    got, want = Stepper(*built).logits(ids), Stepper(*build(dense, quant=name)).logits(ids)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_counts_a_quantized_head(tmp_path, tied):
    hf = tiny("llama", 256, vocab_size=4096, tie_word_embeddings=tied)
    hf |= {"model_type": "llama"}
    tensors = {name: one.bfloat16() for name, one in tiny_tensors(hf).items()}
    if tied:
        del tensors["lm_head.weight"]
    folder = write_folder(tmp_path / "plain", hf, tensors)
    facts = find_online("int8+lm_head", 2)
    model, _ = build(folder, quant="int8+lm_head", dtype=torch.bfloat16)
    held = {}
    for module in model.modules():
        for matrix in getattr(module, "matrices", ()):
            weight = getattr(module, matrix)
            held[id(weight)] = weight.nbytes
    counted = count_weights_in_headers(read_headers(folder, "auto"), hf)
    assert counted.head.outputs == 4096
    estimated = counted.bytes(2, quantized=facts) - 2 * counted.vectors
    assert estimated == pytest.approx(sum(held.values()), rel=0.01)


@pytest.mark.parametrize("name", ["fp8+lm_head", "int8+head", "awq+lm_head"])
def test_heads_of_no_format_made_on_load_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"allowed: .*with \+lm_head behind it"):
        build(plain_folder(tmp_path, tiny("llama")), quant=name)


@pytest.mark.parametrize("name", KINDS)
def test_dummy_weights_keep_numbers_finite(name):
    from tests.cpu.models.harness import Stepper

    model_type, config = read_model_config(tiny("qwen3_moe"))
    settings = {"dtype": torch.bfloat16, "load_format": "dummy", "quant": name}
    model = build_model(model_type, config, **settings)
    assert quantized(model)
    logits = Stepper(model, config, dtype=torch.bfloat16).logits(list(range(3, 20)))
    assert logits.isfinite().all()
    assert logits.std() > 0.01


def test_only_one_layer_is_held_plain_at_a_time(tmp_path, monkeypatch):
    seen, real = [], quire.quant.online.quantize

    def watched(weight, form):
        assert sum(ref() is not None for ref in seen) == 0
        seen.append(weakref.ref(weight.untyped_storage()))
        return real(weight, form)

    packed, real_pack = [], quire.quant.online.pack

    def watched_pack(codes, dtype):
        packed.append(sum(ref() is not None for ref in seen))
        return real_pack(codes, dtype)

    monkeypatch.setattr(quire.quant.online, "quantize", watched)
    monkeypatch.setattr(quire.quant.online, "pack", watched_pack)
    build(plain_folder(tmp_path, tiny("llama")), quant="int4")
    assert len(seen) == 8
    assert packed == [0] * 8, "the original is freed before its codes are packed"


def test_the_log_has_real_bits_and_the_bar_names_the_format(tmp_path, caplog, capsys):
    hf = tiny("llama", 128)
    folder = plain_folder(tmp_path, hf, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO):
        build(folder, quant="int4", dtype=torch.bfloat16, progress=True)
    elements = {n: torch.Size(s).numel() for n, s in tiny_shapes(hf).items() if len(s) == 2}
    others = sum(n for name, n in elements.items() if "embed" in name or "lm_head" in name)
    inner = sum(elements.values()) - others
    whole = (4.125 * inner + 16 * others) / (inner + others)
    line = (
        r"int4 in 8 matrices, (\d\.\d\d) bits .* 2 others \(head, embeddings, .* (\d\.\d\d) bits "
    )
    match = re.search(line, caplog.text)
    assert float(match[1]) == pytest.approx(4.125, rel=0.02)
    assert float(match[2]) == pytest.approx(whole, rel=0.02)
    shown = capsys.readouterr().err
    assert "quantizing to int4: 100% Completed | 21/21" in shown


@pytest.mark.slow("imports transformers")
def test_a_fallback_model_is_quantized_on_load(tmp_path):
    hf = tiny("llama") | {"architectures": ["LlamaForCausalLM"]}
    model_type, config = read_model_config(hf, "transformers")
    folder = plain_folder(tmp_path, hf)
    settings = {"folder": folder, "dtype": torch.float32, "progress": False}
    model = build_model(model_type, config, quant="int4", **settings)
    assert len(quantized(model)) == 8


def test_names_that_make_nothing_on_load(tmp_path):
    with pytest.raises(ConfigError, match="quantization='awq', but the checkpoint is not quant"):
        build(plain_folder(tmp_path, tiny("llama")), quant="awq")
