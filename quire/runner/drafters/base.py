"""Contract of a model drafter: proposes chains of tokens that the model probably samples next.

A worker has at most one. It calls `propose` once for each step with rows, after the sampling: the
drafter runs over the step's tokens, prompts included, and then further passes of one token a row.
Its keys and values are further layers in the blocks of the sequences. Drafts are proposals: a wrong
or stale one costs acceptance only, and changes no token that is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from quire.attention.base import AttentionMetadata, Backend
from quire.models.base import StepInputs
from quire.runner.step_batch import StepBatch

MetadataOf = Callable[[StepBatch], AttentionMetadata]
"""Returns a batch as attention backends read it, with the block tables of its slots."""


class TargetStates(NamedTuple):
    """What the model's forward pass computed of the T tokens of a step."""

    hidden: Tensor  # [T, E] after the last norm
    taps: Mapping[int, Tensor]  # layer -> [T, E] residual stream after it, of ModelDrafter.taps


class ChainModel(Protocol):
    """What makes drafts, one after the other: quire.models.drafters._base.DraftHead."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def module(self) -> nn.Module:
        """What has its weights."""
        ...

    @property
    def selects_rows(self) -> bool:
        """Whether a pass leaves out tokens that are not `needed` (StepInputs)."""
        ...

    def begin(self, hidden: Tensor, taps: Mapping[int, Tensor], at: Tensor) -> Tensor: ...

    def __call__(self, step: StepInputs, states: Tensor, /) -> Tensor: ...

    def drafts(self, states: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class GraphedHead:
    """A drafter whose passes a GPU's worker runs by itself, as graphs."""

    model: ChainModel
    backend: Backend
    max_len: int  # positions that the head has
    is_whole: bool = False  # a model of its own, which reads each token in its place, and no states


class ModelDrafter(Protocol):
    """Proposes drafts for the rows of a step. Called on the device thread."""

    @property
    def graphed_head(self) -> GraphedHead | None:
        """What a GPU's worker runs in place of propose(); None: nothing."""
        ...

    @property
    def reads_media(self) -> bool:
        """Whether steps with prompts may have rows of media, which propose() reads."""
        ...

    @property
    def taps(self) -> frozenset[int]:
        """Layers of the model whose outputs propose() reads."""
        ...

    def propose(
        self,
        batch: StepBatch,
        ids: Sequence[int],
        kept: Sequence[int],
        states: TargetStates,
        metadata_of: MetadataOf,
    ) -> Mapping[int, tuple[int, ...]]:
        """Return drafts by row of the plan, for StepResult.drafts; rows without any are left out.

        batch: the step, with `draft_inputs`. ids: [R] sampled tokens. kept: which of them were
        accepted. A row of which none was is skipped.
        """
        ...

    def launch(
        self,
        batch: StepBatch,
        ids: Sequence[int],
        kept: Sequence[int],
        states: TargetStates,
        metadata_of: MetadataOf,
    ) -> object:
        """Launch what propose() launches, and wait for nothing."""
        ...
