"""Contract of a part: one feature's share of a step, on both sides of an executor.

`prepare` runs on the engine thread and copies what the feature needs from the plan. On each worker
`before_forward` may replace inputs of the forward pass, and `apply` starts the feature's work after
it; the results are fields of the StepResult. Each file in this folder sets `PART` to its StepPart,
plain data that can be sent to another process. No other file names a part.

A part that replaces inputs keeps its steps out of tapes and CUDA graphs. One whose forward pass
reads buffers at fixed addresses has a variant instead: steps with it have tapes and graphs of their
own. `write_inputs` fills the buffers before each step. A part that does nothing else before the
forward pass, and reads nothing of it, keeps the graphs of steps without parts (`keeps_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec
from torch import Tensor

from quire.core.types import MediaTensor, StepPlan
from quire.models.base import LanguageModel, StepInputs
from quire.pooling.pooler import Pooler
from quire.registry import PluginRegistry
from quire.runner.slots import TableShape
from quire.runner.step_batch import StepBatch
from quire.sampling.logprobs import Mode

PARTS = PluginRegistry("quire.runner.parts")


class OwnGraphs(Protocol):
    """Graphs of a variant, beside those of forward passes, by its own keys."""

    def __contains__(self, key: int) -> bool: ...

    def run(self, key: int) -> None:
        """Replay a graph on the current stream; without one, launch its kernels."""
        ...


class StepVariant(Protocol):
    """One way to run a model's forward pass and logits, with kernels of its own.

    What runs within its contexts is recorded and captured, so it depends on the content of no
    buffer. Slots are those of sequences, on the device; negative: padding.
    """

    @property
    def name(self) -> str:
        """Key of its tapes and graphs, and no other variant's; "": of steps without any."""
        ...

    @property
    def changes_logits(self) -> bool:
        """Whether logits have other kernels than without the variant."""
        ...

    @property
    def decodes(self) -> bool:
        """Whether steps with it may have decoding rows alone, which have graphs of their own."""
        ...

    @property
    def least_rows(self) -> int:
        """Rows of its steps that have decoding rows alone, at least."""
        ...

    @property
    def most_rows(self) -> int | None:
        """Rows of these steps, at most; None: as many as a step has."""
        ...

    @property
    def few_graphs(self) -> bool:
        """Whether these steps have graphs of half as many numbers of rows as others, none of which
        samples too: each takes time at a start, and a row of padding takes little."""
        ...

    @property
    def has_prompts(self) -> bool:
        """Whether steps with it and rows of prompts have graphs."""
        ...

    @property
    def rotary_axes(self) -> int:
        """Rotary positions of each token in its graphs."""
        ...

    def reset(self) -> None:
        """Take the usual form and name, which graphs are captured of, until inputs are written."""
        ...

    def inputs(self, step: StepInputs) -> StepInputs:
        """Return the inputs of a forward pass, from those without the variant; in its context."""
        ...

    def forward(self, token_slots: Tensor) -> AbstractContextManager[object]:
        """The context of a forward pass. token_slots: int32 [T]."""
        ...

    def logits(self, row_slots: Tensor) -> AbstractContextManager[object]:
        """The context of logits of hidden states [R, E]. row_slots: int32 [R]."""
        ...

    def own_graphs(self, graphs: OwnGraphs) -> Sequence[int]:
        """Take what runs graphs of its own. Returns their keys; the first needs most memory."""
        ...

    def prepare_own(self, key: int) -> None:
        """Write what the kernels of a graph of its own read, for a first launch."""
        ...

    def launch_own(self, key: int) -> None:
        """Launch the kernels of a graph of its own. They read and write fixed addresses."""
        ...


class NoOwnGraphs:
    """Of variants whose only graphs are those of forward passes."""

    few_graphs: bool = False

    def own_graphs(self, graphs: OwnGraphs) -> Sequence[int]:
        return ()

    def prepare_own(self, key: int) -> None:
        raise AssertionError("no graph of its own")

    launch_own = prepare_own


class _PlainVariant(NoOwnGraphs):
    """Of steps without a variant."""

    name = ""
    changes_logits = False
    decodes = True
    least_rows = 1
    most_rows = None
    has_prompts = True
    rotary_axes = 1

    def reset(self) -> None:
        pass

    def inputs(self, step: StepInputs) -> StepInputs:
        return step

    def forward(self, token_slots: Tensor) -> AbstractContextManager[object]:
        return nullcontext()

    def logits(self, row_slots: Tensor) -> AbstractContextManager[object]:
        return nullcontext()


PLAIN: StepVariant = _PlainVariant()


