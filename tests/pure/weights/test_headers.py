"""Safetensors headers: what is read, and that nothing broken gets through."""

import json
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import WeightError
from quire.weights.headers import BITS, TensorHeader, read_file_headers, read_headers
from tests.pure.weights.made import index, safetensors

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def test_a_single_file_gives_names_dtypes_and_shapes(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors(path, {"a.w": ("BF16", (3, 4)), "b": ("F32", ())}, metadata={"format": "pt"})
    found = read_headers(tmp_path)
    assert found == {
        "a.w": TensorHeader("BF16", (3, 4), path),
        "b": TensorHeader("F32", (), path),
    }


def sharded(folder):
    safetensors(folder / SHARDS[0], {"a": ("F32", (2,))})
    safetensors(folder / SHARDS[1], {"b": ("F32", (3,))})
    index(folder / INDEX, {"a": SHARDS[0], "b": SHARDS[1]})


def test_shards_are_joined_by_their_index(tmp_path):
    sharded(tmp_path)
    assert {name: h.file.name for name, h in read_headers(tmp_path).items()} == {
        "a": SHARDS[0],
        "b": SHARDS[1],
    }


def test_files_that_the_index_does_not_name_are_not_read(tmp_path):
    sharded(tmp_path)
    safetensors(tmp_path / "consolidated.safetensors", {"tok": ("F32", (5,))})
    safetensors(tmp_path / "model.safetensors", {"a": ("F32", (9,))})
    (tmp_path / "original").mkdir()
    safetensors(tmp_path / "original" / "model.safetensors", {"x": ("F32", (1,))})
    assert sorted(read_headers(tmp_path)) == ["a", "b"]


def test_consolidated_copies_do_not_count_without_an_index_either(tmp_path):
    safetensors(tmp_path / "model.safetensors", {"a": ("F32", (2,))})
    safetensors(tmp_path / "consolidated.safetensors", {"tok": ("F32", (5,))})
    assert sorted(read_headers(tmp_path)) == ["a"]


def test_a_shard_that_is_not_there_is_named(tmp_path):
    sharded(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(WeightError, match=SHARDS[1]):
        read_headers(tmp_path)


def test_a_tensor_the_index_names_and_no_file_holds_is_named(tmp_path):
    sharded(tmp_path)
    index(tmp_path / INDEX, {"a": SHARDS[0], "b": SHARDS[1], "lost.weight": SHARDS[1]})
    with pytest.raises(WeightError, match=r"lost\.weight"):
        read_headers(tmp_path)


def test_a_tensor_in_two_files_is_an_error_unless_the_index_chooses(tmp_path):
    for name in SHARDS:
        safetensors(tmp_path / name, {"a": ("F32", (2,))})
    with pytest.raises(WeightError, match="a is in both"):
        read_headers(tmp_path)
    safetensors(tmp_path / SHARDS[1], {"a": ("F32", (9,)), "b": ("F32", (1,))})
    index(tmp_path / INDEX, {"a": SHARDS[0], "b": SHARDS[1]})
    assert read_headers(tmp_path)["a"].shape == (2,)


@pytest.mark.parametrize("outside", ["../model.safetensors", "/etc/model.safetensors"])
def test_an_index_cannot_point_out_of_the_folder(tmp_path, outside):
    index(tmp_path / INDEX, {"a": outside})
    with pytest.raises(WeightError, match="not a file beside it"):
        read_headers(tmp_path)


def test_a_folder_without_weights_is_an_error_with_the_file_names(tmp_path):
    with pytest.raises(WeightError, match="safetensors"):
        read_headers(tmp_path)


def entry(dtype="F32", shape=(2,), place=(0, 8), name="a"):
    return json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": place}})


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("{", "corrupt"),
        ("[]", "not a JSON object"),
        ("[" * 5000, "corrupt"),
        ('{"a": 3}', "malformed"),
        (entry(dtype="F7"), "malformed"),
        (entry(shape=[-2]), "malformed"),
        (entry(shape=[2.0]), "malformed"),
        (entry(shape=[True, True]), "malformed"),
        (entry(place=[0]), "malformed"),
        (entry(place=[8, 0]), "malformed"),
        (entry(shape=[3]), "cannot lie at bytes 0 to 8"),
        (entry(place=[4, 12]), "cannot lie at bytes 4 to 12"),
        (entry(shape=[2**40, 2**40]), "cannot lie"),
        (entry(shape=[1], place=[0, 4]), "too long"),
        (entry(shape=[4], place=[0, 16]), "cut short"),
        (entry()[:-1] + ", " + entry()[1:], "twice"),
    ],
)
def test_a_corrupt_header_is_refused_by_file_name(tmp_path, header, words):
    path = tmp_path / "model.safetensors"
    safetensors(path, {"a": ("F32", (2,))}, header=header)
    with pytest.raises(WeightError, match=words) as error:
        read_file_headers(path)
    assert "model.safetensors" in str(error.value)


@given(cut=st.integers(1, 1000))
def test_a_file_cut_anywhere_is_refused(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "model.safetensors"
    safetensors(path, {"a": ("F32", (20, 7)), "b": ("U8", (100,))})
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        read_file_headers(path)


@given(at=st.integers(0, 200), byte=st.integers(0, 255))
def test_no_flipped_byte_raises_anything_but_weight_error(tmp_path_factory, at, byte):
    path = tmp_path_factory.mktemp("flip") / "model.safetensors"
    safetensors(path, {"a": ("F32", (4,)), "b": ("U8", (9,))})
    whole = bytearray(path.read_bytes())
    whole[at % len(whole)] = byte
    path.write_bytes(bytes(whole))
    try:
        found = read_file_headers(path)
    except WeightError:
        return
    assert sum(prod(h.shape) * BITS[h.dtype] // 8 for h in found.values()) == 25


def test_a_header_that_claims_gigabytes_is_refused_without_reading_them(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(WeightError, match="not a whole safetensors file"):
        read_file_headers(path)
