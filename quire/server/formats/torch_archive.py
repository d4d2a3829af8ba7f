"""Torch archive: reads one tensor that torch.save() wrote, without torch and without pickle.

The archive is a zip file: `data.pkl` describes the tensor, `data/KEY` is its storage. Nothing in it
is executed: its opcodes are read as data and must describe one dense tensor. Memory and time are
bounded by the size of the archive, whatever shape it states.

Format: torch/serialization.py (_save), torch/_utils.py (_rebuild_tensor_v2).
"""

from __future__ import annotations

import binascii
import io
import pickletools
import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.errors import RequestError

MAX_ENTRIES = 64
"""Files in an archive; torch writes about seven."""
MAX_DESCRIPTION_BYTES = 1 << 14
"""Bytes of data.pkl; a tensor takes about 160."""
MAX_ELEMENTS = 1 << 40
"""Elements of an axis, far beyond any archive."""
DECODE_CHARS = 1 << 20
"""Characters of base64 that are decoded at once: other threads run in between."""
_ENTRY_SIGNATURE = b"PK\x01\x02"
_DTYPES = {"HalfStorage": "<f2", "FloatStorage": "<f4", "DoubleStorage": "<f8"}
_INTEGERS = {"IntStorage": "<i4", "LongStorage": "<i8"}
_BFLOAT16 = "BFloat16Storage"
_ARCHIVE_ERRORS = (
    *(zipfile.BadZipFile, EOFError, OSError, struct.error, RuntimeError, NotImplementedError),
    *(KeyError, ValueError, OverflowError),  # names of files; shapes beyond numpy's
)
_MARK = object()
_CONSTANTS = {"EMPTY_TUPLE": (), "NEWTRUE": True, "NEWFALSE": False, "NONE": None}
_LITERALS = ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}

Numbers = npt.NDArray[Any]


class _Name(NamedTuple):
    """A class or function that the pickle refers to."""

    module: str
    name: str


class _Call(NamedTuple):
    function: Any
    args: Any


class _Storage(NamedTuple):
    fields: Any


def read_tensor(text: str, most_axes: int = 3, integers: bool = False) -> Numbers:
    """Read a tensor of floats from base64 of an archive. bfloat16 becomes float32.

    integers: it may also be of int32 or int64. Raises RequestError, also for more axes than
    `most_axes`.
    """
    data = _decode_base64(text)
    if not data.startswith(b"PK\x03\x04"):
        raise _error("is no archive of torch.save() (since torch 1.6)")
    if data.count(_ENTRY_SIGNATURE) > MAX_ENTRIES:
        raise _error(f"is an archive of more than {MAX_ENTRIES} files, and not of one tensor")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read_archive(archive, most_axes, _DTYPES | _INTEGERS if integers else _DTYPES)
    except RequestError:
        raise
    except _ARCHIVE_ERRORS as error:
        raise _error(f"is a broken archive of torch.save(): {str(error)[:100]}") from None


def _decode_base64(text: str) -> bytes:
    try:
        return b"".join(
            binascii.a2b_base64(text[at : at + DECODE_CHARS], strict_mode=True)
            for at in range(0, len(text), DECODE_CHARS)
        )
    except ValueError as error:  # also of characters outside of ASCII
        raise _error(f"must be base64: {error}") from None


def _read_archive(archive: zipfile.ZipFile, most_axes: int, dtypes: Mapping[str, str]) -> Numbers:
    paths = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    storage, offset, shape, strides = _read_description(_read_file(archive, paths, "data.pkl"))
    kind, key = storage
    if kind not in dtypes and kind != _BFLOAT16:
        name = kind.removesuffix("Storage").lower()
        allowed = "float16, bfloat16, float32 or float64"
        if _INTEGERS.keys() <= dtypes.keys():
            allowed = f"int32, int64, {allowed}"
        raise _error(f"must be of {allowed}, got {name:.40}")
    if "byteorder" in paths and _read_file(archive, paths, "byteorder") != b"little":
        raise _error("was saved on a big-endian machine; only little-endian numbers are read")
    if not 0 < len(shape) <= most_axes:
        raise _error(f"must have 1 to {most_axes} axes, got {len(shape)} axes")
    data = _read_file(archive, paths, f"data/{key}")
    numbers: Numbers
    if kind == _BFLOAT16:
        numbers = np.frombuffer(data, "<u2")
    else:
        numbers = np.frombuffer(data, dtypes[kind])
    _check_strides(len(numbers), offset, shape, strides)
    size = numbers.itemsize
    viewed = np.lib.stride_tricks.as_strided(
        numbers[offset:], shape, [size * step for step in strides], writeable=False
    )
    if kind == _BFLOAT16:
        return (viewed.astype("<u4") << 16).view("<f4")
    return viewed


