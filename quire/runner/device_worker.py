"""Contract of a device worker: the methods that ModelRunner calls on a CPU or GPU.

The runner calls a worker in plan order, from one thread at a time. The workers are in
quire.runner.cpu.cpu_worker and quire.runner.gpu.cuda_worker.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from quire.core.types import BlockCopy, DataParallelTokens, StepResult, TokenLogprobs
from quire.runner.parts.base import StepPart
from quire.runner.slots import BlockTableUpdate
from quire.runner.step_batch import StepBatch
from quire.sampling.step_sampling import StepTokens

T = TypeVar("T")


class StepHandle(Protocol):
    """A step that was started."""

    def wait(self) -> StepResult:
        """Block until it is done; may be called again after an interruption."""
        ...


class StepShape(Protocol):
    """The sizes of a step with padding."""

    @property
    def tokens(self) -> int: ...


class DeviceWorker(Protocol):
    """The device's part of a step."""

    @property
    def last_tokens(self) -> Tensor:
        """[slots] int32: the last sampled token of each, which steps read in place of UNKNOWN. On
        the first of several stages it is what the last one sends."""
        ...

    def execution_context(self) -> AbstractContextManager[object]:
        """The context in which a step runs."""
        ...

    def synchronize(self) -> None:
        """Wait for all started work."""
        ...

    def recover(self) -> None:
        """Prepare for more steps after one raised. Raises EngineDead if the device is lost."""
        ...

    def write_tables(self, changes: Sequence[BlockTableUpdate]) -> None:
        """Write the block table entries that the step adds."""
        ...

    def swap_out(self, pairs: Sequence[BlockCopy]) -> None:
        """Copy blocks of the device to blocks of the host."""
        ...

    def swap_in(self, pairs: Sequence[BlockCopy]) -> None:
        """Copy blocks of the host to blocks of the device."""
        ...

    def copy(self, pairs: Sequence[BlockCopy]) -> None:
        """Copy blocks of the device; none is both read and written."""
        ...

    def compute(
        self, batch: StepBatch, parts: Collection[StepPart], padded: StepShape | None = None
    ) -> StepHandle:
        """Start the forward pass and the sampling.

        padded: of padded_shape(), for the step. The batch may have no rows then.
        """
        ...

    def padded_shape(self, shared: DataParallelTokens) -> StepShape | None:
        """Return the shape at which every data-parallel rank runs a step, with padding. It depends
        on nothing else. None: each runs its own rows."""
        ...

    def release_kv_memory(self) -> None:
        """Return the KV memory to the system; every block's content is lost."""
        ...

    def restore_kv_memory(self) -> None:
        """Before a step that computes: allocate the KV memory again, if it was released."""
        ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that is done."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


def build_step_result(
    inputs: StepBatch, sampled: StepTokens, extras: Iterable[Mapping[str, Any]]
) -> StepResult:
    """Return the step's result by the plan's rows. extras: what parts add to fields of it."""
    rows, ids, logprobs = inputs.sampled_rows, sampled.ids, sampled.logprobs
    kept = inputs.accepted(ids, sampled.ends)
    errors, request_errors, non_finite = sampled.row_errors
    if inputs.decode_only and not inputs.next_drafts:
        tokens: list[tuple[int, ...]] = list(zip(ids))
    else:
        tokens = [()] * (1 + max(inputs.rows))
        for i in kept:
            tokens[rows[i]] += (ids[i],)
    scored: dict[int, list[TokenLogprobs]] = {}
    for i in kept if logprobs else ():
        if i in logprobs:
            scored.setdefault(rows[i], []).append(logprobs[i])
    result = StepResult(
        tokens,
        logprobs=scored,
        errors=_by_plan_row(errors, rows, kept),
        request_errors=_by_plan_row(request_errors, rows, kept),
        non_finite=_by_plan_row(non_finite, rows, kept),
        finish_reasons=_by_plan_row(sampled.finish_reasons, rows, kept),
    )
    for fields in extras:
        for name, of_rows in fields.items():
            getattr(result, name).update(of_rows)
    return result


def _by_plan_row(
    of_sampled: Mapping[int, T], rows: Sequence[int], kept: Container[int]
) -> dict[int, T]:
    """Return values by rows of the plan, for the accepted tokens."""
    return {rows[i]: value for i, value in of_sampled.items() if i in kept}
