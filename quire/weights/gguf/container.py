"""GGUF container: metadata and the places of tensors, of one file or of a model in several.

    "GGUF"  u32 version  u64 tensors  u64 pairs            all little endian
    pairs   string key, u32 type, value                    string: u64 length, bytes
    infos   string name, u32 axes, u64 size[axes], u32 type, u64 offset
    data    from the next multiple of general.alignment

Everything in a file is untrusted. Each count and length is compared with the bytes that are left
before anything is allocated, and sizes are multiplied as Python integers. No torch.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from quire.config.json_file import missing_content
from quire.config.quant.ggml import GGML_TYPES, REFUSED_TYPES, GgmlType
from quire.errors import WeightError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_PAIRS = 1 << 14
MAX_TENSORS = 1 << 18
MAX_PARTS = 4096
MAX_KEY_BYTES = 1 << 10
MAX_NAME_BYTES = 1 << 10
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY = 1 << 22
"""Entries of a list: a vocabulary has a quarter of a million, and as many merges."""
MAX_ENTRIES = 1 << 23
"""Entries of all lists together: a byte in the file is eight in memory."""
MAX_AXES = 4
MAX_SIZE = 1 << 50
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20

_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufTensor(NamedTuple):
    """Where a tensor is. shape: that of its values, rows first."""

    type: GgmlType
    shape: tuple[int, ...]
    file: Path
    start: int  # first byte in the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The metadata and the tensors of a model, which may lie in several files."""

    path: Path  # of the first file
    files: tuple[Path, ...]
    metadata: Mapping[str, Any]  # numbers, bools, texts, and lists of one of these
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufModel:
    """Read the headers of a GGUF file, and of the others that it is one part of.

    Raises: WeightError, which names the file and the field.
    """
    metadata, tensors = _read_file(path)
    files = _parts_of(path, metadata)
    if len(files) == 1:
        return GgufModel(path, (path,), metadata, tensors)
    parts = [(metadata, tensors) if file == path else _read_file(file) for file in files]
    found: dict[str, GgufTensor] = {}
    for number, (file, (own, part)) in enumerate(zip(files, parts)):
        _expect(file, own, "split.count", len(files))
        _expect(file, own, "split.no", number)
        for name, tensor in part.items():
            if name in found:
                raise WeightError(f"{name} is in both {found[name].file} and {file}")
            found[name] = tensor
    _expect(files[0], parts[0][0], "split.tensors.count", len(found))
    return GgufModel(files[0], files, parts[0][0], found)


def part_names(name: str) -> list[str]:
    """Return the names of all files of the model that a file name belongs to."""
    part = _PART.fullmatch(name)
    if part is None or not 0 < int(part["count"]) <= MAX_PARTS:
        return [name]
    return [f"{part['stem']}-{i:05d}-of-{part['count']}.gguf" for i in _numbers(part["count"])]


def _numbers(count: str) -> range:
    return range(1, int(count) + 1)


def _parts_of(path: Path, metadata: Mapping[str, Any]) -> tuple[Path, ...]:
    count = metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise WeightError(f"{path}: split.count is {count!r:.40}; it must be from 1 to {MAX_PARTS}")
    names = part_names(path.name)
    if count <= 1:
        return (path,)
    if len(names) != count:
        raise WeightError(
            f"{path}: split.count is {count}, so the file's name must end in "
            f"-00001-of-{count:05d}.gguf, with the other parts beside it"
        )
    files = tuple(path.with_name(name) for name in names)
    if lost := [file.name for file in files if not file.is_file()]:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise WeightError(
            f"{path} is one of {count} files; {', '.join(lost[:3])}{more} not beside it"
        )
    return files


