"""Request logits processors: runs a request's own functions (params.logits_processors) on its row.

    f(output_ids, logits) or f(prompt_ids, output_ids, logits) -> logits [V] float32

They run after the penalties, in their order. A function that fails ends its own row only. They need
the tokens on the host, so a batch with such a row waits for each draw.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.sampling.slot_join import SlotJoin
from quire.sampling.steps.base import LogitsEdit, SlotBatch

ProcessorFunction = Callable[..., Any]


@dataclass(slots=True)
class RowProcessors:
    """The functions of one slot, and the tokens they are shown."""

    functions: list[tuple[ProcessorFunction, bool]]  # with: takes the prompt too
    prompt: list[int]
    outputs: list[int]

    def apply_all(self, logits: Tensor) -> Tensor:
        """Put one row [V] through all functions."""
        for function, wants_prompt in self.functions:
            before = (self.prompt, self.outputs) if wants_prompt else (self.outputs,)
            given = function(*before, logits)
            if not isinstance(given, Tensor) or given.shape != logits.shape:
                what = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
                raise TypeError(f"it must return logits of shape {tuple(logits.shape)}, not {what}")
            logits = given
        return logits


@dataclass(slots=True)
class RequestLogitsProcessors:
    """The functions of the slots that have some."""

    reads_outputs: ClassVar = True

    _by_slot: dict[int, RowProcessors] = field(default_factory=dict)

    def join(self, joined: SlotJoin) -> None:
        slot = joined.slot
        self._by_slot.pop(slot, None)
        functions = joined.params.logits_processors or []
        if functions:
            pairs = [(function, takes_prompt(function)) for function in functions]
            self._by_slot[slot] = RowProcessors(pairs, joined.prompt_tokens, joined.output_tokens)

    def leave(self, slot: int) -> None:
        self._by_slot.pop(slot, None)

    def applies_to(self, slot: int) -> bool:
        return slot in self._by_slot

    def build_edit(self, batch: SlotBatch) -> LogitsEdit | None:
        rows = [(row, self._by_slot[slot]) for row, slot in batch.rows_in(self._by_slot)]
        return _RequestProcessorsEdit(rows) if rows else None


def failure_message(error: Exception) -> str:
    """The message for a request after its function raised."""
    return f"a logits processor failed: {type(error).__name__}: {error}"


def takes_prompt(function: ProcessorFunction) -> bool:
    """Whether a function takes three arguments (prompt first) rather than two."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in places and p.default is p.empty for p in parameters) >= 3


@dataclass(slots=True)
class _RequestProcessorsEdit(LogitsEdit):
    rows: list[tuple[int, RowProcessors]]

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        for row, caller in self.rows:
            try:
                logits[row] = caller.apply_all(logits[row].clone())
            except Exception as error:  # noqa: BLE001 the caller's code: its row ends, not the step
                errors[row] = failure_message(error)

    def on_sampled(self, token_ids: Tensor) -> None:
        places = torch.tensor([row for row, _ in self.rows], device=token_ids.device)
        for (_, caller), token in zip(self.rows, token_ids[places].tolist()):
            caller.outputs.append(token)
