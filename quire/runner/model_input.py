"""ModelInput: all that an executor sends to a worker for one step.

The engine thread makes it from a StepPlan. It holds no `Sequence` and nothing that the scheduler
may change later, so it serves a worker in this process, in another process or on another node.
`encode` and `decode` carry it between processes as msgpack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from quire.core.types import BlockCopy, StepPlan
from quire.runner.parts.base import StepPart, load_part_types
from quire.runner.profiler import span
from quire.runner.slots import BlockTableUpdate, SlotTables, TableShape
from quire.runner.step_batch import StepBatch, build_step_batch
from quire.sampling.slot_join import SlotJoin


class ModelInput(msgspec.Struct, frozen=True, array_like=True):
    """One step. A worker applies the fields in this order."""

    leaves: tuple[int, ...]  # slots of sequences that generate, as are those of joins
    joins: tuple[SlotJoin, ...]
    block_table_updates: list[BlockTableUpdate]
    swap_out_copies: tuple[BlockCopy, ...]
    swap_in_copies: tuple[BlockCopy, ...]
    block_copies: tuple[BlockCopy, ...]
    batch: StepBatch | None  # None: the step computes nothing
    parts: dict[str, Any]  # of features: name in quire.runner.parts -> its StepPart


class ModelInputBuilder:
    """The core's part of an executor: makes ModelInputs, in plan order, on the engine thread."""

    def __init__(
        self, shape: TableShape, part_types: Mapping[str, type[StepPart]] | None = None
    ) -> None:
        """part_types: the parts that steps may have; None: all that exist."""
        self._tables = SlotTables(shape)
        self._sampled_slots: set[int] = set()  # joined by sequences that generate
        self._part_types = load_part_types() if part_types is None else part_types

    def build(self, plan: StepPlan) -> ModelInput:
        """Copy what the step needs from the plan's live objects."""
        with span("prepare"):
            updates = self._tables.collect_updates(plan)
            batch = build_step_batch(plan) if plan.rows else None
            leaves = self._sampled_slots.intersection(plan.leaves)
            joins = [SlotJoin.from_sequence(s) for s in plan.joins if s.request.pooling is None]
            self._sampled_slots -= leaves
            self._sampled_slots.update([joined.slot for joined in joins])
            return ModelInput(
                leaves=tuple(leaves),
                joins=tuple(joins),
                block_table_updates=updates,
                swap_out_copies=plan.swap_out,
                swap_in_copies=plan.swap_in,
                block_copies=plan.copies,
                batch=batch,
                parts={} if batch is None else self._prepare_parts(plan, batch),
            )

    def _prepare_parts(self, plan: StepPlan, batch: StepBatch) -> dict[str, StepPart]:
        parts = {}
        for name, kind in self._part_types.items():
            part = kind.prepare(plan, batch)
            if part is not None:
                parts[name] = part
        return parts


def encode(value: ModelInput) -> bytes:
    """Encode as msgpack. Raises TypeError for values that cannot leave the process."""
    return _encoder.encode(value)


def decode(data: bytes, part_types: Mapping[str, type[StepPart]]) -> ModelInput:
    """Decode the result of `encode`."""
    decoded = _decoder.decode(data)
    for name, part in decoded.parts.items():
        decoded.parts[name] = msgspec.convert(part, part_types[name], dec_hook=_from_plain)
    return decoded


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, torch.Tensor):
        data = value.contiguous().view(torch.uint8).numpy().tobytes()
        return [str(value.dtype).removeprefix("torch."), list(value.shape), data]
    if isinstance(value, (range, frozenset)):
        return list(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def _from_plain(kind: type, value: Any) -> Any:
    """Arrays are int32 and writable: a worker fills in the tokens that only it has."""
    if kind is torch.Tensor:
        dtype, shape, data = value
        return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape)
    assert issubclass(getattr(kind, "__origin__", kind), np.ndarray), kind
    return np.frombuffer(value, np.int32).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_decoder = msgspec.msgpack.Decoder(ModelInput, dec_hook=_from_plain)
