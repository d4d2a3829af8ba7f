"""Op tape: records the native ops of a forward pass once and replays them with one call.

It is for the CPU what a CUDA graph is for a GPU: a decode step of a small model is a hundred ops of
a microsecond, and Python needs ten to issue each. A function runs as usual while it is recorded,
and each native call is also kept as bytes with raw pointers. So:

    inputs    are in tensors whose addresses stay; the caller writes them, then replays
    outputs   are valid after a replay; the next replay of ANY tape overwrites them
    between   intermediate results are in an arena, reused as tensors die, shared by all tapes

Any torch op that computes would be missing from the tape: recording then fails, naming it, and
leaves nothing behind. What a native op cannot do (a collective among ranks) is a Python function
that replays call between native ops: `on_replay`. Only the recording thread is recorded. One tape
runs at a time.

A tape has the sizes of its recording. A sized tape has any sizes up to those: the function is
recorded at several, with each result at the same address, and every number in the calls has to be
a constant plus so much per row. Replays write these numbers first.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import groupby
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.errors import QuireError
from quire.kernels.native import library

R = TypeVar("R")
Sizes = tuple[int, ...]
"""What a function may be recorded at several values of: of tokens, of sequences."""
Fields = npt.NDArray[np.int64]

CHUNK_BYTES = 1 << 22
ALIGN = 64

_VIEW_OPS = frozenset(
    {
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "as_strided",
        "detach",
        "diagonal",
        "expand",
        "narrow",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
        "view_as",
    }
)
"""aten ops that return a view and compute nothing."""


class NotRecordableError(QuireError):
    """Raised when a function runs an op that a tape cannot repeat. The message names it."""


def refuse_recording(what: str) -> None:
    """Raises: NotRecordableError if this thread records a tape: `what` would be missing from it."""
    if library.active_recording is not None and library.thread_recording() is not None:
        raise NotRecordableError(f"{what} cannot be recorded on a tape")


@cache
def _chars(size: int) -> Any:
    """Return the array type of so many bytes. Made once: types are never freed after a freeze."""
    return ctypes.c_char * size


class Arena:
    """Memory for intermediate results: chunks that never move, cut first-fit.

    Invariant: every byte of a chunk is in exactly one free span or one live block. A block lives
    as long as the storage of its tensor, views included.
    """

    def __init__(self) -> None:
        self._chunks: list[Any] = []
        self._free_spans: list[tuple[int, int]] = []  # (address, bytes), by address, never adjacent
        self.allocated_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return sum(ctypes.sizeof(chunk) for chunk in self._chunks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        size = -(-count * dtype.itemsize // ALIGN) * ALIGN
        address = self._allocate(size)
        # torch keeps this object for as long as the storage lives, so its end is the block's end.
        block = _chars(size).from_address(address)
        weakref.finalize(block, self._release, address, size).atexit = False
        self.allocated_bytes += size
        return torch.frombuffer(block, dtype=dtype, count=count).view(*shape)

    def _allocate(self, size: int) -> int:
        for i, (address, free) in enumerate(self._free_spans):
            if free >= size:
                if free == size:
                    del self._free_spans[i]
                else:
                    self._free_spans[i] = (address + size, free - size)
                return address
        self._add_chunk(size)
        return self._allocate(size)

    def _add_chunk(self, size: int) -> None:
        size = max(CHUNK_BYTES, size) + ALIGN
        chunk = _chars(size)()
        self._chunks.append(chunk)
        start = -(-ctypes.addressof(chunk) // ALIGN) * ALIGN
        usable = (ctypes.addressof(chunk) + size - start) // ALIGN * ALIGN
        bisect.insort(self._free_spans, (start, usable))

    def _release(self, address: int, size: int) -> None:
        self.allocated_bytes -= size
        i = bisect.bisect(self._free_spans, (address, 0))
        if i < len(self._free_spans) and address + size == self._free_spans[i][0]:
            size += self._free_spans.pop(i)[1]
        if i and sum(self._free_spans[i - 1]) == address:
            address, before = self._free_spans[i - 1]
            self._free_spans[i - 1] = (address, before + size)
        else:
            self._free_spans.insert(i, (address, size))


class _ComputeOpGuard(TorchDispatchMode):
    """Refuse every torch op that is not a change of view."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first dispatch imports torch._dynamo, which takes a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _VIEW_OPS:
            return func(*args, **kwargs)
        with self:  # under inference_mode flatten and the like arrive whole: dispatch their parts
            out = func.decompose(*args, **kwargs)
        if out is NotImplemented:
            raise NotRecordableError(f"torch op {func} in the forward pass cannot be recorded")
        return out


