"""GPTQ, AWQ and importance: less error of outputs than rounding to nearest, and the same bytes when a
run is continued."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ConfigError
from quire.kernels.quantizers.integers import quantize_integers
from quire.models.build import build_model, read_model_config
from quire.quantize import awq
from quire.quantize.calibration_data import read_sequences
from quire.quantize.errors import output_error
from quire.quantize.gptq import gptq
from quire.quantize.schemes import choose_scheme
from tests import tiers
from tests.cpu.models.harness import Stepper
from tests.cpu.quantize.folders import MOE, write_source
from tests.cpu.quantize.test_compressed import (
    Interrupted,
    config_of,
    decompressed,
    files_of,
    interrupt_after,
    run,
    tensors_of,
)
from tests.cpu.tiny_models import TEXT

pytestmark = pytest.mark.sampled(3)

QUICK = {"samples": 6, "seqlen": 40}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts of the tokenizer's words, in the three forms."""
    folder = tmp_path_factory.mktemp("texts")
    words = " ".join(TEXT * 2).split()
    lines = [" ".join(words[i % 7 :: 1 + i % 3]) for i in range(12)]
    (folder / "a.txt").write_text("\n".join(lines))
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in lines))
    turns = [json.dumps({"messages": [{"role": "user", "content": one}]}) for one in lines]
    (folder / "c.jsonl").write_text("\n\n".join(turns))
    return folder


def skewed(source):
    """Make a few inputs of each norm large, as they are in trained models."""
    tensors = tensors_of(source)
    for name, one in tensors.items():
        if "layernorm" in name:
            one[::37] = 12.0
    save_file(tensors, source / "model.safetensors")
    return source


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return skewed(write_source(tmp_path_factory.mktemp("source")))


