"""ModelInput: all that an executor sends to a worker for one step.

The engine thread makes it from a StepPlan. It holds no `Sequence` and nothing that the scheduler
may change later, so it serves a worker in this process, in another process or on another node.
`encode` and `decode` carry it between processes as msgpack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from quire.core.media.item_tensors import attach_data, detach_data
from quire.core.types import BlockCopy, DataParallelTokens, StepPlan
from quire.runner import plain_data
from quire.runner.parts.base import ChangeTensors, StepPart, load_part_types
from quire.runner.profiler import span
from quire.runner.slots import BlockTableUpdate, SlotTables, TableShape
from quire.runner.step_batch import StepBatch, build_step_batch
from quire.sampling.slot_join import SlotJoin
from quire.sampling.steps.grammar_masks import PlainMasks

_ALONE = DataParallelTokens(())


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
    masks: PlainMasks | None = None  # of constrained rows, where another stage has the grammars
    shared: DataParallelTokens = _ALONE  # no counts: one rank, or none has any

    @property
    def is_empty(self) -> bool:
        """Whether a worker has nothing to do."""
        copies = self.swap_out_copies or self.swap_in_copies or self.block_copies
        changes = self.leaves or self.joins or self.block_table_updates
        return self.batch is None and not copies and not changes


class ModelInputBuilder:
    """The core's part of an executor: makes ModelInputs, in plan order, on the engine thread."""

    def __init__(
        self, shape: TableShape, part_types: Mapping[str, type[StepPart]] | None = None
    ) -> None:
        """part_types: the parts that steps may have; None: all that exist."""
        self._tables = SlotTables(shape)
        self._build_batch = partial(
            build_step_batch,
            has_rotary=shape.has_rotary,
            drafts=shape.drafts,
            synthetic=shape.synthetic,
        )
        self._sampled_slots: set[int] = set()  # joined by sequences that generate
        found = load_part_types() if part_types is None else part_types
        used = [(name, kind) for name, kind in found.items() if kind.is_used(shape)]
        self._part_types = dict(sorted(used, key=lambda one: one[1].divides_attention))

    def build(self, plan: StepPlan) -> ModelInput:
        """Copy what the step needs from the plan's live objects."""
        with span("prepare"):
            updates = self._tables.collect_updates(plan)
            batch = self._build_batch(plan) if plan.rows else None
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
                shared=next((x for x in plan.parts if isinstance(x, DataParallelTokens)), _ALONE),
            )

    def _prepare_parts(self, plan: StepPlan, batch: StepBatch) -> dict[str, StepPart]:
        parts: dict[str, StepPart] = {}
        is_divided = False
        for name, kind in self._part_types.items():
            if kind.divides_attention and is_divided:
                continue
            part = kind.prepare(plan, batch)
            if part is not None:
                parts[name] = part
                is_divided = kind.divides_attention > 0
        return parts


def detach_arrays(value: ModelInput, arrays: list[bytes]) -> ModelInput:
    """Return a step without the large arrays of its parts, which are added to `arrays`."""
    return _with_tensors(value, partial(detach_data, buffers=arrays))


def attach_arrays(value: ModelInput, arrays: Iterable[Any]) -> ModelInput:
    """Return a step with the arrays that detach_arrays() took. Raises ValueError if one is
    missing."""
    return _with_tensors(value, partial(attach_data, buffers=iter(arrays)))


def _with_tensors(value: ModelInput, change: ChangeTensors) -> ModelInput:
    parts = {name: part.with_tensors(change) for name, part in value.parts.items()}
    return msgspec.structs.replace(value, parts=parts)


def encode(value: ModelInput) -> bytes:
    """Encode as msgpack. Raises TypeError for values that cannot leave the process."""
    return plain_data.encode(value)


def decode(data: bytes, part_types: Mapping[str, type[StepPart]]) -> ModelInput:
    """Decode the result of `encode`."""
    decoded = plain_data.decode_as(data, ModelInput)
    for name, part in decoded.parts.items():
        decoded.parts[name] = plain_data.convert(part, part_types[name])
    return decoded