class _TapeRecording:
    """The library's recorder: steps so far, and the memory of results."""

    def __init__(self, arena: Arena) -> None:
        self.thread = threading.get_ident()
        self.arena = arena
        self.steps: list[bytes | Callable[[], object]] = []

    def append(self, step: bytes) -> None:
        self.steps.append(step)

    def call(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor:
        out = self.empty(shape, dtype)
        with torch.utils._python_dispatch._disable_current_modes():
            views = [_unowned_view(one) for one in (out, *inputs)]
        self.steps.append(partial(_call_into, function, *views))
        return out

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            return self.arena.empty(shape, dtype)


class _SizedRecording(_TapeRecording):
    """Of one of several sizes. The first one has most, and chooses the places of results."""

    def __init__(self, arena: Arena, first: _SizedRecording | None = None) -> None:
        """first: the first recording; None: this is it."""
        super().__init__(arena)
        self._first = first
        self._places: list[tuple[int, int]] = []  # address and bytes of each result
        self._results = 0

    def call(self, *_: Any) -> Tensor:
        raise NotRecordableError("a function between native ops has one size")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._first is None:
            found = super().empty(shape, dtype)
            self._places.append((found.data_ptr(), found.nbytes))
            return found
        count, places = math.prod(shape), self._first._places
        address, most = places[self._results] if self._results < len(places) else (0, 0)
        self._results += 1
        if not 0 < count * dtype.itemsize <= most:
            raise NotRecordableError("the results of a step differ with its size")
        block = _chars(-(-most // ALIGN) * ALIGN).from_address(address)  # a type that is there
        with torch.utils._python_dispatch._disable_current_modes():
            return torch.frombuffer(block, dtype=dtype, count=count).view(*shape)


class _SizedProgram:
    """Numbers of a program's calls, as functions of sizes: a constant and so much per size."""

    def __init__(self, probes: Sequence[Sizes], recorded: Sequence[Sequence[bytes]]) -> None:
        """probes: the largest sizes, then for each size one that differs from them in it alone,
        then one that differs in all. recorded: the calls of each.

        Raises: NotRecordableError if a number is no such function.
        """
        heads = [[step[:16] for step in steps] for steps in recorded]
        if any(one != heads[0] for one in heads):
            raise NotRecordableError("the ops of a step differ with its size")
        values = [np.frombuffer(b"".join(steps), np.int64) for steps in recorded]
        most = probes[0]
        slopes = np.stack(
            [
                (values[0] - found) // (most[axis] - other[axis])
                for axis, (other, found) in enumerate(zip(probes[1:-1], values[1:-1], strict=True))
            ]
        )
        self._constants: Fields = values[0] - np.array(most) @ slopes
        self._at = np.flatnonzero(slopes.any(0))
        self._moving, self._slopes = self._constants[self._at], slopes[:, self._at]
        for sizes, found in zip(probes, values, strict=True):
            if not np.array_equal(self.at(sizes), found):
                raise NotRecordableError("a number in a step is no multiple of its sizes")

    def at(self, sizes: Sizes) -> Fields:
        """The program for these sizes."""
        values = self._constants.copy()
        self.write(values, sizes)
        return values

    def write(self, values: Fields, sizes: Sizes) -> None:
        """Set what differs with the sizes in a program for others."""
        values[self._at] = self._moving + np.array(sizes) @ self._slopes


class SizedTape(Generic[R]):
    """A function recorded for any sizes from 1 to `most`.

    Keeps the function, and with it the weights, caches and inputs it closes over, alive.
    """

    def __init__(
        self, function: Callable[[Sizes], R], most: Sizes, result: R, program: _SizedProgram
    ) -> None:
        """result: of the recording at `most`."""
        self.function = function
        self._most = most
        self._result = result
        self._program = program
        found = library.load_library()
        assert found is not None
        values = program.at(most)
        memory: Any = _chars(values.nbytes)()
        self._values = np.frombuffer(memory, np.int64)
        self._values[:] = values
        bad = found.check(memory, values.nbytes)
        assert bad == 0, f"step {bad - 1} of the tape is malformed"
        self._run = partial(found.run, memory, values.nbytes)

    def replay(self, sizes: Sizes) -> R:
        """Run the recorded ops at these sizes. Returns the result of `most`, of which what belongs
        to these sizes is computed."""
        assert all(0 < one <= most for one, most in zip(sizes, self._most, strict=True)), sizes
        self._program.write(self._values, sizes)
        self._run()
        return self._result


class OpTape(Generic[R]):
    """A recorded function. replay() returns its return value, and overwrites that of others.

    Keeps the function, and with it the weights, caches and inputs it closes over, alive.
    """

    def __init__(
        self,
        function: Callable[[], R],
        steps: Sequence[bytes | Callable[[], object]],
        result: R,
    ) -> None:
        self.function = function
        self._result = result
        self.num_ops = len(steps)
        self._calls: list[Callable[[], object]] = []  # programs of native ops, and what is between
        found = library.load_library()
        assert found is not None
        for is_native, run in groupby(steps, lambda step: isinstance(step, bytes)):
            if not is_native:
                self._calls += run  # type: ignore[arg-type]
                continue
            program = b"".join(run)  # type: ignore[arg-type]
            bad = found.check(program, len(program))
            assert bad == 0, f"step {bad - 1} of a program of the tape is malformed"
            self._calls.append(partial(found.run, program, len(program)))

    def replay(self) -> R:
        """Run the recorded ops on the current values of their inputs."""
        for call in self._calls:
            call()
        return self._result


class TapeRecorder:
    """Records tapes that share one arena: outputs of one are valid until the next runs."""

    def __init__(self) -> None:
        self.arena = Arena()

    def record(self, function: Callable[[], R]) -> OpTape[R]:
        """Call `function` and keep its ops: none is run. Its tensors' addresses must not change
        afterwards.

        Raises: NotRecordableError.
        """
        if not library.available():
            raise NotRecordableError("there are no native kernels on this machine")
        recording = _TapeRecording(self.arena)
        with _recording_installed(recording), _ComputeOpGuard():
            result = function()
        return OpTape(function, recording.steps, result)

    def record_sized(self, function: Callable[[Sizes], R], most: Sizes) -> SizedTape[R]:
        """Call `function` at several sizes, at `most` first, and keep its ops: none is run.

        most: at least 3 each. A function that chooses other ops between two sizes is found out if
        it does so at the smallest or the largest.

        Raises: NotRecordableError.
        """
        if not library.available():
            raise NotRecordableError("there are no native kernels on this machine")
        changed = [(*most[:i], max(2, one // 2 - 1), *most[i + 1 :]) for i, one in enumerate(most)]
        probes = [most, *changed, tuple(2 for _ in most)]
        first = _SizedRecording(self.arena)
        recordings = [first, *(_SizedRecording(self.arena, first) for _ in probes[1:])]
        results = []
        for sizes, recording in zip(probes, recordings, strict=True):
            with _recording_installed(recording), _ComputeOpGuard():
                results.append(function(sizes))
        steps = [[one for one in found.steps if isinstance(one, bytes)] for found in recordings]
        return SizedTape(function, most, results[0], _SizedProgram(probes, steps))


def on_replay(
    function: Callable[..., Tensor],
    *inputs: Tensor,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return function(*inputs). While this thread records: have each replay of the tape call it.

    shape, dtype: of the result; None: those of the first input. It is copied, so it may share
    memory with an input.
    """
    tape = library.thread_recording()
    if tape is None:
        return function(*inputs)
    first = inputs[0]
    return tape.call(
        function, inputs, first.shape if shape is None else shape, dtype or first.dtype
    )


def _call_into(function: Callable[..., Tensor], out: Tensor, *inputs: Tensor) -> None:
    out.copy_(function(*inputs))


def _unowned_view(tensor: Tensor) -> Tensor:
    """Return the same memory without a hold on it, so that the arena reuses it as usual."""
    if tensor.numel() == 0:
        return tensor
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    memory = _chars(span * tensor.itemsize).from_address(tensor.data_ptr())
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=span)
    return flat.as_strided(tensor.shape, tensor.stride())


@contextmanager
def _recording_installed(recording: _TapeRecording) -> Iterator[None]:
    assert library.active_recording is None, "a recording is in progress"
    library.active_recording = recording
    try:
        yield
    finally:
        library.active_recording = None
