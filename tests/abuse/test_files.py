"""Models from strangers: checklist 5.7, 47 and 48. Each file is refused by name, before it costs."""

import json
import os
import resource
import struct
import time
from pathlib import Path

import pytest

import quire.embedded
from quire.config.facts import read_hf_config, read_model_facts
from quire.config.options import Options
from quire.engine.build import build_engine
from quire.errors import ConfigError, RequestError
from quire.models.build import read_model_config
from quire.text.tokenizing.tokenizer import load_tokenizer
from quire.weights.file_listing import weight_files
from quire.weights.headers import read_file_headers, read_headers

SOURCE = Path(quire.embedded.__file__).parent
CONFIG = json.loads((SOURCE / "config.json").read_text())
SETTINGS = json.loads((SOURCE / "tokenizer_config.json").read_text())
TOKENIZER = json.loads((SOURCE / "tokenizer.json").read_text())
MOST_S = 5.0
MOST_BYTES = 1 << 29


@pytest.fixture
def folder(tmp_path):
    """The embedded model's, to be spoilt."""
    for file in SOURCE.iterdir():
        if file.suffix in (".json", ".safetensors"):
            (tmp_path / file.name).symlink_to(file)
    return tmp_path


def put(folder, name, data):
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())


def described(folder):
    """All that is read of a model before its weights are."""
    read_model_facts(folder)
    read_model_config(read_hf_config(folder))
    load_tokenizer(folder)


def built(folder):
    return build_engine(Options.from_flat({"model": str(folder), "kv_cache_memory_bytes": 1 << 26}))


