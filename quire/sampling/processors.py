"""Engine-wide logits processors: classes of the user that process whole batches.

Functions of a single request are in quire.sampling.steps.request_processors. The interface is the
one that users of this kind of engine write against. Row i of the logits is index i of the batch;
changes of the batch since the last step come as a BatchUpdate, to be applied in the order removed,
added, moved. An instance keeps state per index; None means that the batch did not change.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.core.params import SamplingParams
from quire.errors import ConfigError, HookFailed
from quire.registry import find_entry_points
from quire.sampling.slot_join import SlotJoin
from quire.sampling.steps.base import LogitsEdit, SlotBatch
from quire.sampling.steps.request_processors import RowProcessors, failure_message, takes_prompt

ENTRY_POINT_GROUPS = ("quire.logits_processors", "vllm.logits_processors")
"""Entry-point groups; every processor an installed package registers there is used."""


RequestLogitsProcessor = Callable[..., Tensor]
"""f(output_ids, logits) or f(prompt_ids, output_ids, logits) -> logits, of one request."""


class MoveDirectionality(Enum):
    """What moving index a to index b does."""

    UNIDIRECTIONAL = auto()  # b becomes a, a is empty
    SWAP = auto()


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """How the batch changed. output_tok_ids lists grow by themselves as tokens are drawn."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    # (index, params, prompt_tok_ids, output_tok_ids); the index may have been occupied
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class RowsFailed(Exception):
    """Raised by an `apply` that failed on some rows, and did the others in place."""

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__(f"rows {sorted(rows)} failed")
        self.rows = rows


class LogitsProcessor:
    """Base class of engine-wide processors."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError if a request's params (extra_args) are not good."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """vllm_config: the engine's configuration."""

    def apply(self, logits: Tensor) -> Tensor:
        """Change logits [R, V] float32 in place or make new ones; return them."""
        raise NotImplementedError

    def is_argmax_invariant(self) -> bool:
        """True if the greatest logit stays the greatest: then greedy batches skip it."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the state for a changed batch; called before each apply."""
        raise NotImplementedError


class AdapterLogitsProcessor(LogitsProcessor):
    """Runs per-request functions engine-wide: one for each request that has one."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self.req_info: dict[int, RowProcessors] = {}

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the function of a request; None: its logits stay as they are."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests to their new indexes."""
        if batch_update is None:
            return
        info = self.req_info
        for index in batch_update.removed:
            info.pop(index, None)
        for index, params, prompt, outputs in batch_update.added:
            info.pop(index, None)
            function = self.new_req_logits_processor(params)
            if function is not None:
                info[index] = RowProcessors(
                    [(function, takes_prompt(function))], prompt or [], outputs
                )
        for a, b, direction in batch_update.moved:
            was_a, was_b = info.pop(a, None), info.pop(b, None)
            if was_a is not None:
                info[b] = was_a
            if was_b is not None and direction is MoveDirectionality.SWAP:
                info[a] = was_b

    def apply(self, logits: Tensor) -> Tensor:
        """Put each request's row through its function."""
        failed: dict[int, str] = {}
        for row, caller in self.req_info.items():
            try:
                logits[row] = caller.apply_all(logits[row].clone())
            except Exception as error:  # noqa: BLE001 the user's code: its row ends, not the step
                failed[row] = failure_message(error)
        if failed:
            raise RowsFailed(failed)
        return logits


def load_processors(
    wanted: Sequence[str | type], config: object, device: torch.device
) -> list[LogitsProcessor]:
    """Make the processors: classes, or names "module:Class"; then those of installed packages.

    Raises: ConfigError (no such class; not a logits processor).
    """
    kinds = [_class_of(one) if isinstance(one, str) else one for one in wanted]
    kinds += [one.load() for group in ENTRY_POINT_GROUPS for one in find_entry_points(group)]
    for kind in kinds:
        lacks = [m for m in ("apply", "is_argmax_invariant", "update_state") if m not in dir(kind)]
        if lacks:
            raise ConfigError(f"{kind!r} is not a logits processor: it has no {', '.join(lacks)}")
    return [kind(config, device, False) for kind in dict.fromkeys(kinds)]


