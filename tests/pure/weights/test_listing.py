"""Which files count, and JSON files read with errors that help."""

import pytest

from quire.errors import ConfigError, WeightError
from quire.weights.file_listing import load_json, missing_files, weight_files, weight_patterns
from tests.pure.weights.made import index


def touch(folder, *names):
    for name in names:
        (folder / name).write_bytes(b"")


def names(paths):
    return [path.name for path in paths]


def test_safetensors_are_preferred_and_leftovers_of_training_ignored(tmp_path):
    touch(tmp_path, "pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt")
    assert names(weight_files(tmp_path)) == ["pytorch_model.bin"]
    touch(tmp_path, "b.safetensors", "a.safetensors", "consolidated.00.pth")
    assert names(weight_files(tmp_path)) == ["a.safetensors", "b.safetensors"]
    assert names(weight_files(tmp_path, "pt")) == ["pytorch_model.bin"]


def test_a_demanded_format_that_is_absent_is_an_error(tmp_path):
    touch(tmp_path, "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"\*\.safetensors"):
        weight_files(tmp_path, "safetensors")


@pytest.mark.parametrize(
    ("hub", "wanted"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack"], ["pytorch_model.bin"]),
        (
            ["a.safetensors", "original/b.safetensors", "consolidated.safetensors"],
            ["a.safetensors"],
        ),
        (["model.gguf", "model.onnx"], ["model.gguf"]),
        (["model.gguf", "model.safetensors"], ["model.safetensors"]),
    ],
)
def test_only_one_format_is_downloaded(hub, wanted):
    assert weight_patterns(hub) == wanted


def test_what_is_missing_is_read_from_the_index(tmp_path):
    assert missing_files(tmp_path) == ["weights (*.safetensors or *.bin)"]
    index(tmp_path / "pytorch_model.bin.index.json", {"a": "1.bin", "b": "2.bin"})
    touch(tmp_path, "1.bin")
    assert missing_files(tmp_path) == ["2.bin"]
    touch(tmp_path, "2.bin")
    assert missing_files(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no config.json"),
        (b"{", "not valid JSON"),
        (b"[1]", "must hold a JSON object, not a list"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_json_that_cannot_be_used_is_an_error_with_the_path(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=words) as error:
        load_json(tmp_path, "config.json")
    assert str(tmp_path) in str(error.value)


def test_json_is_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert load_json(tmp_path, "config.json") == {"model_type": "qwen3"}
