"""Slot loader: copies adapters to slots of a GPU on a stream of its own, beside the steps.

    step n        reads slot s                                      compute stream
    load          waits for n, fills slot s                         side stream, one launch
    step n + 1    waits for the load                                compute stream

Steps before n + 1 that do not read the slot run meanwhile. No call waits on the host.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from itertools import accumulate

import torch
from torch import Tensor

from quire.kernels.formats.lora_bank import SlotCopy
from quire.kernels.gpu.lora.slot_copy import CopyTable, build_copy_table, copy_to_slot
from quire.weights.adapters.adapter import PackedTensors
from quire.weights.adapters.packed import aligned, pinned_bytes

MAX_PLANS = 64
"""Kinds of adapters whose copies are remembered: by ranks and layers."""


_LoadPlan = tuple[tuple["Tensor | None", CopyTable], ...]
"""Buffers and what is copied from each; None: the memory of the adapter itself."""


class SlotLoader:
    """Of one device. Called by the thread that launches steps, under their stream."""

    def __init__(
        self, device: torch.device, allocate: Callable[[int], Tensor] = pinned_bytes
    ) -> None:
        """allocate: makes host memory that the device can read."""
        self._device, self._allocate = device, allocate
        self._stream = torch.cuda.Stream(device)
        self._plans: OrderedDict[bytes, _LoadPlan] = OrderedDict()
        self._reading: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
        self._read_by_step: frozenset[int] = frozenset()  # slots, by the last step that has any
        self._unused_since: dict[int, torch.cuda.Event] = {}  # slot -> the end of its last step

    def begin_step(self, slots: Collection[int], filled: Collection[int]) -> None:
        """Note which slots the next step reads, before it is launched. filled: those that load()
        fills for it."""
        left = self._read_by_step.difference(slots).union(self._read_by_step.intersection(filled))
        if left:
            event = torch.cuda.Event()
            event.record()
            self._unused_since.update(dict.fromkeys(left, event))
        self._read_by_step = frozenset(slots)

    def load(
        self,
        slot: int,
        copies: Callable[[], Iterable[SlotCopy]],
        packed: PackedTensors | None,
        reset: Callable[[int], None] | None = None,
    ) -> None:
        """Fill a slot; kernels that the current stream launches from now on find it filled.

        copies: of the adapter, called if its layout is new. reset: launches what comes before.
        """
        steps = torch.cuda.current_stream(self._device)
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            plan = self._find_plan(copies, packed)
            last_use = self._unused_since.pop(slot, None)
            if last_use is not None:
                self._stream.wait_event(last_use)
            if reset is not None:
                reset(slot)
            buffers = []
            for own, table in plan:
                buffer = own if own is not None else packed.buffer  # type: ignore[union-attr]
                copy_to_slot(buffer, table, slot)
                buffers.append(buffer)
            done.record(self._stream)
        steps.wait_event(done)
        self._reading.append((done, buffers))
        while self._reading and self._reading[0][0].query():
            self._reading.popleft()

    def _find_plan(
        self, copies: Callable[[], Iterable[SlotCopy]], packed: PackedTensors | None
    ) -> _LoadPlan:
        if packed is None:  # of a rank in a process of its own: it copies its share only
            return (self._gather(copies()),)
        plan = self._plans.pop(packed.layout, None)
        if plan is None:
            plan = self._plan_packed(copies(), packed.buffer)
        self._plans[packed.layout] = plan
        if len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _plan_packed(self, copies: Iterable[SlotCopy], buffer: Tensor) -> _LoadPlan:
        """Plan an adapter. What is not in its memory is the same for all of its layout."""
        begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        places, constants = [], []
        for one in copies:
            if begin <= one.source.data_ptr() < end:
                assert one.source.is_contiguous(), "a packed adapter is not cut"
                places.append((one.source.data_ptr() - begin, one.place))
            else:
                constants.append(one)
        return (None, build_copy_table(places, self._device)), self._gather(constants)

    def _gather(self, copies: Iterable[SlotCopy]) -> tuple[Tensor, CopyTable]:
        """Copy the sources to one buffer."""
        copies = list(copies)
        sizes = [aligned(one.source.nbytes) for one in copies]
        buffer = self._allocate(sum(sizes))
        places = []
        for at, (place, source) in zip(accumulate(sizes, initial=0), copies):
            own = buffer[at : at + source.nbytes].view(source.dtype).view(source.shape)
            own.copy_(source)
            places.append((at, place))
        return buffer, build_copy_table(places, self._device)
