"""Fills a model's parameters: from a checkpoint's tensors, or at random in a known way.

A layer is finished (packed, say) as soon as its last tensor has come, and its unpacked form freed,
so the peak is the model plus one layer. Each parameter owns its memory: nothing refers to the
checkpoint's file afterwards. Which tensor goes where was decided by `mapping.assign`.

On a GPU the copies are under way in threads (stage.py) while the next tensors are looked up, so a
layer is finished a little after its last tensor has come.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch
from torch import Tensor

from quire.errors import WeightError
from quire.weights.mapping import Holder, Part, Spread, Target, stored_shape, wanted_shape
from quire.weights.stage import Event, Stage

LATE = 8
"""Holders whose copies may be under way: enough to keep the bus busy, few enough to hold twice."""
BLOCK = 1_048_573
"""Random numbers drawn for a whole dummy model. Prime, so that rows of a matrix differ."""

H = TypeVar("H", bound=Holder)


class Filler(Generic[H]):
    """Puts tensors into holders, and calls `finish` on each holder that is complete."""

    def __init__(
        self,
        holders: Mapping[str, H],
        finish: Callable[[H], None],
        *,
        dtype: torch.dtype,
        device: torch.device,
        stage: Stage | None = None,
    ) -> None:
        """stage: how tensors get to a GPU; None: they are copied one after another."""
        self._holders = holders
        self._finish = finish
        self._dtype = dtype
        self._device = device
        self._open: dict[tuple[str, str], tuple[Tensor, int]] = {}  # value, parts still to come
        self._left = {name: len(holder.params()) for name, holder in holders.items()}
        self._stage = stage
        self._copies: dict[str, list[Future[Event]]] = {}  # under way, by holder
        self._late: deque[str] = deque()  # holders that have all but these

    def fill(self, targets: Mapping[str, Target], tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy every tensor to its target; those without one are skipped."""
        seen: set[str] = set()
        for name, tensor in tensors:
            if name in seen:
                raise WeightError(f"the checkpoint has {name} in two of its files; remove one")
            seen.add(name)
            if name in targets:
                self._copy(targets[name], tensor)
        while self._late:
            self._finish_late()
        if lost := sorted(targets.keys() - seen):
            raise WeightError(f"the checkpoint's files lack tensors its index names: {lost}")

    def draw(self, seed: int) -> None:
        """Fill everything with random values that keep activations finite."""
        block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed))
        scaled: dict[Spread, Tensor] = {}
        for name, holder in self._holders.items():
            for param in holder.params():
                shape = stored_shape(holder.layout(param))
                like = holder.spread(param)
                if like not in scaled:
                    values = block * like.std + like.mean
                    scaled[like] = values.to(device=self._device, dtype=self._dtype)
                dtype = holder.dtype(param) or self._dtype
                value = torch.empty(shape, dtype=dtype, device=self._device)
                start = zlib.crc32(f"{name}.{param}".encode()) % BLOCK
                _tile(value.view(-1), scaled[like], start)
                self._put(name, param, value)

    def _copy(self, target: Target, tensor: Tensor) -> None:
        holder = self._holders[target.layer]
        layout = holder.layout(target.param)
        if target.transpose:
            tensor = tensor.t()
        if layout[0].loose:
            tensor = tensor.reshape(-1).expand(wanted_shape(holder, target))
        key = (target.layer, target.param)
        value, left = self._open.pop(key, (None, len(layout)))
        if value is None:
            dtype = holder.dtype(target.param) or self._dtype
            value = torch.empty(stored_shape(layout), dtype=dtype, device=self._device)
        if target.part is not None:
            self._place(target.layer, value, layout[target.part], tensor)
            left -= 1
        else:
            pieces = holder.unbundle(target.param, tensor)
            for part, piece in zip(layout, pieces, strict=True):
                self._place(target.layer, value, part, piece)
            left = 0
        if left:
            self._open[key] = (value, left)
        else:
            self._put(*key, value)

    def _put(self, layer: str, param: str, value: Tensor) -> None:
        holder = self._holders[layer]
        holder.put(param, value)
        self._left[layer] -= 1
        if self._left[layer]:
            return
        if self._stage is None:
            self._finish(holder)
            return
        self._late.append(layer)
        while len(self._late) > LATE:
            self._finish_late()

    def _finish_late(self) -> None:
        layer = self._late.popleft()
        assert self._stage is not None, "only staged copies are late"
        self._stage.wait(self._copies.pop(layer, []))
        self._finish(self._holders[layer])

    def _place(self, layer: str, value: Tensor, part: Part, tensor: Tensor) -> None:
        """Copy the cut of one checkpoint tensor to its rows, converting dtype and device."""
        for axis, kept in enumerate(part.cut):
            tensor = tensor.narrow(axis, kept.start, len(kept))
        rows = value[part.start : part.start + len(part.cut[0])]
        if self._stage is None:
            rows.copy_(tensor)
        else:
            self._copies.setdefault(layer, []).extend(self._stage.copy(rows, tensor))


def _tile(flat: Tensor, values: Tensor, offset: int) -> None:
    """Fill flat with values over and over, the first time from `offset` on."""
    at = min(len(values) - offset, len(flat))
    flat[:at] = values[offset : offset + at]
    rest = flat[at:]
    whole = len(rest) // len(values) * len(values)
    rest[:whole].view(-1, len(values)).copy_(values.expand(whole // len(values), -1))
    rest[whole:] = values[: len(rest) - whole]
