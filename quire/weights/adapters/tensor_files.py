"""Tensors of adapter files: headers first, then one tensor after another, into memory of its own.

Files are read, not mapped: one that is cut short while a server reads it is an error, not the end
of the process.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.errors import ConfigError, WeightError
from quire.weights.adapters.folder import FILES, require_regular
from quire.weights.adapters.packed import bytes_of
from quire.weights.files import dtype_name, iterate_pickled
from quire.weights.headers import DTYPE_NAMES, PLAIN_DTYPES, TensorHeader, read_places

MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 1 << 18
"""All experts of the largest models have a third of that."""

MAX_BUFFERS = 512
"""Of one call that reads. The system allows 1,024."""

DTYPES = {theirs: getattr(torch, ours) for ours, theirs in DTYPE_NAMES.items()}


Bytes = Any
"""A NumPy array, [n] uint8, n > 0."""


class AdapterTensors(NamedTuple):
    """The tensors of an adapter, as they are stored.

    read: returns one by its name, contiguous. read_into: fills the bytes of some, by their names.
    Any thread may call both.
    """

    headers: Mapping[str, TensorHeader]
    read: Callable[[str], Tensor]
    read_into: Callable[[Sequence[tuple[str, Bytes]]], None]

    @classmethod
    def one_by_one(
        cls, headers: Mapping[str, TensorHeader], read: Callable[[str], Tensor]
    ) -> AdapterTensors:
        """Tensors that can only be made one by one."""

        def read_into(wanted: Sequence[tuple[str, Bytes]]) -> None:
            for name, room in wanted:
                room[:] = bytes_of(read(name))

        return cls(headers, read, read_into)


def open_tensors(folder: Path, max_bytes: int) -> AdapterTensors:
    """Read the headers of a folder's tensors. max_bytes: of all, in the dtype of the files.

    Raises: WeightError, ConfigError (there is no file).
    """
    path = next((folder / name for name in FILES if (folder / name).exists()), None)
    if path is None:
        raise ConfigError(f"{folder} has no {FILES[0]} (nor {' or '.join(FILES[1:])})")
    require_regular(path)
    if (size := path.stat().st_size) > max_bytes + MAX_HEADER_BYTES:
        raise WeightError(f"{path} has {size} bytes; adapters may have {max_bytes}")
    opened = _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)
    check_tensors(path, opened)
    return opened


def check_tensors(path: Path, opened: AdapterTensors) -> None:
    """Raise WeightError for too many tensors, and for others than of floats of 16 or more bits."""
    if len(opened.headers) > MAX_TENSORS:
        raise WeightError(f"{path} has {len(opened.headers)} tensors; the maximum is {MAX_TENSORS}")
    for name, header in opened.headers.items():
        if header.dtype not in PLAIN_DTYPES:
            raise WeightError(
                f"{path}: {name!r:.200} is {header.dtype}; quire reads adapters in "
                f"{', '.join(sorted(PLAIN_DTYPES))}"
            )


def _open_safetensors(path: Path) -> AdapterTensors:
    places = read_places(path, MAX_HEADER_BYTES)

    def read(name: str) -> Tensor:
        header, begin = places[name]
        return read_tensor(path, begin, header.shape, header.dtype)

    def read_into(wanted: Sequence[tuple[str, Bytes]]) -> None:
        read_ranges(path, ((places[name][1], room) for name, room in wanted))

    return AdapterTensors({name: header for name, (header, _) in places.items()}, read, read_into)


def read_tensor(path: Path, begin: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Read the tensor at a byte of a file. Raises WeightError."""
    made = torch.empty(shape, dtype=DTYPES[dtype])
    if made.numel():
        read_ranges(path, [(begin, bytes_of(made))])
    return made


def read_ranges(path: Path, wanted: Iterable[tuple[int, Bytes]]) -> None:
    """Fill arrays with ranges of a file, each from a byte on. Those that follow one another in the
    file are read by one call. Raises WeightError."""
    rooms: list[Bytes] = []
    begin = end = 0
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for at, room in sorted(wanted, key=lambda one: one[0]):
            if at != end or len(rooms) == MAX_BUFFERS:
                _read_range(file, path, begin, rooms)
                rooms, begin = [], at
            rooms.append(room)
            end = at + len(room)
        _read_range(file, path, begin, rooms)
    finally:
        os.close(file)


def _read_range(file: int, path: Path, at: int, rooms: list[Bytes]) -> None:
    while rooms:
        count = os.preadv(file, rooms, at)
        if not count:
            raise WeightError(f"{path} was cut short while it was read; load it again")
        at += count
        while rooms and count >= len(rooms[0]):
            count -= len(rooms.pop(0))
        if count:
            rooms[0] = rooms[0][count:]


def _open_pickle(path: Path) -> AdapterTensors:
    _check_archive(path)
    tensors = dict(iterate_pickled(path, mapped=False))
    headers = {
        name: TensorHeader(dtype_name(one.dtype), tuple(one.shape), path)
        for name, one in tensors.items()
    }
    return AdapterTensors.one_by_one(
        headers, lambda name: tensors[name].detach().clone().contiguous()
    )


def _check_archive(path: Path) -> None:
    """Refuse what takes more memory than the file has bytes: other pickles, compressed archives."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise WeightError(
            f"{path} is not an archive of torch.save: {error}; save the adapter as safetensors"
        ) from error
    total = sum(one.file_size for one in members)
    if any(one.compress_type for one in members) or total > path.stat().st_size:
        raise WeightError(
            f"{path} is compressed, which torch.save does not do; save the adapter as safetensors"
        )
