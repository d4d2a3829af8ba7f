"""`quire quantize` to GGUF: the gguf package and transformers read the file as the model it was."""

import json

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.errors import ConfigError
from quire.quantize import gguf_out
from quire.quantize.gguf_metadata import rope_tensors
from quire.quantize.gguf_out import interleave_heads
from quire.quantize.out_folder import STATE
from tests import tiers
from tests.cpu.quantize.folders import MOE, write_source
from tests.cpu.quantize.test_compressed import Interrupted, run, tensors_of

pytestmark = pytest.mark.sampled(3)

WIDE = {"hidden_size": 256, "intermediate_size": 512}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 10000.0}  # fmt: skip
MODELS = {
    "llama": {},
    "mistral": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {"head_dim": 64, "tie_word_embeddings": True, "query_pre_attn_scalar": 64},
    "gemma3_text": {"head_dim": 64, "tie_word_embeddings": True, "query_pre_attn_scalar": 64},
    "phi3": {},
    "qwen3_moe": MOE | {"head_dim": 64, "moe_intermediate_size": 768},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("llama"), **WIDE)


def the_file(folder):
    (path,) = folder.glob("*.gguf")
    return path


def tensors_in(folder):
    """name -> (type, values in float32) of the only GGUF file."""
    return {
        one.name: (
            one.tensor_type.name,
            torch.tensor(gguf.quants.dequantize(one.data, one.tensor_type)),
        )
        for one in gguf.GGUFReader(the_file(folder)).tensors
    }


def keys_of(folder):
    fields = gguf.GGUFReader(the_file(folder)).fields
    return {name: field.contents() for name, field in fields.items()}


@pytest.mark.slow("writes and loads a model of each architecture")
@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "gemma2",
        "qwen3_moe",
        *tiers.long(*sorted(MODELS.keys() - {"llama", "gemma2", "qwen3_moe"})),
    ],
)
def test_transformers_reads_the_model_that_was_written(tmp_path, model_type):
    source = write_source(tmp_path / "source", model_type, **WIDE | MODELS[model_type])
    report = run(source, tmp_path / "out", "Q8_0")
    assert max(one["weight_error"] for one in report["errors"].values()) < 1e-4
    ids = torch.arange(3, 35)[None]
    models = [
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", gguf_file=the_file(tmp_path / "out").name, dtype=torch.float32
        ),
    ]
    with torch.inference_mode():
        logits = [one(ids).logits for one in models]
    difference = (logits[0] - logits[1]).square().mean() / logits[0].square().mean()
    assert float(difference) < 1e-2
    states = [one.state_dict() for one in models]
    assert states[0].keys() == states[1].keys()
    for name, weight in states[0].items():
        error = (states[1][name] - weight).square().sum() / weight.square().sum().clamp(min=1e-9)
        assert float(error) < 1e-4, name


def test_the_types_of_a_mix_are_in_the_file(source, tmp_path):
    report = run(source, tmp_path / "out", "Q4_K_M")
    found = {name: kind for name, (kind, _) in tensors_in(tmp_path / "out").items()}
    assert found["output.weight"] == "Q6_K"
    assert found["token_embd.weight"] == "Q4_K"
    assert found["blk.0.attn_q.weight"] == "Q4_K"
    assert found["blk.1.attn_v.weight"] == found["blk.1.ffn_down.weight"] == "Q6_K"
    assert found["blk.0.attn_norm.weight"] == found["output_norm.weight"] == "F32"
    kinds = {name: one["type"] for name, one in report["errors"].items()}
    assert kinds["model.layers.1.self_attn.v_proj.weight"] == "Q6_K"
    assert keys_of(tmp_path / "out")["general.file_type"] == 15


def test_a_tied_embedding_has_the_type_of_the_head(tmp_path):
    source = write_source(tmp_path / "source", **WIDE, tie_word_embeddings=True)
    run(source, tmp_path / "out", "Q4_K_S")
    found = tensors_in(tmp_path / "out")
    assert found["token_embd.weight"][0] == "Q6_K"
    assert "output.weight" not in found


@pytest.mark.parametrize("kind", ["Q4_0", "Q2_K", "Q6_K"])
def test_values_in_the_file_are_those_of_the_report(source, tmp_path, kind):
    report = run(source, tmp_path / "out", kind)
    before, found = tensors_of(source), tensors_in(tmp_path / "out")
    for module, name in (("mlp.down_proj", "ffn_down"), ("self_attn.q_proj", "attn_q")):
        weight = before[f"model.layers.1.{module}.weight"]
        if name == "attn_q":
            weight = interleave_heads(weight, 4)
        error = (found[f"blk.1.{name}.weight"][1] - weight).square().sum() / weight.square().sum()
        stated = report["errors"][f"model.layers.1.{module}.weight"]["weight_error"]
        assert float(error) == pytest.approx(stated, rel=1e-3)


