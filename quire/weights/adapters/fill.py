"""Fills the memory of an adapter from its files, in threads.

    plans -> layout of one buffer -> chunks of it: read, scale and convert, transpose, check, hash

A tensor that is stored as it will be is read to its place. A chunk is done by few calls, each for
many of its tensors: between calls a thread needs the interpreter's lock, for which all others and
the engine's thread wait too.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.errors import WeightError
from quire.platform import cpu
from quire.weights.adapters import packed
from quire.weights.adapters.adapter import Delta
from quire.weights.adapters.packed import Allocate, PackedLayout, TensorSpec, bytes_of
from quire.weights.adapters.tensor_files import DTYPES, AdapterTensors, Bytes

CHUNK = 1 << 21
"""Bytes that a thread fills before it hashes them: by few calls, and they are in a cache of its
processor then. Digests depend on it."""

SERIAL = 1 << 14
"""Numbers that torch changes in the thread that calls it. Of more it gives each of these threads a
team of its own, as large as the machine, whose members wait for one another."""

MAX_NAME = 160
"""Characters of a stranger's name in a message."""

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Parts = dict[int, Delta]
Words = Any
"""A NumPy array of integers."""


class DeltaSpec(NamedTuple):
    """A delta whose tensors are to be filled."""

    kind: type[Delta]
    tensors: dict[str, TensorSpec]


class Move(NamedTuple):
    """A tensor of the file, and the field of a part that it fills, in the field's dtype.

    scale: what it is multiplied by, in float32. turned: it is stored transposed. expert: it fills
    the first ranks of this one.
    """

    name: str
    part: int
    field: str
    scale: float | None = None
    turned: bool = False
    expert: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DeltaPlan:
    """How deltas of one layer are made: by moves, or by a function whose tensors are copied.

    cleared: moves do not fill all of it, and the rest is zero.
    """

    layer: str
    parts: dict[int, DeltaSpec]
    moves: Sequence[Move] = ()
    make: Callable[[], Parts] | None = None
    cleared: bool = False

    def specs(self) -> Iterator[TensorSpec]:
        for spec in self.parts.values():
            yield from spec.tensors.values()


class Filled(NamedTuple):
    """What fill() returns. digest: of all tensors and their places. layout: of the places."""

    deltas: dict[str, Parts]
    digest: bytes
    layout: bytes
    buffer: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """A range of the buffer, and the plans that fill it."""

    begin: int
    plans: list[DeltaPlan] = field(default_factory=list)


def fill(plans: Sequence[DeltaPlan], source: AdapterTensors, allocate: Allocate) -> Filled:
    """Read all tensors. Raises WeightError for NaN and infinity, and if the file is cut short."""
    layout, chunks = PackedLayout(), [_Chunk(0)]
    for plan in sorted(plans, key=lambda one: (one.layer, min(one.parts))):
        if layout.size - chunks[-1].begin >= CHUNK:
            chunks.append(_Chunk(layout.size))
        for part, spec in sorted(plan.parts.items()):
            layout.add(plan.layer, part, spec.kind, spec.tensors)
        chunks[-1].plans.append(plan)
    ends = [*(one.begin for one in chunks[1:]), layout.size]
    buffer = allocate(layout.size)
    filler = _ChunkFiller(source, layout, buffer)
    with ThreadPoolExecutor(num_readers(len(chunks)), "read-adapter") as pool:
        digests = list(pool.map(filler.fill, chunks, ends))
    deltas: dict[str, Parts] = {}
    for plan in plans:
        for part, spec in plan.parts.items():
            views = {name: layout.view(buffer, one) for name, one in spec.tensors.items()}
            deltas.setdefault(plan.layer, {})[part] = spec.kind(**views)
    digest = hashlib.sha256(layout.digest() + b"".join(digests)).digest()
    return Filled(deltas, digest, layout.digest(), buffer)


def num_readers(most: int) -> int:
    """Threads for so many pieces of work."""
    return max(1, min(packed.READERS, cpu.available_cores(), most))


class _Span(NamedTuple):
    """A tensor in memory of bytes. NumPy makes views of it in a fraction of torch's time."""

    memory: Bytes
    at: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> Bytes:
        return self.memory[self.at : self.at + math.prod(self.shape) * self.dtype.itemsize]

    @property
    def words(self) -> Words:
        """Its bits as signed integers."""
        return self.bytes.view(f"i{self.dtype.itemsize}").reshape(self.shape)

    @property
    def tensor(self) -> Tensor:
        return torch.from_numpy(self.bytes).view(self.dtype).view(self.shape)


