"""Folders that are no model, or not a whole one: one sentence each, and no weight is loaded."""

import json
import re
import shutil
from pathlib import Path

import pytest

import quire.embedded
from quire.config.options import Options
from quire.engine.build import build_engine
from quire.errors import ConfigError
from quire.text.tokenizing.tokenizer import load_tokenizer
from quire.weights.weight_loader import WeightLoader

SOURCE = Path(quire.embedded.__file__).parent
CONFIG = json.loads((SOURCE / "config.json").read_text())
WEIGHTS = (SOURCE / "model.safetensors").read_bytes()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
INDEX = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
CODE = {"AutoTokenizer": ["evil.Evil", None]}


def config(**changes):
    """config.json with fields replaced; ... removes one."""
    return {
        "config.json": {k: v for k, v in {**CONFIG, **changes}.items() if v is not ...},
    }


def instead(name, content=b"x"):
    """Other weights in place of model.safetensors."""
    return {"model.safetensors": None, name: content}


BAD = {
    "nothing": (dict.fromkeys(path.name for path in SOURCE.iterdir()), "holds nothing"),
    "no config": ({"config.json": None}, "has no config.json, .* it holds only .*model.safetensors"),
    "config cut": ({"config.json": b'{"a": '}, "config.json is not valid JSON"),
    "config is a page": ({"config.json": b"<!doctype html>"}, "config.json is not valid JSON"),
    "config is a list": ({"config.json": b"[]"}, "must hold a JSON object, not a list"),
    "config is empty": ({"config.json": b""}, "config.json is empty; download it again"),
    "config is a pointer": ({"config.json": POINTER}, "config.json is a pointer of git-lfs"),
    "no names": (config(model_type=..., architectures=...), "neither architectures nor model_type"),
    "unknown": (config(model_type="foo", architectures=["Foo"]), "models of type 'foo' are known to"),
    "mistyped": (config(model_type="qwem3", architectures=["Qwem3"]), "did you mean qwen3"),
    "recurrent": (config(model_type="rwkv", architectures=...), "keep a recurrent state"),
    "remote code": (
        config(model_type="foo", architectures=..., auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}),
        "run Python code of the model's folder .*trust_remote_code",
    ),
    "no field": (config(hidden_size=...), "hidden_size is missing; it must be an integer"),
    "negative": (config(num_hidden_layers=-3), "num_hidden_layers is -3; it must be from 1"),
    "not a number": (config(vocab_size="many"), "vocab_size"),
    "heads": (config(num_key_value_heads=3), "num_key_value_heads is 3; it must divide"),
    "quantized": (config(quantization_config={"quant_method": "new"}), "'new'; supported: "),
    "a size": (config(intermediate_size=776), "of the wrong shape: model.layers.0.mlp"),
    "a layer": (config(num_hidden_layers=9), "missing in the checkpoint: layers.8"),
    "a layer less": (config(num_hidden_layers=7), "unexpected in the checkpoint: model.layers.7"),
    "no weights": ({"model.safetensors": None}, "holds no weights .* it holds only config.json"),
    "gguf": (instead("model-q4.gguf"), r"model-q4\.gguf is not a GGUF file"),
    "gguf alone": (instead("m.gguf") | {"config.json": None}, r"m\.gguf is not a GGUF file"),
    "pth": (instead("consolidated.00.pth"), "weights of torch.save"),
    "onnx": (instead("model.onnx"), "ONNX weights"),
    "tensorflow": (instead("tf_model.h5"), "TensorFlow weights"),
    "flax": (instead("flax_model.msgpack"), "Flax weights"),
    "adapter": (instead("adapter_model.safetensors") | {"config.json": None}, "a LoRA adapter; give"),
    "diffusion": (instead("model_index.json", {}) | {"config.json": None}, "a diffusion model"),
    "pickle": (instead("pytorch_model.bin", b"abc"), "pytorch_model.bin cannot be read as weights"),
    "pickle is a pointer": (instead("pytorch_model.bin", POINTER), "is a pointer of git-lfs"),
    "weights are a pointer": ({"model.safetensors": POINTER}, "model.safetensors is a pointer of git-lfs"),
    "weights are empty": ({"model.safetensors": b""}, "model.safetensors is empty; download it again"),
    "weights cut": ({"model.safetensors": WEIGHTS[:-9]}, "is cut short: .*; download it again"),
    "header cut": ({"model.safetensors": WEIGHTS[:50]}, "is not a whole safetensors file"),
    "a shard of the index": (
        instead(SHARDS[0], WEIGHTS) | {"model.safetensors.index.json": INDEX},
        f"index.json names 1 file.* that are not there: {SHARDS[1]}; download",
    ),
    "a shard of its name": (instead(SHARDS[0], WEIGHTS), f"not there: {SHARDS[1]}; download"),
    "half a download": (instead("model.safetensors.incomplete"), "a download that is not finished"),
    "half a download of the hub": (
        instead(".cache/huggingface/download/a1b2.incomplete"), "a download that is not finished",
    ),
    "no tokenizer": ({"tokenizer.json": None}, "there is no tokenizer in .*--skip-tokenizer-init"),
    "no settings either": (
        {"tokenizer.json": None, "tokenizer_config.json": None}, "there is no tokenizer in",
    ),
    "tokenizer is empty": ({"tokenizer.json": b""}, "tokenizer.json is empty; download it again"),
    "tokenizer is a pointer": ({"tokenizer.json": POINTER}, "tokenizer.json is a pointer of git-lfs"),
    "vocabulary is a pointer": (
        {"tokenizer.json": None, "tokenizer.model": POINTER}, "tokenizer.model is a pointer",
    ),
    "tokenizer code": (
        {"tokenizer.json": None, "tokenizer_config.json": {"auto_map": CODE}, "vocab.txt": b"a"},
        "is Python code of the model's repository; read it and set trust_remote_code=True",
    ),
    "tokenizer code of older files": (
        {"tokenizer.json": None, "tokenizer_config.json": {"auto_map": ["evil.Evil", None]}, "vocab.txt": b"a"},
        "is Python code of the model's repository",
    ),
    "tokenizer code of config.json": (
        {"tokenizer.json": None, "vocab.txt": b"a"} | config(auto_map=CODE),
        "is Python code of the model's repository",
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    def load(*args):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(WeightLoader, "load", load)
    folder = tmp_path / "model"
    folder.mkdir()
    for path in SOURCE.iterdir():
        if path.suffix in (".json", ".safetensors"):
            shutil.copy(path, folder)
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    return folder


def spoil(folder, changes):
    for name, content in changes.items():
        path = folder / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(
                content if isinstance(content, bytes) else json.dumps(content).encode()
            )


def refusal(model, **more):
    with pytest.raises(ConfigError) as error:
        build_engine(Options.from_flat({"model": str(model), "max_model_len": 64} | more))
    return str(error.value)


@pytest.mark.parametrize("case", BAD)
def test_a_folder_is_refused_in_one_sentence_before_its_weights_are_loaded(folder, case):
    changes, words = BAD[case]
    if case == "nothing":
        (folder / "evil.py").unlink()
    spoil(folder, changes)
    message = refusal(folder)
    assert len(message) < 1500
    assert re.search(words, message), message
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/no/such/folder", "there is no folder '/no/such/folder'; give a folder that exists, or"),
        ("./no_such_folder", "there is no folder './no_such_folder'"),
        ("org/name", "'org/name' is not a folder here, and not in .* HF_HUB_OFFLINE is set"),
        ("org/a name", "is not a folder or a name like org/model"),
        ("", "the model's name is empty"),
        ("https://huggingface.co/org/name", "is an address; give the model's name, 'org/name'"),
        (
            str(SOURCE / "config.json"),
            "is a file; give a GGUF file, or the folder that holds config.json",
        ),
    ],
)
def test_a_name_that_is_no_folder_is_refused_by_what_it_looks_like(name, words, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert re.search(words, refusal(name))


def test_a_tokenizer_elsewhere_needs_no_model(folder, tmp_path, monkeypatch):
    """The folder of --tokenizer has a tokenizer alone; one without is refused before weights."""
    elsewhere = tmp_path / "tokenizer"
    elsewhere.mkdir()
    assert "there is no tokenizer in" in refusal(folder, tokenizer=str(elsewhere))
    shutil.copy(SOURCE / "tokenizer.json", elsewhere)
    monkeypatch.undo()
    (folder / "tokenizer.json").unlink()
    options = {"model": str(folder), "tokenizer": str(elsewhere), "max_model_len": 64}
    assert build_engine(Options.from_flat(options)).tokenizer.encode("a")


def test_trusted_code_of_a_tokenizer_runs(folder):
    spoil(folder, BAD["tokenizer code"][0])
    with pytest.raises(ConfigError, match="transformers cannot make a tokenizer"):
        load_tokenizer(folder, trust_remote_code=True)
    assert (folder / "ran").exists()
