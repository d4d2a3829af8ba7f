"""GGUF headers: what is read, and files that lie, each an error that names the field."""

import struct
import tracemalloc
from pathlib import Path

import pytest

from quire.config.quant.ggml import TYPE_BY_NAME
from quire.errors import WeightError
from quire.weights.gguf import container as gguf_container
from quire.weights.gguf.container import GgufTensor, part_names, read_gguf
from tests.pure.weights.gguf_bytes import (
    F16,
    LIST,
    NUMBER,
    Q4_0,
    TEXT,
    container,
    entries,
    info,
    number,
    pair,
    text,
)

DATA = bytes(256)
GOOD = container([number("a", 7)], [info("x")], DATA)
BIG = 2**64 - 1


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors(tmp_path: Path, version: int) -> None:
    pairs = [
        pair("text", TEXT, text("Grüße")),
        pair("yes", 7, b"\1"),
        pair("low", 11, struct.pack("<q", -5)),
        pair("wide", 12, struct.pack("<d", 0.1)),
        pair("words", LIST, entries(TEXT, 2, text("a") + text(""))),
        pair("scores", LIST, entries(6, 3, struct.pack("<3f", 1, 0.5, -2))),
        number("general.alignment", 64),
    ]
    infos = [info("m", (64, 3, 2), Q4_0, 64), info("v", (4,), F16)]
    path = write(
        tmp_path / "m.gguf", container(pairs, infos, bytes(512), version=version, align=64)
    )
    model = read_gguf(path)
    assert model.metadata == {
        "text": "Grüße",
        "yes": True,
        "low": -5,
        "wide": 0.1,
        "words": ["a", ""],
        "scores": [1, 0.5, -2],
        "general.alignment": 64,
    }
    start = path.stat().st_size - 512
    assert model.tensors == {
        "v": GgufTensor(TYPE_BY_NAME["F16"], (4,), path, start, 8),
        "m": GgufTensor(TYPE_BY_NAME["Q4_0"], (2, 3, 64), path, start + 64, 6 * 36),
    }
    assert model.files == (path,)


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
    "other": (b"PK\3\4" + DATA, "does not begin with GGUF"),
    "magic_alone": (b"GGUF", "ends in the version"),
    "version_1": (container(version=1), "the version is 1; supported"),
    "version_4": (container(version=4), "the version is 4; supported"),
    "big_endian": (container(version=3 << 24), "big endian"),
    "no_counts": (b"GGUF\3\0\0\0", "ends in the number of tensors"),
    "many_tensors": (container(tensors=BIG), "number of tensors is 18446744073709551615"),
    "some_tensors": (container(tensors=1 << 19, data=bytes(1 << 24)), "number of tensors is"),
    "many_pairs": (container(count=BIG), "number of metadata pairs is"),
    "more_pairs": (container([number("a", 1)], count=9), "the number of metadata pairs is 9"),
    "long_key": (container([text("k", BIG)]), "length of the key of metadata pair 0"),
    "key_of_2k": (container([number("k" * 2000, 1)]), "length of the key"),
    "key_utf8": (container([pair(b"\xff\xfe", NUMBER, b"\0\0\0\0")]), "not UTF-8"),
    "same_key": (container([number("a", 1), number("a", 1)]), "'a' twice"),
    "kind_13": (container([pair("a", 13, DATA)]), "'a' has the unknown type 13"),
    "kind_4e9": (container([pair("a", 2**32 - 1, DATA)]), "unknown type 4294967295"),
    "bool_2": (container([pair("a", 7, b"\2")]), "a bool is 0 or 1"),
    "long_text": (container([pair("a", TEXT, text("abc", 1 << 40))]), "length of metadata 'a'"),
    "text_utf8": (container([pair("a", TEXT, text(b"\xc3("))]), "metadata 'a' is not UTF-8"),
    "long_list": (container([pair("a", LIST, entries(TEXT, BIG))]), "length of metadata 'a'"),
    "list_4m": (container([pair("a", LIST, entries(0, 5 << 20, bytes(5 << 20)))]), "allowed: 4194304"),
    "list_past_end": (container([pair("a", LIST, entries(12, 90, DATA[:64]))]), "is 90; allowed: 4194304, and"),
    "list_kind": (container([pair("a", LIST, entries(77, 1, DATA))]), "unknown type 77"),
    "nested": (container([pair("a", LIST, entries(LIST, 1, DATA))]), "list of lists"),
    "deep": (container([pair("a", LIST, struct.pack("<IQ", 9, 1) * 10000)]), "list of lists"),
    "item_text": (container([pair("a", LIST, entries(TEXT, 2, text("x") + text("y", BIG)))]), "length of"),
    "no_axes": (container([], [info("x", ())], DATA), "has 0 axes"),
    "five_axes": (container([], [info("x", (1,) * 5)], DATA), "has 5 axes"),
    "many_axes": (container([], [info("x", (32, 2), axes=2**32 - 1)], DATA), "4294967295 axes"),
    "size_0": (container([], [info("x", (32, 0))], DATA), r"shape \(32, 0\)|shape \[32, 0\]"),
    "size_64": (container([], [info("x", (32, BIG))], DATA), "no tensor has"),
    "wraps": (container([], [info("x", (1 << 32, 1 << 32))], DATA), "no tensor has"),
    "wraps_to_8": (container([], [info("x", (1 << 21, 1 << 21, 1 << 21, 2))], DATA), "no tensor has"),
    "type_9": (container([], [info("x", kind=9)], DATA), r"type 9 \(Q8_1\)"),
    "type_99": (container([], [info("x", kind=99)], DATA), r"type 99 \(unknown\)"),
    "part_block": (container([], [info("x", (48, 2), Q4_0)], DATA), "blocks of 32"),
    "past_end": (container([], [info("x", (32, 3))], DATA), "cut short"),
    "far": (container([], [info("x", offset=2**63)], DATA), "cut short"),
    "unaligned": (container([], [info("x", (4, 2), offset=8)], DATA), "no multiple of 32"),
    "overlap": (container([], [info("x"), info("y", offset=128)], bytes(512)), "inside of 'x'"),
    "same_name": (container([], [info("x"), info("x", offset=256)], bytes(512)), "two tensors 'x'"),
    "name_utf8": (container([], [info(b"\x80")], DATA), "name of tensor 0 is not UTF-8"),
    "long_name": (container([], [info("x" * 5000)], DATA), "length of the name of tensor 0"),
    "align_0": (container([number("general.alignment", 0)], [info("x")], DATA), "alignment is 0"),
    "align_48": (container([number("general.alignment", 48)], [info("x")], DATA), "alignment is 48"),
    "align_big": (container([number("general.alignment", 1 << 31)], [info("x")], DATA), "power of two"),
    "align_text": (container([pair("general.alignment", TEXT, text("32"))]), "alignment is '32'"),
    "split_many": (container([number("split.count", 2**32 - 1)]), "split.count is 4294967295"),
    "split_list": (container([pair("split.count", LIST, entries(4, 0))]), "split.count is"),
    "split_name": (container([number("split.count", 3)]), "must end in -00001-of-00003.gguf"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(tmp_path: Path, name: str) -> None:
    data, message = BROKEN[name]
    path = write(tmp_path / f"{name}.gguf", data)
    tracemalloc.start()
    try:
        with pytest.raises(WeightError, match=message) as caught:
            read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500
    assert peak < 10 << 20


def test_lists_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = [pair(key, LIST, entries(0, 60, bytes(60))) for key in "ab"]
    path = write(tmp_path / "lists.gguf", container(lists))
    assert len(read_gguf(path).metadata["b"]) == 60
    monkeypatch.setattr(gguf_container, "MAX_ENTRIES", 100)
    with pytest.raises(WeightError, match="over 100 entries, to metadata 'b'"):
        read_gguf(path)


def test_a_file_cut_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for size in range(4, len(GOOD)):
        with pytest.raises(WeightError):
            read_gguf(write(path, GOOD[:size]))
    read_gguf(write(path, GOOD))


def split(tmp_path: Path, count: int = 3, **wrong: bytes) -> list[Path]:
    """A model in `count` files of one tensor. wrong: the content of pN."""
    names = part_names(f"m-00001-of-{count:05d}.gguf")
    for i, name in enumerate(names):
        pairs = [number("split.no", i), number("split.count", count)]
        pairs += [number("split.tensors.count", count)] if i == 0 else []
        pairs += [number("size", 9)] if i == 0 else []
        content = container(pairs, [info(f"t{i}")], DATA)
        write(tmp_path / name, wrong.get(f"p{i}", content))
    return [tmp_path / name for name in names]


def test_split_files_from_any_part(tmp_path: Path) -> None:
    files = split(tmp_path)
    for path in files:
        model = read_gguf(path)
        assert model.files == tuple(files)
        assert model.path == files[0]
        assert model.metadata["size"] == 9
        assert {name: one.file for name, one in model.tensors.items()} == {
            f"t{i}": file for i, file in enumerate(files)
        }


def test_broken_split_files(tmp_path: Path) -> None:
    first = [number("split.count", 3), number("split.no", 0)]
    other = [number("split.count", 3), number("split.no", 1)]
    cases = {
        "is in both": {"p1": container(other, [info("t0")], DATA)},
        "split.no is 0; it must be 1": {"p1": container(first, [info("t1")], DATA)},
        "split.count is 2; it must be 3": {
            "p1": container([number("split.count", 2), *first[1:]], [info("t1")], DATA)
        },
        "split.tensors.count is 2": {
            "p0": container([*first, number("split.tensors.count", 2)], [info("t0")], DATA)
        },
        "split.tensors.count is None": {"p0": container(first, [info("t0")], DATA)},
        "does not begin with GGUF": {"p2": DATA},
    }
    for i, (message, wrong) in enumerate(cases.items()):
        (folder := tmp_path / str(i)).mkdir()
        with pytest.raises(WeightError, match=message):
            read_gguf(split(folder, **wrong)[0])
    files = split(tmp_path)
    files[1].unlink()
    with pytest.raises(WeightError, match=r"m-00002-of-00003\.gguf not beside it"):
        read_gguf(files[0])


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="cannot be read: No such file"):
        read_gguf(tmp_path / "none.gguf")