def _expect(path: Path, metadata: Mapping[str, Any], key: str, value: int) -> None:
    if metadata.get(key) != value:
        raise WeightError(f"{path}: {key} is {metadata.get(key)!r:.40}; it must be {value}")


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                why = missing_content(path) or "is not a GGUF file: it does not begin with GGUF"
                raise WeightError(f"{path} {why}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read()
    except OSError as error:
        raise WeightError(f"{path} cannot be read: {error.strerror}") from error


class _Reader:
    """Reads the header of one file. Every read is within the file, or an error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data = path, data
        self._size = len(data)
        self._entries = 0  # of lists, so far
        self._at = len(MAGIC)

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Return (metadata, tensors). Raises WeightError."""
        version = self._number("I", "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            order = "; its numbers are big endian" if swapped in VERSIONS else ""
            self._fail(f"the version is {version}; supported: 2, 3{order}")
        # an info has at least 24 bytes, a pair 13
        tensors = self._count("Q", "the number of tensors", MAX_TENSORS, 24)
        pairs = self._count("Q", "the number of metadata pairs", MAX_PAIRS, 13)
        metadata: dict[str, Any] = {}
        for i in range(pairs):
            key = self._string(f"the key of metadata pair {i}", MAX_KEY_BYTES)
            if key in metadata:
                self._fail(f"the metadata has {key!r:.80} twice")
            metadata[key] = self._value(key)
        return metadata, self._tensors(tensors, metadata)

    def _tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, GgufTensor]:
        infos: dict[str, tuple[GgmlType, tuple[int, ...], int]] = {}
        for i in range(count):
            name = self._string(f"the name of tensor {i}", MAX_NAME_BYTES)
            if name in infos:
                self._fail(f"there are two tensors {name!r:.80}")
            infos[name] = self._info(name)
        align = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(align) is not int or not 0 < align <= MAX_ALIGNMENT or align & (align - 1):
            self._fail(
                f"general.alignment is {align!r:.40}; it must be a power of two up to "
                f"{MAX_ALIGNMENT}"
            )
        start = -(-self._at // align) * align
        tensors: dict[str, GgufTensor] = {}
        end, before = start, ""
        for name, (kind, shape, offset) in sorted(infos.items(), key=lambda item: item[1][2]):
            nbytes = math.prod(shape) // kind.values * kind.nbytes
            at = start + offset
            if offset % align:
                self._fail(f"{name!r:.80} is at {offset}, which is no multiple of {align}")
            if at + nbytes > self._size:
                self._fail(
                    f"{name!r:.80} ({kind.name} {list(shape)}) ends at byte {at + nbytes}, but the "
                    f"file has {self._size}: it is cut short, or wrong; download it again"
                )
            if at < end:
                self._fail(f"{name!r:.80} begins inside of {before!r:.80}")
            end, before = at + nbytes, name
            tensors[name] = GgufTensor(kind, shape, self._path, at, nbytes)
        return tensors

    def _info(self, name: str) -> tuple[GgmlType, tuple[int, ...], int]:
        what = f"tensor {name!r:.80}"
        axes = self._number("I", f"the axes of {what}")
        if not 0 < axes <= MAX_AXES:
            self._fail(f"{what} has {axes} axes; allowed: 1 to {MAX_AXES}")
        sizes = self._numbers("Q", axes, f"the shape of {what}")
        if not all(0 < size <= MAX_SIZE for size in sizes) or math.prod(sizes) > MAX_SIZE:
            self._fail(f"{what} has the shape {list(sizes)}, which no tensor has")
        number = self._number("I", f"the type of {what}")
        kind = GGML_TYPES.get(number)
        if kind is None:
            named = REFUSED_TYPES.get(number, "unknown")
            self._fail(f"{what} has type {number} ({named}), which quire does not read")
        if sizes[0] % kind.values:
            self._fail(
                f"{what} has rows of {sizes[0]} values, but {kind.name} has blocks of {kind.values}"
            )
        offset = self._number("Q", f"the offset of {what}")
        return kind, tuple(reversed(sizes)), int(offset)

    def _value(self, key: str) -> Any:
        what = f"metadata {key!r:.80}"
        kind = self._number("I", f"the type of {what}")
        if kind != _ARRAY:
            value = self._items(kind, 1, what)[0]
            return shortest_float(value) if kind == _FLOAT32 else value
        kind = self._number("I", f"the type of the list {what}")
        if kind == _ARRAY:
            self._fail(f"{what} is a list of lists, which quire does not read")
        each = 8 if kind == _STRING else struct.calcsize(_NUMBERS.get(kind, "B"))
        count = self._count("Q", f"the length of {what}", MAX_ARRAY, each)
        self._entries += count
        if self._entries > MAX_ENTRIES:
            self._fail(f"the lists of the metadata have over {MAX_ENTRIES} entries, to {what}")
        return self._items(kind, count, what)

    def _items(self, kind: int, count: int, what: str) -> list[Any]:
        if kind == _STRING:
            return [self._string(what, MAX_STRING_BYTES) for _ in range(count)]
        if kind == _BOOL:
            found = self._numbers("B", count, what)
            if any(one > 1 for one in found):
                self._fail(f"{what} is {max(found)}; a bool is 0 or 1")
            return [bool(one) for one in found]
        if kind not in _NUMBERS:
            self._fail(f"{what} has the unknown type {kind}")
        return list(self._numbers(_NUMBERS[kind], count, what))

    def _count(self, form: str, what: str, most: int, each: int) -> int:
        """Read a number of things that have at least `each` bytes."""
        count = int(self._number(form, what))
        room = (self._size - self._at) // each
        if count > min(most, room):
            self._fail(
                f"{what} is {count}; allowed: {most}, and {room} fit in what is left of the file"
            )
        return count

    def _string(self, what: str, most: int) -> str:
        length = self._count("Q", f"the length of {what}", most, 1)
        data = self._data[self._at : self._at + length]
        self._at += length
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            self._fail(f"{what} is not UTF-8: {error}")

    def _number(self, form: str, what: str) -> Any:
        return self._numbers(form, 1, what)[0]

    def _numbers(self, form: str, count: int, what: str) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{form}")
        if self._at + layout.size > self._size:
            self._fail(f"the file ends in {what}: it is cut short; download it again")
        found = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return found

    def _fail(self, why: str) -> NoReturn:
        raise WeightError(f"{self._path}: {why}")


def shortest_float(value: float) -> float:
    """The number of fewest digits that is the same float32: 1e-5 and not 9.99999974e-6."""
    shorter = (float(f"{value:.{digits}g}") for digits in (6, 7, 8))
    return next(
        (one for one in shorter if struct.pack("<f", one) == struct.pack("<f", value)), value
    )