def refused(folder, act=described):
    """How it is refused; with little time and memory."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ConfigError) as error:
        act(folder)
    assert time.process_time() - began < MOST_S
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown << 10 < MOST_BYTES
    assert len(str(error.value)) < 2000
    return str(error.value)


NUMBERS = {
    "vocab_size": (-1, 0, 2**31, 2**63, 10**30, "x", [], 1e308, True),
    "hidden_size": (-1, 0, 2**31, 10**30, "x", 1.5),
    "num_hidden_layers": (-1, 0, 10**9, 10**30, "x", [8]),
    "num_attention_heads": (-8, 0, 2**31, 10**30, {}),
    "num_key_value_heads": (-4, 0, 3, 2**31),
    "head_dim": (-1, 0, 2**31, "32"),
    "intermediate_size": (-1, 10**30, "x"),
    "max_position_embeddings": (-1, 0, 10**30, "x"),
    "rms_norm_eps": (-1, float("nan"), float("inf"), "x"),
    "rope_theta": (0, -1, float("nan"), 1e308, "x"),
    "hidden_act": ("os.system", 5),
    "model_type": ("../../etc/passwd", "os", "base", "_rope", "a\0b", 5, None, "x" * 100_000),
    "architectures": ("LlamaForCausalLM", 5, [5], {"a": "b"}, [["LlamaForCausalLM"]]),
    "torch_dtype": (5,),
    "quantization_config": (
        *("fp8", {"quant_method": 5}, {"quant_method": "fp8", "weight_block_size": [0, 0]}),
        {"quant_method": "fp8", "weight_block_size": [10**9, 10**9]},
        {"quant_method": "fp8", "modules_to_not_convert": 5},
        {"quant_method": "fp8", "modules_to_not_convert": ["re:(a+)+$"]},
        {"quant_method": "fp8", "modules_to_not_convert": ["re:" + ".*" * 20 + "x"]},
    ),
    "rope_scaling": (
        *("linear", 5, [1], {"type": 5}, {"rope_type": "linear"}, {"rope_type": {}}),
        *({"rope_type": "linear", "factor": factor} for factor in ("x", 1e308, -1, 0)),
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
        {"rope_type": "longrope", "short_factor": [1] * 10**5, "long_factor": "x"},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 2.0},
    ),
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(f, v) for f, vs in NUMBERS.items() for v in vs],
    ids=lambda v: f"{v!r:.40}",
)
def test_sizes_that_no_model_has_are_refused(folder, field, value):
    only = {"architectures": None} if field == "model_type" else {}  # else the class decides
    put(folder, "config.json", CONFIG | {field: value} | only)
    message = refused(folder)
    assert "config.json" in message or "model" in message or "weight" in message or field in message


def test_sizes_of_a_models_parts_are_looked_at_too(folder):
    put(folder, "config.json", CONFIG | {"text_config": {"vision": {"num_hidden_layers": 10**9}}})
    assert "num_hidden_layers" in refused(folder)


BYTES = {
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "five thousand digits": b'{"a":' + b"9" * 5000 + b"}",
    "nothing": b"",
    "null": b"null",
}
FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_json_are_refused_by_name(folder, name):
    if name == "added_tokens.json":
        put(folder, "tokenizer_config.json", {**SETTINGS, "added_tokens_decoder": None})
    for data in BYTES.values():
        put(folder, name, data)
        assert name in refused(folder)


@pytest.mark.parametrize("name", FILES)
def test_files_without_end_are_refused_unread(folder, name):
    put(folder, name, b"")
    os.truncate(folder / name, 1 << 40)
    message = refused(folder)
    assert name in message
    assert "maximum is" in message


@pytest.mark.parametrize(
    "said",
    [
        *({"model_max_length": value} for value in ("x", [1], float("inf"))),
        *({"added_tokens_decoder": value} for value in ({"x": "y"}, {"5": 5}, {"-1": "a"}, [1])),
        {"added_tokens_decoder": {str(10**20): {"content": "a"}}},
        *({"chat_template": value} for value in (5, [{"name": "x"}], [5], "(" * 10**7, {"a": 5})),
        *({"bos_token": 5}, {"additional_special_tokens": [5]}),
    ],
    ids=lambda said: f"{said!r:.60}",
)
def test_settings_of_a_tokenizer_that_cannot_be_are_refused(folder, said):
    put(folder, "tokenizer_config.json", SETTINGS | said)
    refused(folder, load_tokenizer)


ADDED = {
    "special": True,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
}


@pytest.mark.parametrize(
    "said",
    [
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
        {"added_tokens": [{"id": 2**40, "content": "a", **ADDED}]},
        {"model": {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}},
        {"model": {"type": "Evil"}},
    ],
    ids=lambda said: f"{said!r:.60}",
)  # fmt: skip
def test_a_tokenizer_that_cannot_be_is_refused(folder, said):
    put(folder, "tokenizer.json", TOKENIZER | said)
    assert "tokenizer.json" in refused(folder, load_tokenizer)


def test_a_tokenizer_whose_expression_goes_round_and_round_fails_its_request(folder, capfd):
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+b"},
        "behavior": "Isolated",
        "invert": False,
    }
    put(folder, "tokenizer.json", TOKENIZER | {"pre_tokenizer": split})
    tokenizer = load_tokenizer(folder)
    for size in (64, 10_000):
        with pytest.raises(RequestError, match="backtracks without end"):
            tokenizer.encode("a" * size + "c")
    assert tokenizer.encode("b")
    capfd.readouterr()  # the library says so on stderr


def test_code_of_a_model_is_not_run_without_trust(folder):
    evil = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "evil.Evil")
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    put(folder, "config.json", CONFIG | {"auto_map": evil, "text_config": {"auto_map": evil}})
    put(folder, "tokenizer_config.json", SETTINGS | {"auto_map": evil, "tokenizer_class": "Evil"})
    built(folder)
    assert not (folder / "ran").exists()
    (folder / "tokenizer.json").unlink()
    assert "trust_remote_code" in refused(folder, load_tokenizer)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "said",
    [{"temperature": "hot"}, {"max_new_tokens": -5}],
    ids=str,
)
def test_a_generation_config_that_cannot_be_is_refused_by_name(folder, said):
    put(folder, "generation_config.json", said)
    assert "generation_config.json" in refused(folder, built)


# -- safetensors ------------------------------------------------------------------------------


def weights(folder, entries, data=b"\0" * 8, size=None, name="model.safetensors"):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    put(folder, name, struct.pack("<Q", len(text) if size is None else size) + text + data)
    return folder / name


def one(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS = {
    "a gigabyte that is not there": (b"{}", b"", 1 << 30),
    "the largest number": (b"{}", b"", 2**64 - 1),
    "longer than the format allows": (b"{}", b" " * (101 << 20), 101 << 20),
    "no JSON": (b"{", b"", None),
    "not an object": (b"[]", b"", None),
    "deep": (b"[" * 200_000, b"", None),
    "a number of five thousand digits": (b'{"a":' + b"9" * 5000 + b"}", b"", None),
    "a name twice": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32",'
                     b'"shape":[2],"data_offsets":[0,8]}}', b"\0" * 8, None),
    "overlapping": ({"a": one(), "b": one(offsets=(4, 12))}, b"\0" * 12, None),
    "out of range": ({"a": one(offsets=(1 << 40, (1 << 40) + 8))}, b"\0" * 8, None),
    "backwards": ({"a": one(offsets=(8, 0))}, b"\0" * 8, None),
    "negative": ({"a": one(offsets=(-8, 0))}, b"\0" * 8, None),
    "a hole": ({"a": one(offsets=(4, 12))}, b"\0" * 12, None),
    "more data than it says": ({"a": one()}, b"\0" * 9, None),
    "less data than it says": ({"a": one()}, b"\0" * 7, None),
    "a lie about the dtype": ({"a": one(dtype="F64")}, b"\0" * 8, None),
    "no dtype": ({"a": one(dtype="OBJECT")}, b"\0" * 8, None),
    "a dtype that is a list": ({"a": one() | {"dtype": ["F32"]}}, b"\0" * 8, None),
    "a negative shape": ({"a": one(shape=(-1, -2))}, b"\0" * 8, None),
    "a shape that overflows": ({"a": one(shape=(2**32, 2**32))}, b"\0" * 8, None),
    "a shape of huge numbers": ({"a": one(shape=(10**4000,) * 10)}, b"\0" * 8, None),
    "a hundred thousand axes": ({"a": one(shape=(2**40,) * 100_000)}, b"\0" * 8, None),
    "a shape of words": ({"a": one() | {"shape": "2"}}, b"\0" * 8, None),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, None),
    "true for one": ({"a": one(shape=(True, 2))}, b"\0" * 8, None),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS.values(), ids=HEADERS)
def test_a_header_that_lies_is_refused_before_any_tensor(tmp_path, case):
    path = weights(tmp_path, *case)
    assert "model.safetensors" in refused(path, read_file_headers)


def index(folder, files):
    names = {f"t{i}": file for i, file in enumerate(files)}
    put(folder, "model.safetensors.index.json", {"weight_map": names})


@pytest.mark.parametrize(
    "file",
    ["../../etc/passwd", "/etc/passwd", "a/b.safetensors", "..", "", ".", "a\0b", 5, None, ["a"]],
)
def test_an_index_names_files_beside_it_only(tmp_path, file):
    weights(tmp_path, {"t0": one()})
    index(tmp_path, [file])
    assert "index.json" in refused(tmp_path, weight_files)


def test_a_shard_that_is_not_there_is_named(tmp_path):
    weights(tmp_path, {"t0": one()}, name="model-1.safetensors")
    index(tmp_path, ["model-1.safetensors", "model-2.safetensors"])
    assert "model-2.safetensors" in refused(tmp_path, weight_files)


def test_a_tensor_in_two_shards_or_in_none_is_named(tmp_path):
    weights(tmp_path, {"t0": one()}, name="model-1.safetensors")
    weights(tmp_path, {"t0": one()}, name="model-2.safetensors")
    assert "t0 is in both" in refused(tmp_path, read_headers)
    index(tmp_path, ["model-1.safetensors", "model-2.safetensors"])
    assert "t1" in refused(tmp_path, read_headers)


def test_weights_that_do_not_fit_the_config_are_refused_before_memory_is_taken(folder):
    put(folder, "config.json", CONFIG | {"vocab_size": 2**26, "hidden_size": 2**20, "head_dim": 32})
    assert refused(folder, built)