def _read_file(archive: zipfile.ZipFile, paths: dict[str, zipfile.ZipInfo], path: str) -> bytes:
    info = paths.get(path)
    if info is None:
        raise _error(f"is an archive without {path[:40]!r}, and not of torch.save()")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise _error(f"has {path[:40]!r} compressed, which torch.save() does not do")
    if path == "data.pkl" and info.file_size > MAX_DESCRIPTION_BYTES:
        raise _error("must be one tensor; this archive describes more")
    return archive.read(info)


def _read_description(
    data: bytes,
) -> tuple[tuple[str, str], int, tuple[int, ...], tuple[int, ...]]:
    """Return (dtype and key of the storage), offset, shape and strides, in elements."""
    match _read_pickle(data):
        case _Call(
            _Name("torch._utils", "_rebuild_tensor_v2"),
            (
                _Storage(("storage", _Name("torch", kind), str(key), str(), int())),
                int(offset),
                tuple(shape),
                tuple(strides),
                bool(),
                _Call(_Name("collections", "OrderedDict"), ()),
                *_,
            ),
        ) if all(type(n) is int for n in (offset, *shape, *strides)):
            return (kind, key), offset, shape, strides
        case _Call(_Name(_, function), _):
            raise _error(
                f"must be one dense tensor of numbers; this was saved by {function[:60]!r} (send "
                "tensor.detach().cpu().to_dense())"
            )
    raise _error("must be one dense tensor of numbers, saved by torch.save()")


def _read_pickle(data: bytes) -> Any:
    """Return what the opcodes describe. Those that no tensor needs are refused."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    try:
        for opcode, arg, _ in pickletools.genops(data):
            name = opcode.name
            if name in _LITERALS:
                stack.append(arg)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name == "GLOBAL":
                stack.append(_Name(*str(arg).split(" ", 1)))
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[arg] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[arg])
            elif name == "MARK":
                stack.append(_MARK)
            elif name == "TUPLE":
                at = len(stack) - 1 - stack[::-1].index(_MARK)
                stack[at:] = [tuple(stack[at + 1 :])]
            elif name in _TUPLES:
                stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
            elif name == "BINPERSID":
                stack[-1:] = [_Storage(stack[-1])]
            elif name == "REDUCE":
                stack[-2:] = [_Call(*stack[-2:])]
            elif name == "STOP":
                return stack[-1]
            elif name != "PROTO":
                return None
    except (ValueError, IndexError, KeyError, TypeError):  # of genops, and of a wrong stack
        return None
    return None


def _check_strides(numbers: int, offset: int, shape: Sequence[int], strides: Sequence[int]) -> None:
    """Raise RequestError unless all elements are in the storage, each at a place of its own."""
    if len(shape) != len(strides):
        raise _error(f"has {len(shape)} axes and {len(strides)} strides")
    if not all(0 <= number < MAX_ELEMENTS for number in (offset, *shape, *strides)):
        raise _error("has a shape or strides that no tensor has")
    span = 1  # elements from the first to the last of the axes so far
    for step, length in sorted(zip(strides, shape)):
        if length > 1:
            if step < span:
                raise _error("has elements that share memory: send tensor.contiguous()")
            span += step * (length - 1)
    if offset + span > numbers and 0 not in shape:
        raise _error(f"has the shape {list(shape)}, and its storage has {numbers} numbers")


def _error(problem: str) -> RequestError:
    return RequestError(f"prompt_embeds {problem}", param="prompt_embeds")
