"""Tensors come off the disk as they were written, from every format and split."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import WeightError
from quire.weights.files import iterate_tensors, read_headers
from quire.weights.headers import BITS

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 3),
    "fp8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
}

OLD = {name: tensor for name, tensor in TENSORS.items() if name != "fp8"}
"""torch cannot write float8 in its oldest format."""


def shards(folder, save, names, index):
    half = dict(list(TENSORS.items())[:2]), dict(list(TENSORS.items())[2:])
    for name, part in zip(names, half):
        save(part, folder / name)
    where = {key: name for name, part in zip(names, half) for key in part}
    (folder / index).write_text(json.dumps({"weight_map": where}))


def layouts():
    return {
        "safetensors": lambda f: save_file(TENSORS, f / "model.safetensors"),
        "bin": lambda f: torch.save(TENSORS, f / "pytorch_model.bin"),
        "old bin": lambda f: torch.save(
            OLD, f / "pytorch_model.bin", _use_new_zipfile_serialization=False
        ),
        "nested": lambda f: torch.save({"state_dict": TENSORS}, f / "pytorch_model.bin"),
        "safetensors shards": lambda f: shards(
            f, save_file, ("x1.safetensors", "x2.safetensors"), "model.safetensors.index.json"
        ),
        "bin shards": lambda f: shards(
            f, torch.save, ("x1.bin", "x2.bin"), "pytorch_model.bin.index.json"
        ),
    }


@pytest.mark.parametrize("layout", layouts())
def test_every_layout_gives_every_tensor_once(tmp_path, layout):
    layouts()[layout](tmp_path)
    names = []
    for name, tensor in iterate_tensors(tmp_path, progress=False):
        names.append(name)
        assert tensor.dtype == TENSORS[name].dtype
        assert tensor.shape == TENSORS[name].shape
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (tensor, TENSORS[name])))
    assert sorted(names) == sorted(OLD if layout == "old bin" else TENSORS)


def test_headers_agree_with_what_the_safetensors_library_wrote(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    found = read_headers(tmp_path)
    assert {name: h.shape for name, h in found.items()} == {
        name: tuple(t.shape) for name, t in TENSORS.items()
    }
    assert {name: BITS[h.dtype] for name, h in found.items()} == {
        name: t.itemsize * 8 for name, t in TENSORS.items()
    }


def test_safetensors_win_over_a_pickle_beside_them(tmp_path):
    save_file({"good": torch.ones(1)}, tmp_path / "model.safetensors")
    torch.save({"bad": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert [name for name, _ in iterate_tensors(tmp_path, progress=False)] == ["good"]
    assert [name for name, _ in iterate_tensors(tmp_path, False, load_format="pt")] == ["bad"]


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_carries_code_is_refused_and_does_not_run(tmp_path, capsys, zipped):
    path = tmp_path / "pytorch_model.bin"
    if zipped:
        torch.save({"a": Evil()}, path)
    else:
        path.write_bytes(pickle.dumps({"a": Evil()}, protocol=2))
    with pytest.raises(WeightError, match=r"pytorch_model\.bin"):
        list(iterate_tensors(tmp_path, progress=False))
    assert "code ran" not in capsys.readouterr().out


class Packed(torch.Tensor):
    """A subclass of tensors, as torchao has for quantized ones."""


@pytest.mark.parametrize("allowed", [False, True])
def test_a_pickle_of_a_tensor_subclass_is_refused_with_its_class(tmp_path, allowed):
    """Also where a package has told torch that its classes are safe."""
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a.weight": torch.ones(4).as_subclass(Packed)}, path)
    extra = [Packed, getattr] if allowed else []
    says = (
        r"a\.weight is a .*\.Packed, not a plain" if allowed else r"holds objects of \S+: pickles"
    )
    with (
        torch.serialization.safe_globals(extra),
        pytest.raises(WeightError, match=rf"{says}.*use a checkpoint in safetensors"),
    ):
        list(iterate_tensors(tmp_path, progress=False))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no", b"text"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_broken_file_is_a_weight_error_with_its_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightError, match=name.replace(".", r"\.")):
        list(iterate_tensors(tmp_path, progress=False))


@pytest.mark.parametrize("state", [[torch.ones(1)], {"a": "text"}])
def test_a_pickle_of_something_else_is_refused(tmp_path, state):
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightError, match="not a"):
        list(iterate_tensors(tmp_path, progress=False))


def test_a_tensor_missing_from_the_shards_is_reported_at_the_end(tmp_path):
    layouts()["bin shards"](tmp_path)
    index = tmp_path / "pytorch_model.bin.index.json"
    where = json.loads(index.read_text())
    where["weight_map"]["lost"] = "x1.bin"
    index.write_text(json.dumps(where))
    with pytest.raises(WeightError, match="lost"):
        list(iterate_tensors(tmp_path, progress=False))


def test_the_progress_bar_is_tqdm_and_can_be_off(tmp_path, capsys):
    layouts()["safetensors shards"](tmp_path)
    list(iterate_tensors(tmp_path, progress=False))
    assert capsys.readouterr().err == ""
    list(iterate_tensors(tmp_path))
    assert "Loading safetensors checkpoint shards: 100% Completed | 2/2" in capsys.readouterr().err