def _class_of(name: str) -> type:
    module, colon, attribute = name.partition(":")
    if not colon:
        module, _, attribute = name.rpartition(".")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = vars(found)[part]
    except (ImportError, KeyError, ValueError) as error:
        raise ConfigError(
            f"there is no logits processor {name!r} ({error}); name it as module:Class"
        ) from error
    if not isinstance(found, type):
        raise ConfigError(f"{name!r} is a {type(found).__name__}, not a class")
    return found


@dataclass(slots=True)
class _SequenceTokens:
    """One sequence as a processor sees it. Compared by identity: one per stay in a slot."""

    params: SamplingParams
    prompt: list[int]
    outputs: list[int]


class EngineLogitsProcessors:
    """The engine-wide processors as a SamplingStep, and the batch order that they have."""

    reads_outputs: ClassVar = True

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self.argmax_changing = [p for p in processors if not p.is_argmax_invariant()]
        self.argmax_invariant = [p for p in processors if p.is_argmax_invariant()]
        self._all = list(processors)
        self._tokens: dict[int, _SequenceTokens] = {}
        self._batch_order: list[_SequenceTokens] = []

    def join(self, joined: SlotJoin) -> None:
        if self._all:
            self._tokens[joined.slot] = _SequenceTokens(
                joined.params, joined.prompt_tokens, joined.output_tokens
            )

    def leave(self, slot: int) -> None:
        self._tokens.pop(slot, None)

    def applies_to(self, slot: int) -> bool:
        return bool(self._all)

    def build_edit(self, batch: SlotBatch) -> LogitsEdit | None:
        if not self._all:
            return None
        return _EngineProcessorsEdit(self, [self._tokens[slot] for slot in batch.slots])

    def update_batch(self, rows: list[_SequenceTokens]) -> None:
        """Send all processors the changes of the batch."""
        update = None
        if len(rows) != len(self._batch_order) or any(
            a is not b for a, b in zip(rows, self._batch_order)
        ):
            update = diff_batches(self._batch_order, rows)
            self._batch_order = list(rows)
        for processor in self._all:
            processor.update_state(update)

    def run(
        self, processors: list[LogitsProcessor], logits: Tensor, errors: dict[int, str]
    ) -> None:
        """Apply to all rows. Raises HookFailed: it is unknown which rows were done."""
        try:
            for processor in processors:
                given = processor.apply(logits)
                if given is not logits:
                    logits.copy_(given)
        except RowsFailed as error:
            errors.update(error.rows)
        except Exception as error:
            raise HookFailed(failure_message(error)) from error


class _EngineProcessorsEdit(LogitsEdit):
    def __init__(self, step: EngineLogitsProcessors, rows: list[_SequenceTokens]) -> None:
        self._step, self._rows = step, rows

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        self._step.update_batch(self._rows)
        self._step.run(self._step.argmax_changing, logits, errors)

    def on_sampled(self, token_ids: Tensor) -> None:
        for tokens, token in zip(self._rows, token_ids.tolist()):
            tokens.outputs.append(token)


def diff_batches(old: Sequence[_SequenceTokens], new: Sequence[_SequenceTokens]) -> BatchUpdate:
    """The update that turns one batch order into another. A sequence that stays is moved."""
    staying = {id(one) for one in new}
    known = {id(one) for one in old}
    removed = [i for i, one in enumerate(old) if id(one) not in staying]
    places: dict[int, _SequenceTokens] = {i: one for i, one in enumerate(old) if id(one) in staying}
    free = [*removed, *range(len(old), len(old) + len(new))]
    for one in new:
        if id(one) not in known:
            places[free.pop(0)] = one
    added = [(i, o.params, o.prompt, o.outputs) for i, o in places.items() if id(o) not in known]
    where = {id(one): i for i, one in places.items()}
    moved = []
    for b, one in enumerate(new):
        a = where[id(one)]
        if a == b:
            continue
        other = places.get(b)
        way = MoveDirectionality.UNIDIRECTIONAL if other is None else MoveDirectionality.SWAP
        moved.append((a, b, way))
        places[b], where[id(one)] = one, b
        if other is None:
            del places[a]
        else:
            places[a], where[id(other)] = other, a
    return BatchUpdate(len(new), removed, added, moved)