class _ChunkFiller:
    """Fills chunks of one buffer, in any thread."""

    def __init__(self, source: AdapterTensors, layout: PackedLayout, buffer: Tensor) -> None:
        self._source, self._layout = source, layout
        self._buffer, self._bytes = buffer, buffer.numpy()
        self._rooms = threading.local()  # each thread's last, as fresh memory is slow

    def fill(self, chunk: _Chunk, end: int) -> bytes:
        """Fill a chunk, which ends at this byte. Returns its hash."""
        for plan in chunk.plans:
            self._clear(plan)
        self._move([(plan, move) for plan in chunk.plans for move in plan.moves])
        for plan in chunk.plans:
            if plan.make is not None:
                self._copy(plan, plan.make())
        self._check(chunk, end)
        return hashlib.sha256(self._bytes[chunk.begin : end].data).digest()

    def _clear(self, plan: DeltaPlan) -> None:
        """Clear what is hashed and not filled."""
        for spec in plan.specs():
            at = self._layout.place(spec)
            end = at + spec.nbytes
            self._bytes[at if plan.cleared else end : at + packed.aligned(spec.nbytes)] = 0

    def _move(self, moves: list[tuple[DeltaPlan, Move]]) -> None:
        """Read tensors to their places, or aside if they are changed."""
        targets = [self._target(plan, move) for plan, move in moves]
        headers = [self._source.headers[move.name] for _, move in moves]
        sizes = [
            packed.aligned(header.nbytes)
            if move.turned or DTYPES[header.dtype] != target.dtype
            else 0
            for (_, move), header, target in zip(moves, headers, targets, strict=True)
        ]
        room, at = self._room(sum(sizes)), 0
        reads, late = [], []
        scaled: defaultdict[float, list[Tensor]] = defaultdict(list)
        for (_, move), header, target, size in zip(moves, headers, targets, sizes, strict=True):
            raw = target
            if size:
                raw = _Span(room, at, header.shape, DTYPES[header.dtype])
                late.append((move, raw, target))
                at += size
            if header.nbytes:
                reads.append((move.name, raw.bytes))
            if move.scale not in (None, 1) and raw.dtype in (target.dtype, torch.float32):
                scaled[move.scale] += raw.tensor.view(-1).split(SERIAL)
        self._source.read_into(reads)
        for scale, pieces in scaled.items():
            _scale(pieces, scale)
        for move, raw, target in late:
            words = raw.words
            if raw.dtype != target.dtype:
                words = _words(_converted(raw.tensor, target.dtype, move.scale))
            target.words[:] = words.T if move.turned else words.reshape(target.shape)

    def _room(self, size: int) -> Bytes:
        """Memory for so many bytes, until this thread asks again."""
        room = getattr(self._rooms, "last", None)
        if room is None or len(room) < size:
            room = self._rooms.last = np.empty(size, np.uint8)
        return room

    def _target(self, plan: DeltaPlan, move: Move) -> _Span:
        """What a move fills."""
        spec = plan.parts[move.part].tensors[move.field]
        at, shape = self._layout.place(spec), spec.shape
        if move.expert is not None:
            at += move.expert * (spec.nbytes // shape[0])
            ranks = self._source.headers[move.name].shape[1 if move.turned else 0]
            shape = (ranks, shape[2])
        return _Span(self._bytes, at, shape, spec.dtype)

    def _copy(self, plan: DeltaPlan, made: Parts) -> None:
        """Copy what a function has made."""
        copied = set()
        for part, spec in plan.parts.items():
            for name, one in spec.tensors.items():
                if id(one) not in copied:
                    copied.add(id(one))
                    target = self._layout.view(self._buffer, one)
                    bytes_of(target)[:] = bytes_of(getattr(made[part], name).contiguous())

    def _check(self, chunk: _Chunk, end: int) -> None:
        """Raise WeightError for values that are not finite."""
        dtypes = {spec.dtype for plan in chunk.plans for spec in plan.specs()}
        if len(dtypes) == 1:  # one look at all of it
            (dtype,) = dtypes
            if is_finite(self._buffer[chunk.begin : end].view(dtype)):
                return
        for plan in chunk.plans:
            for move in plan.moves:
                target = self._target(plan, move)
                if not is_finite(target.tensor):
                    stored = is_finite(self._source.read(move.name))
                    where = f" in {target.dtype}" if stored else ""
                    message = f"{short(move.name)} has values that are NaN or infinite{where}"
                    raise WeightError(message)


def _converted(raw: Tensor, dtype: torch.dtype, scale: float | None) -> Tensor:
    """A tensor in another dtype. scale: what it is multiplied by before, unless it is float32, and
    was multiplied already."""
    if scale not in (None, 1) and raw.dtype != torch.float32:
        raw = _copied(raw, torch.float32)
        _scale([*raw.view(-1).split(SERIAL)], scale)
    return raw if raw.dtype == dtype else _copied(raw, dtype)


def _scale(pieces: list[Tensor], scale: float) -> None:
    """Multiply in float32 whatever the dtype is, and round once. (By a number instead of a tensor
    this call would multiply in the dtype.)"""
    torch._foreach_mul_(pieces, torch.tensor(scale, dtype=torch.float64))


def _copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    made = torch.empty_like(tensor, dtype=dtype)
    torch._foreach_copy_(made.view(-1).split(SERIAL), tensor.view(-1).split(SERIAL))
    return made


def transposed(matrix: Tensor) -> Tensor:
    """A transposed copy. Numpy takes a third of torch's time for narrow matrices."""
    return torch.from_numpy(_words(matrix).T.copy()).view(matrix.dtype)


def is_finite(tensor: Tensor) -> bool:
    """Whether all values of a contiguous tensor are finite.

    Numbers of the same bits as integers are then below infinity: as signed integers those without
    the sign, as unsigned ones those with it. NaN is above.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    words = _words(tensor)
    most = torch.tensor(torch.finfo(tensor.dtype).max, dtype=tensor.dtype)
    largest = int(_words(most.view(1))[0])
    unsigned = words.view(f"u{words.itemsize}")
    return bool(words.max() <= largest and unsigned.max() <= largest + _sign(words))


def short(name: str) -> str:
    """A stranger's name for a message: one line, not long."""
    return repr(name) if len(name) <= MAX_NAME else f"{name[:MAX_NAME]!r}..."


def _words(tensor: Tensor) -> Words:
    """The bits of a contiguous tensor as signed integers."""
    return tensor.view(_WORDS[tensor.element_size()]).numpy()


def _sign(words: Words) -> int:
    """The sign's bit."""
    return 1 << (8 * words.itemsize - 1)