class CombinedVariant(NamedTuple):
    """Of steps with parts that have one each. It has no graphs."""

    variants: tuple[StepVariant, ...]

    @property
    def name(self) -> str:
        return " and ".join(one.name for one in self.variants)

    @property
    def changes_logits(self) -> bool:
        return any(one.changes_logits for one in self.variants)

    @property
    def decodes(self) -> bool:
        return all(one.decodes for one in self.variants)

    @property
    def least_rows(self) -> int:
        return max(one.least_rows for one in self.variants)

    @property
    def most_rows(self) -> int | None:
        return min((one.most_rows for one in self.variants if one.most_rows), default=None)

    @property
    def few_graphs(self) -> bool:
        return any(one.few_graphs for one in self.variants)

    @property
    def has_prompts(self) -> bool:
        return all(one.has_prompts for one in self.variants)

    @property
    def rotary_axes(self) -> int:
        return max(one.rotary_axes for one in self.variants)

    def reset(self) -> None:
        for one in self.variants:
            one.reset()

    def inputs(self, step: StepInputs) -> StepInputs:
        for one in self.variants:
            step = one.inputs(step)
        return step

    @contextmanager
    def forward(self, token_slots: Tensor) -> Iterator[None]:
        with ExitStack() as stack:
            for one in self.variants:
                stack.enter_context(one.forward(token_slots))
            yield

    @contextmanager
    def logits(self, row_slots: Tensor) -> Iterator[None]:
        with ExitStack() as stack:
            for one in self.variants:
                stack.enter_context(one.logits(row_slots))
            yield

    def own_graphs(self, graphs: OwnGraphs) -> Sequence[int]:
        return ()

    def prepare_own(self, key: int) -> None:
        raise AssertionError("no graph of its own")

    def launch_own(self, key: int) -> None:
        raise AssertionError("no graph of its own")


class ForwardOutput(NamedTuple):
    """The results of a step's forward pass that parts read."""

    model: LanguageModel
    hidden: Tensor  # [T, E] of every token in the step; to parts that keep graphs any
    logprobs_mode: Mode
    pooler: Pooler | None = None  # None: the engine pools nothing
    variant: StepVariant = PLAIN


class PendingPart(Protocol):
    """Work of a part that was started."""

    def result(self) -> dict[str, Any]:
        """Return what to add to fields of the StepResult, by name: each is a dict by plan row.

        On a GPU, call it after the step's event.
        """
        ...


class NoPendingPart:
    """Of a part whose work was done before the forward pass."""

    def result(self) -> dict[str, Any]:
        return {}


ChangeTensors = Callable[[tuple[MediaTensor, ...]], tuple[MediaTensor, ...]]
"""Takes the bytes out of tensors, or puts them back."""


class StepPart(msgspec.Struct, frozen=True, array_like=True):
    """One feature's share of one step."""

    keeps_graphs: ClassVar[bool] = False
    """Whether steps with it run graphs without a variant: it changes no inputs, and reads nothing
    that the forward pass returns."""

    divides_attention: ClassVar[int] = 0
    """Place among the parts that divide the attention of decoding rows among programs, each in a
    way of its own: a step has the first that its rows are worth. 0: it is none of them."""

    @classmethod
    def is_used(cls, shape: TableShape) -> bool:
        """Whether an engine with such block tables may have steps with the part."""
        return True

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> StepPart | None:
        """Copy what the feature needs from a plan with rows; None: no row uses the feature."""
        raise NotImplementedError

    def with_tensors(self, change: ChangeTensors) -> StepPart:
        """Return the part with its tensors of media changed, always in the same order."""
        return self

    @property
    def changes_inputs(self) -> bool:
        """Whether the forward pass has other inputs than without the part."""
        return type(self).before_forward is not StepPart.before_forward

    @classmethod
    def variant(cls, model: LanguageModel) -> StepVariant | None:
        """Return the variant that steps with this part run, on this model. None: the part has
        none."""
        return None

    @classmethod
    def variants(cls, model: LanguageModel) -> Sequence[StepVariant]:
        """Return the variants that graphs are captured of: variant(), and other forms of it."""
        found = cls.variant(model)
        return () if found is None else (found,)

    def write_inputs(self, model: LanguageModel, batch: StepBatch) -> None:
        """Write what the variant reads, before its forward pass, on the current stream."""

    def before_forward(
        self, model: LanguageModel, step: StepInputs, variant: StepVariant
    ) -> StepInputs:
        """Return the inputs of the forward pass, from those that other parts returned.

        variant: of the step. What runs of the model here runs in its context.
        """
        return step

    def after_forward(self, model: LanguageModel) -> None:
        """Keep what the forward pass has written; on each pipeline stage, unlike apply()."""

    @classmethod
    def call(cls, model: LanguageModel, request: bytes) -> bytes:
        """Answer a request that concerns no step, on each rank, between steps."""
        raise NotImplementedError

    def apply(self, forward: ForwardOutput) -> PendingPart:
        """Start the work, and the copies of its results to the host."""
        return NoPendingPart()


def load_part_types() -> dict[str, type[StepPart]]:
    """Return name -> class of every part."""
    return {name: PARTS.load(name).PART for name in PARTS.names()}


def find_variants(model: LanguageModel) -> list[StepVariant]:
    """Return all variants of steps of a model, the plain one first."""
    kinds = load_part_types().values()
    return [PLAIN, *(one for kind in kinds for one in kind.variants(model))]


def keep_graphs(parts: Collection[StepPart], *, all_hidden: bool = False) -> bool:
    """Whether a step with these parts, none of which has a variant, can run graphs.

    all_hidden: graphs keep the hidden states of every token, not those of sampled rows alone.
    """
    return all(part.keeps_graphs or (all_hidden and not part.changes_inputs) for part in parts)


def split_variant(
    model: LanguageModel, parts: Collection[StepPart]
) -> tuple[StepVariant, Collection[StepPart]]:
    """Return a step's variant, and the parts that do more than write its inputs."""
    if not parts:
        return PLAIN, parts
    variants = tuple(own for part in parts if (own := part.variant(model)) is not None)
    others = [part for part in parts if part.variant(model) is None or part.changes_inputs]
    if len(variants) > 1:
        return CombinedVariant(variants), others
    return (variants or (PLAIN,))[0], others
