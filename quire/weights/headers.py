"""Tensor names, dtypes and shapes of safetensors files, from their headers alone. No torch.

A header is untrusted input, so every number in it is checked against the file before it is used.
The tensors are read by quire.weights.files.

    8 bytes   length n of the header, little endian
    n bytes   JSON: {name: {dtype, shape, data_offsets: [begin, end)}, "__metadata__": {...}}
    the rest  the data, without holes

Source: the format's description, https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.json_file import missing_content
from quire.errors import WeightError
from quire.weights.file_listing import index_name, read_weight_map, weight_files
from quire.weights.mistral_layout import hf_name, is_mistral_file

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_AXES = 16
MAX_SIZE = 1 << 50
"""Elements along an axis, and bytes of a file: products of such numbers stay cheap."""

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
DTYPE_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""torch's names of dtypes -> the format's."""

PLAIN_DTYPES = frozenset(("F64", "F32", "F16", "BF16"))
"""Dtypes of unquantized weights."""


class TensorHeader(NamedTuple):
    """The header of one tensor. dtype is the format's own name: BF16, F32, ..."""

    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def nbytes(self) -> int:
        return -(-math.prod(self.shape) * BITS.get(self.dtype, 8) // 8)

    @property
    def is_plain(self) -> bool:
        """Whether it is no quantized weight: floats of 16 or more bits, or positions."""
        return self.dtype in PLAIN_DTYPES or self.dtype in ("I64", "BOOL")


def read_headers(folder: Path, load_format: str = "auto") -> dict[str, TensorHeader]:
    """Every tensor of a model's safetensors files (single or sharded), by its name in a model.

    load_format: mistral reads consolidated*.safetensors; auto does if there are no others.

    Raises: WeightError (no safetensors; a file cut short or corrupt; a name in two files; files
    and index disagree).
    """
    paths = weight_files(folder, load_format)
    if paths[0].suffix != ".safetensors":
        paths = weight_files(folder, "safetensors")
    index = read_weight_map(folder, index_name(paths[0]))
    found: dict[str, TensorHeader] = {}
    for path in paths:
        for name, header in read_file_headers(path).items():
            if index and name in index and index[name] != path.name:
                continue  # a copy: the index names the file that counts
            if name in found:
                raise WeightError(f"{name} is in both {found[name].file.name} and {path.name}")
            found[name] = header
    check_index(folder, index, found)
    if is_mistral_file(paths[0]):
        return {hf_name(name): header for name, header in found.items()}
    return found


def check_index(folder: Path, index: dict[str, str], found: Iterable[str]) -> None:
    """Raise WeightError if the index names tensors that no file holds; warn of the reverse."""
    if not index:
        return
    have = set(found)
    if lost := sorted(index.keys() - have):
        names = ", ".join(lost[:3])
        raise WeightError(f"the index of {folder} names {len(lost)} absent tensors, first {names}")
    if extra := sorted(have - index.keys()):
        log.warning("%d tensors in %s are not in its index, first %s", len(extra), folder, extra[0])


def read_file_headers(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file."""
    return {name: header for name, (header, _) in read_places(path).items()}


def read_places(path: Path, most: int = MAX_HEADER_BYTES) -> dict[str, tuple[TensorHeader, int]]:
    """The same, each with the byte of the file at which its data begins.

    most: bytes that the header may have.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(most, size - 8):
                why = missing_content(path) or (
                    f"is not a whole safetensors file: it has {size} bytes, and its header "
                    f"{length}; download it again"
                )
                raise WeightError(f"{path} {why}")
            text = file.read(length)
    except OSError as error:
        raise WeightError(f"{path} cannot be read: {error.strerror}") from error
    entries = _parse(text, path)
    _check_offsets(entries, size - 8 - length, path)
    return {
        name: (TensorHeader(e["dtype"], tuple(e["shape"]), path), 8 + length + e["data_offsets"][0])
        for name, e in entries.items()
    }


def read_tensor_bytes(path: Path, names: Iterable[str], most: int) -> dict[str, bytes]:
    """The data of small tensors of one safetensors file. Raises WeightError beyond `most` bytes."""
    found, places = {}, read_places(path)
    with path.open("rb") as file:
        for name in names:
            header, begin = places[name]
            if header.nbytes > most:
                raise WeightError(f"{path}: {name!r} has {header.nbytes} bytes; allowed: {most}")
            file.seek(begin)
            found[name] = file.read(header.nbytes)
    return found


def _parse(text: bytes, path: Path) -> dict[str, dict[str, Any]]:
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_reject_duplicates)
    except (
        ValueError,
        RecursionError,
    ) as error:  # UTF-8, JSON, numbers of 4300 digits, duplicate keys
        raise WeightError(f"{path} has a corrupt safetensors header: {error}") from error
    if not isinstance(value, dict):
        raise WeightError(f"{path} has a safetensors header that is not a JSON object")
    value.pop("__metadata__", None)
    for name, entry in value.items():
        if not _well_formed(entry):
            raise WeightError(
                f"{path}: the header's entry of {name!r} is malformed: {entry!r:.200}"
            )
    return value


class _DuplicateKey(ValueError):
    """A key occurs twice in one JSON object."""


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _DuplicateKey("a name occurs in it twice")
    return made


def _well_formed(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.get("dtype") not in list(BITS):
        return False  # a list looks for what is equal, and needs no hash of what it is given
    shape, place = entry.get("shape"), entry.get("data_offsets") or []
    return (
        _is_size_list(shape) and _is_size_list(place) and len(place) == 2 and place[0] <= place[1]
    )


def _is_size_list(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_AXES
        and all(type(n) is int and 0 <= n <= MAX_SIZE for n in value)
    )


def _check_offsets(entries: dict[str, dict[str, Any]], data_bytes: int, path: Path) -> None:
    """Tensors must lie end to end and fill the data part."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        need = math.prod(entry["shape"]) * BITS[entry["dtype"]]
        if begin != at or (end - begin) * 8 != need:
            raise WeightError(
                f"{path}: {name!r} ({entry['dtype']} {entry['shape']}) cannot lie at bytes "
                f"{begin} to {end}"
            )
        at = end
    if at != data_bytes:
        word = "cut short" if at > data_bytes else "too long"
        raise WeightError(
            f"{path} is {word}: its header wants {at} bytes of data, it has {data_bytes}; "
            "download it again"
        )