def correlated(inputs=128, rank=12, seed=5):
    """x.T @ x of inputs that are nearly in a plane."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(400, rank, generator=draw) @ torch.randn(rank, inputs, generator=draw)
    x = x + 0.1 * torch.randn(400, inputs, generator=draw)
    return torch.randn(48, inputs, generator=draw), x.t() @ x


SCHEMES = [
    {"bits": 4, "group_size": 32, "symmetric": True},
    {"bits": 3, "group_size": 64, "symmetric": False},
    {"bits": 4, "group_size": -1, "symmetric": True},
    {"bits": 8, "group_size": 48, "symmetric": True},
]


@pytest.mark.parametrize("settings", SCHEMES, ids=str)
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_leaves_less_error_of_outputs(settings, act_order):
    inputs = 96 if settings["group_size"] == 48 else 128
    weight, gram = correlated(inputs)
    scheme = choose_scheme("int4", **settings)
    made = gptq(weight, gram, scheme, torch.bfloat16, damp=0.01, act_order=act_order)
    plain = quantize_integers(
        weight, bits=scheme.bits, group=scheme.group, symmetric=scheme.symmetric,
        scale_dtype=torch.bfloat16,
    )  # fmt: skip
    assert int(made.q.max()) < 1 << scheme.bits
    errors = [output_error(weight, one.dequantize(), gram) for one in (made, plain)]
    assert errors[0] < 0.5 * errors[1]


def test_gptq_of_independent_inputs_is_rounding_to_nearest():
    weight, _ = correlated()
    scheme = choose_scheme("int4", bits=4, group_size=32, symmetric=True)
    made = gptq(weight, torch.eye(128) * 7, scheme, torch.float32, damp=0.01, act_order=False)
    plain = quantize_integers(weight, bits=4, group=32, symmetric=True, scale_dtype=torch.float32)
    assert torch.equal(made.q, plain.q)


def test_inputs_that_no_text_has_are_rounded_to_nearest():
    weight, gram = correlated()
    gram[:, 20:30] = gram[20:30] = 0
    scheme = choose_scheme("int4", bits=4, group_size=-1, symmetric=True)
    made = gptq(weight, gram, scheme, torch.float32, damp=0.01, act_order=True).dequantize()
    largest = weight.abs().amax(1)[:, None]
    assert bool(((made - weight)[:, 20:30].abs() <= 0.42 * largest).all())  # at most clipped
    zero = gptq(weight, torch.zeros(128, 128), scheme, torch.float32, damp=0.01, act_order=False)
    assert torch.isfinite(zero.dequantize()).all()


def mean_error(report):
    found = [one["output_error"] for one in report["errors"].values() if "output_error" in one]
    return sum(found) / len(found)


@pytest.mark.parametrize("model_type", ["llama", *tiers.long("gemma2", "qwen3_moe")])
def test_calibrated_models_have_less_error_of_outputs(tmp_path, texts, model_type):
    more = {"qwen3_moe": MOE, "gemma2": {"head_dim": 32, "tie_word_embeddings": True}}
    source = skewed(write_source(tmp_path / "source", model_type, **more.get(model_type, {})))
    data = texts / "a.txt"
    found = {
        name: run(source, tmp_path / name, "int4", data=data, algorithm=name, **QUICK)
        for name in ("rtn", "awq", "gptq")
    }
    errors = {name: mean_error(one) for name, one in found.items()}
    assert errors["awq"] < 0.8 * errors["rtn"], errors
    assert errors["gptq"] < 0.5 * errors["rtn"], errors
    first = {name: one for name, one in found["rtn"]["errors"].items() if ".0.self_attn.q" in name}
    (name,) = first
    before = tensors_of(source)[name]
    made = decompressed(tmp_path / "rtn")[name]
    error = (made - before).square().sum() / before.square().sum()
    assert float(error) == pytest.approx(first[name]["weight_error"], rel=1e-3)


FOLDED = {
    "llama": {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "phi3": {"num_key_value_heads": 4},
    "gemma2": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": MOE | {"num_key_value_heads": 4},
}


def logits_of(folder, tensors, ids):
    """Logits of a plain model of these tensors."""
    folder.mkdir()
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors"
    )
    hf = {
        key: value
        for key, value in config_of(folder.parent / "source").items()
        if key != "quantization_config"
    }
    kind, config = read_model_config(hf)
    model = build_model(kind, config, folder=folder, dtype=torch.float32, progress=False)
    return Stepper(model, config).logits(ids)


@pytest.mark.parametrize(
    "model_type", ["llama", "gemma2", *tiers.long("qwen2", "phi3", "qwen3_moe")]
)
def test_folded_scales_leave_the_model_as_it_was(tmp_path, texts, model_type):
    source = skewed(write_source(tmp_path / "source", model_type, **FOLDED[model_type]))
    before = tensors_of(source)
    for name, one in before.items():
        if name.endswith("bias"):
            one.normal_()
    save_file(before, source / "model.safetensors")
    settings = {"bits": 8, "group_size": 16, "symmetric": False}
    run(
        source, tmp_path / "out", "int4", data=texts / "a.txt", algorithm="awq", **QUICK, **settings
    )
    after = tensors_of(tmp_path / "out")
    changed = [
        name for name in before if name in after and not torch.equal(after[name], before[name])
    ]
    assert any("input_layernorm" in name for name in changed)
    if model_type != "qwen3_moe":
        assert any("post_attention" in name or "pre_feed" in name for name in changed)
    plain = {name: one for name, one in after.items() if name in before}
    wide = plain | {name: one.float() for name, one in decompressed(tmp_path / "out").items()}
    ids = list(range(5, 30))
    logits = [logits_of(tmp_path / f"{i}", one, ids) for i, one in enumerate((before, wide))]
    error = (logits[0] - logits[1]).square().mean() / logits[0].square().mean()
    assert float(error) < 1e-3


def test_importance_lowers_the_error_of_outputs_of_a_gguf_file(tmp_path, texts):
    source = skewed(write_source(tmp_path / "source", hidden_size=256))
    plain = run(source, tmp_path / "a", "Q4_K_M", **QUICK)
    found = run(source, tmp_path / "b", "Q4_K_M", data=texts / "a.txt", **QUICK)
    assert all("output_error" not in one for one in plain["errors"].values())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert found["errors"][name]["weight_error"] > plain["errors"][name]["weight_error"]
    assert "output_error" in found["errors"]["lm_head.weight"]
    other = run(source, tmp_path / "c", "Q4_0", data=texts / "a.txt", ignore=("mlp",), **QUICK)
    assert mean_error(other) < 0.02


@pytest.mark.parametrize("algorithm", ["awq", *tiers.long("gptq", "rtn")])
def test_a_calibration_that_was_interrupted_continues_with_the_same_bytes(
    source, tmp_path, monkeypatch, texts, algorithm
):
    settings = {"data": texts / "a.txt", "algorithm": algorithm, "lm_head": True, **QUICK}
    whole = run(source, tmp_path / "whole", "int4", **settings)
    assert "output_error" in whole["errors"]["lm_head.weight"]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(Interrupted):
            run(source, tmp_path / "out", "int4", **settings)
    assert run(source, tmp_path / "out", "int4", **settings) == whole
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_the_files_of_a_calibrated_model_have_the_usual_form(source, tmp_path, texts):
    run(source, tmp_path / "gptq", "int4", data=texts / "b.jsonl", act_order=True, **QUICK)
    run(source, tmp_path / "rtn", "int4")
    found = [
        {name: (t.dtype, t.shape) for name, t in load_all(tmp_path / one).items()}
        for one in ("gptq", "rtn")
    ]
    assert found[0] == found[1]
    assert config_of(tmp_path / "gptq") == config_of(tmp_path / "rtn")


def load_all(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def test_texts_become_sequences_of_one_length(source, texts):
    for name in ("a.txt", "b.jsonl", "c.jsonl"):
        made = read_sequences(texts / name, source, samples=4, seqlen=32, seed=0)
        assert [len(one) for one in made] == [32] * 4
        assert made == read_sequences(texts / name, source, samples=4, seqlen=32, seed=0)
        assert made != read_sequences(texts / name, source, samples=4, seqlen=32, seed=1)
    every = read_sequences(texts / "a.txt", source, samples=10_000, seqlen=32, seed=0)
    assert 4 < len(every) < 10_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "hello"}\n{"text": ', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"prompt": "hello"}', "line 1 must be an object with text"),
        ("a.jsonl", b'{"text": 3}', "line 1 must be an object with text"),
        ("a.jsonl", b'{"messages": [3]}', "a.jsonl, line 1: "),
        ("a.txt", b"short", "tokens, fewer than one sequence of --seqlen 40"),
        ("a.txt", b"\xff\xfe\xfa", "cannot be read as text"),
        ("none.txt", None, "cannot be read"),
    ],
)
def test_texts_that_cannot_be_used_are_named(source, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        run(source, tmp_path / "out", "int4", data=tmp_path / name, **QUICK)


def test_models_whose_scales_do_not_fold_are_refused(tmp_path, texts):
    source = write_source(tmp_path / "source", "olmo2")
    with pytest.raises(ConfigError, match="the model is olmo2: use gptq"):
        run(source, tmp_path / "out", "int4", data=texts / "a.txt", algorithm="awq")
    report = run(source, tmp_path / "out", "int4", data=texts / "a.txt", **QUICK)
    assert mean_error(report) < 0.02
    assert "olmo2" not in awq.MODEL_TYPES


def test_models_that_are_no_chain_of_layers_are_refused(tmp_path, texts):
    source = write_source(tmp_path / "source", "opt", ffn_dim=128, word_embed_proj_dim=128)
    with pytest.raises(ConfigError, match="opt are not run layer by layer"):
        run(source, tmp_path / "out", "int4", data=texts / "a.txt")