def test_ignored_matrices_keep_their_dtype(source, tmp_path):
    run(source, tmp_path / "out", "Q4_K", ignore=("self_attn",))
    found = tensors_in(tmp_path / "out")
    assert {name: kind for name, (kind, _) in found.items() if "attn_q." in name} == {
        "blk.0.attn_q.weight": "F32", "blk.1.attn_q.weight": "F32",
    }  # fmt: skip
    assert found["blk.0.ffn_up.weight"][0] == "Q4_K"


def test_the_tokenizer_is_that_of_the_source(source, tmp_path):
    run(source, tmp_path / "out", "Q8_0")
    read = AutoTokenizer.from_pretrained(
        tmp_path / "out", gguf_file=the_file(tmp_path / "out").name
    )
    own = AutoTokenizer.from_pretrained(source)
    for text in ("Hello, my name is Quire.", "你好，请你介绍", "a  b\n\nc 12345"):
        assert read(text)["input_ids"] == own(text)["input_ids"]
    assert read.chat_template == own.chat_template
    keys = keys_of(tmp_path / "out")
    assert keys["tokenizer.ggml.pre"] == "gpt-2"
    assert keys["tokenizer.ggml.eos_token_id"] == own.eos_token_id
    assert keys["tokenizer.ggml.add_bos_token"] is False


def test_rotary_factors_of_llama_3_are_a_tensor(tmp_path):
    source = write_source(tmp_path / "source", **WIDE, rope_parameters=SCALED)
    run(source, tmp_path / "out", "Q8_0")
    kind, factors = tensors_in(tmp_path / "out")["rope_freqs.weight"]
    assert kind == "F32"
    assert len(factors) == 32
    assert float(factors[0]) == 1.0
    assert float(factors[-1]) == 8.0
    assert rope_tensors({}, None) == {}


def interrupt_after(monkeypatch, units):
    real = gguf_out.GgufOut.write_unit

    def write(self, unit, *rest):
        if unit >= units:
            raise Interrupted
        real(self, unit, *rest)

    monkeypatch.setattr(gguf_out.GgufOut, "write_unit", write)


@pytest.mark.parametrize("units", [0, 1, 3])
def test_an_interrupted_file_continues_with_the_same_bytes(source, tmp_path, monkeypatch, units):
    whole = run(source, tmp_path / "whole", "Q4_K_M")
    with monkeypatch.context() as patch:
        interrupt_after(patch, units)
        with pytest.raises(Interrupted):
            run(source, tmp_path / "out", "Q4_K_M")
    growing = list((tmp_path / "out").glob("*.unfinished"))
    if growing:
        with growing[0].open("ab") as file:
            file.write(b"half of a layer" * 200_000)  # longer than what follows
    assert run(source, tmp_path / "out", "Q4_K_M") == whole
    assert the_file(tmp_path / "out").read_bytes() == the_file(tmp_path / "whole").read_bytes()
    assert not (tmp_path / "out" / STATE).exists()
    assert run(source, tmp_path / "out", "Q4_K_M") == whole


def test_a_growing_file_that_was_cut_is_written_again(source, tmp_path, monkeypatch):
    run(source, tmp_path / "whole", "Q4_0")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(Interrupted):
            run(source, tmp_path / "out", "Q4_0")
    (growing,) = (tmp_path / "out").glob("*.unfinished")
    growing.write_bytes(growing.read_bytes()[:-5000])
    run(source, tmp_path / "out", "Q4_0")
    assert the_file(tmp_path / "out").read_bytes() == the_file(tmp_path / "whole").read_bytes()


def test_an_architecture_without_a_name_is_refused(tmp_path):
    source = write_source(tmp_path / "source", "opt", ffn_dim=64, word_embed_proj_dim=128)
    with pytest.raises(
        ConfigError, match="GGUF files of opt models are not written; supported: llama"
    ):
        run(source, tmp_path / "out", "Q4_0")


def change_tokenizer(folder, change):
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["model"].update(type="Unigram"), "is a tokenizer of type 'Unigram'"),
        (lambda t: t.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "x+"}}), "by a pattern that has no name"),
        (lambda t: t.update(pre_tokenizer={"type": "Whitespace"}), "a pre-tokenizer that has no name"),
        (lambda t: t["model"]["vocab"].update(more=100000), "has the token id 100000; the model has"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_files_cannot_hold_is_refused(tmp_path, change, message):
    source = write_source(tmp_path / "source", **WIDE)
    change_tokenizer(source, change)
    with pytest.raises(ConfigError, match=message):
        run(source, tmp_path / "out", "Q4_0")
    assert not list((tmp_path / "out").glob("*.unfinished"))


def test_experts_that_are_not_normalized_are_refused(tmp_path):
    source = write_source(tmp_path / "source", "qwen3_moe", **MOE | {"norm_topk_prob": False})
    with pytest.raises(ConfigError, match="norm_topk_prob is false"):
        run(source, tmp_path / "out", "Q4_0")
