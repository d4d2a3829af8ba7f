"""Fills a model's parameters, from a checkpoint's tensors or with dummy values of a seed.

A layer is finished (packed, say) when its last tensor has arrived, and its unpacked form freed,
so the peak is the model plus one layer. Each parameter owns its memory: nothing refers to the
checkpoint's file afterwards. `mapping.assign_tensors` has decided which tensor goes where.

On a GPU the copies run in threads (gpu_loader.py) while the next tensors are looked up,
so a layer is finished a little after its last tensor has come.
"""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch
from torch import Tensor

from quire.errors import WeightError
from quire.weights.gpu_loader import CudaEvent, GpuLoader
from quire.weights.mapping import (
    RANDOM_BITS,
    InitSpec,
    ParamOwner,
    ParamTarget,
    WeightShard,
    checkpoint_shape,
    stored_shape,
)

MAX_AWAITING_LAYERS = 8
"""Layers with running copies: enough to keep the bus busy, few enough to hold twice."""
DUMMY_BLOCK_SIZE = 1_048_573
"""Random numbers drawn for a whole dummy model. Prime, so that rows of a matrix differ."""

H = TypeVar("H", bound=ParamOwner)


class WeightLoader(Generic[H]):
    """Puts tensors into modules, and calls `finish` on each that is complete."""

    def __init__(
        self,
        holders: Mapping[str, H],
        finish: Callable[[H], None],
        *,
        dtype: torch.dtype,
        device: torch.device,
        stage: GpuLoader | None = None,
    ) -> None:
        """stage: how tensors get to a GPU; None: they are copied one after another."""
        self._owners = holders
        self._process_layer = finish
        self._dtype = dtype
        self._device = device
        self._incomplete: dict[
            tuple[str, str], tuple[Tensor, int]
        ] = {}  # value, parts still to come
        self._params_left = {name: len(holder.param_names()) for name, holder in holders.items()}
        self._gpu_loader = stage
        self._copies: dict[str, list[Future[CudaEvent]]] = {}  # under way, by layer
        self._awaiting_copies: deque[str] = deque()  # layers that have all but these

    def load(
        self, targets: Mapping[str, ParamTarget], tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Copy every tensor to its target; those without one are skipped."""
        seen: set[str] = set()
        for name, tensor in tensors:
            if name in seen:
                raise WeightError(f"the checkpoint has {name} in two of its files; remove one")
            seen.add(name)
            if name in targets:
                self._load_tensor(name, targets[name], tensor)
        while self._awaiting_copies:
            self._process_oldest()
        if lost := sorted(targets.keys() - seen):
            raise WeightError(f"the checkpoint's files lack tensors its index names: {lost}")

    def fill_dummy(self, seed: int) -> None:
        """Fill everything with random values that keep activations finite."""
        block = _random_block(seed)
        scaled: dict[InitSpec, Tensor] = {}
        for name, holder in self._owners.items():
            for param in holder.param_names():
                shape = stored_shape(holder.layout(param))
                like = holder.init_spec(param)
                if like is RANDOM_BITS and like not in scaled:
                    scaled[like] = _random_bytes(seed).to(self._device)
                elif like not in scaled:
                    values = block * like.std + like.mean
                    scaled[like] = values.to(device=self._device, dtype=self._dtype)
                dtype = holder.dtype(param) or self._dtype
                value = torch.empty(shape, dtype=dtype, device=self._device)
                start = zlib.crc32(f"{name}.{param}".encode()) % DUMMY_BLOCK_SIZE
                flat = value.view(-1)
                flat = flat.view(torch.uint8) if like is RANDOM_BITS else flat
                _fill_tiled(flat, scaled[like], start)
                holder.set_param(param, value)
                del value  # the layer alone has it, and may free it
                self._count_param(name)

    def _load_tensor(self, name: str, target: ParamTarget, tensor: Tensor) -> None:
        holder = self._owners[target.layer]
        layout = holder.layout(target.param)
        if (stored := holder.dtype(target.param)) is not None:
            tensor = _as_stored(name, tensor, stored)
        if target.transpose or layout[0].transposed:
            tensor = tensor.t()
        if layout[0].broadcastable:
            shape = checkpoint_shape(holder, target)
            tensor = tensor.expand(shape) if tensor.numel() == 1 else tensor.reshape(shape)
        key = (target.layer, target.param)
        value, left = self._incomplete.pop(key, (None, len(layout)))
        if value is None:
            dtype = holder.dtype(target.param) or self._dtype
            value = torch.empty(stored_shape(layout), dtype=dtype, device=self._device)
        if target.shard is not None:
            self._copy_shard(target.layer, value, layout[target.shard], tensor)
            left -= 1
        else:
            pieces = holder.split_fused(target.param, tensor)
            for part, piece in zip(layout, pieces, strict=True):
                self._copy_shard(target.layer, value, part, piece)
            left = 0
        if left:
            self._incomplete[key] = (value, left)
        else:
            holder.set_param(target.param, value)
            del value  # the layer alone has it, and may free it
            self._count_param(target.layer)

    def _count_param(self, layer: str) -> None:
        """Count a parameter that the layer has now, and process the layer after its last."""
        self._params_left[layer] -= 1
        if self._params_left[layer]:
            return
        if self._gpu_loader is None:
            self._process_layer(self._owners[layer])
            return
        self._awaiting_copies.append(layer)
        while len(self._awaiting_copies) > MAX_AWAITING_LAYERS:
            self._process_oldest()

    def _process_oldest(self) -> None:
        layer = self._awaiting_copies.popleft()
        assert self._gpu_loader is not None, "only staged copies are late"
        self._gpu_loader.wait(self._copies.pop(layer, []))
        self._process_layer(self._owners[layer])

    def _copy_shard(self, layer: str, value: Tensor, part: WeightShard, tensor: Tensor) -> None:
        """Copy the cut of one checkpoint tensor to its rows, converting dtype and device."""
        for axis, kept in enumerate(part.ranges):
            tensor = tensor.narrow(axis, kept.start, len(kept))
        rows = value[part.start : part.start + len(part.ranges[0])]
        if self._gpu_loader is None:
            rows.copy_(tensor)
        else:
            self._copies.setdefault(layer, []).extend(self._gpu_loader.copy(rows, tensor))


@functools.lru_cache(maxsize=1)
def _random_block(seed: int) -> Tensor:
    return torch.randn(DUMMY_BLOCK_SIZE, generator=torch.Generator().manual_seed(seed))


@functools.lru_cache(maxsize=1)
def _random_bytes(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(256, (DUMMY_BLOCK_SIZE,), generator=draw, dtype=torch.uint8)


def _as_stored(name: str, tensor: Tensor, wanted: torch.dtype) -> Tensor:
    """Return a tensor that can be converted to the dtype of its parameter without loss of meaning.

    Floats of 16 or more bits are alike, and integers of 32 and 64 bits. Codes are what they are.
    """
    if tensor.dtype == wanted:
        return tensor
    if wanted == torch.uint8 and tensor.dtype == torch.float8_e8m0fnu:
        return tensor.view(torch.uint8)
    least = 2 if wanted.is_floating_point else 4
    alike = tensor.dtype.is_floating_point == wanted.is_floating_point
    if alike and min(tensor.dtype.itemsize, wanted.itemsize) >= least:
        return tensor
    given, kind = (str(one).removeprefix("torch.") for one in (tensor.dtype, wanted))
    raise WeightError(f"{name} is {given}; config.json and the model need {kind}")


def _fill_tiled(flat: Tensor, values: Tensor, offset: int) -> None:
    """Fill flat with values over and over, the first time from `offset` on."""
    at = min(len(values) - offset, len(flat))
    flat[:at] = values[offset : offset + at]
    rest = flat[at:]
    whole = len(rest) // len(values) * len(values)
    rest[:whole].view(-1, len(values)).copy_(values.expand(whole // len(values), -1))
    rest[whole:] = values[: len(rest) - whole]
