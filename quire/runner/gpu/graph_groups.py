"""Graph groups: all CUDA graphs that an engine captures, and those that are no forward pass of the
model but of an owner: a variant with an encoder, a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from quire.runner.gpu.cuda_graphs import CudaGraphCache, DecodeGraph, decode_graph_groups
from quire.runner.gpu.mixed_batch_graphs import GraphShape
from quire.runner.parts.base import StepVariant


class OwnedGraph(NamedTuple):
    """The key of a graph of an owner, by the owner's name."""

    key: Any
    owner: str


class GraphOwner(Protocol):
    """What has graphs of its own. Their kernels read and write fixed addresses."""

    def prepare_own(self, key: Any) -> None:
        """Write what the kernels of a graph read, for a first launch: no rows."""
        ...

    def launch_own(self, key: Any) -> None:
        """Launch the kernels of a graph."""
        ...


DRAFTER = "drafter"
"""Owner of the graphs of a model that drafts."""


class DraftingOwner(GraphOwner, Protocol):
    """A model that drafts behind steps."""

    def graph_groups(
        self, sizes: Sequence[int], shapes: Sequence[GraphShape]
    ) -> Sequence[Sequence[Any]]:
        """Return its keys behind decode steps of these sizes, and steps with prompts of these
        shapes; each group begins with its largest."""
        ...


GraphKey = DecodeGraph | GraphShape | OwnedGraph


@dataclass(frozen=True, slots=True)
class OwnedGraphs:
    """Those of one owner, by its own keys."""

    cache: CudaGraphCache[Any]
    owner: str

    def __contains__(self, key: Any) -> bool:
        return OwnedGraph(key, self.owner) in self.cache

    def run(self, key: Any) -> None:
        """Replay a graph on the current stream; without one, launch its kernels."""
        self.cache.run(OwnedGraph(key, self.owner))


def drafter_graphs(cache: CudaGraphCache[Any]) -> OwnedGraphs:
    """Return those of the drafter."""
    return OwnedGraphs(cache, DRAFTER)


def find_owners(
    variants: Sequence[StepVariant], drafter: GraphOwner | None
) -> dict[str, GraphOwner]:
    """Return owners by name."""
    owners: dict[str, GraphOwner] = {one.name: one for one in variants}
    return owners if drafter is None else owners | {DRAFTER: drafter}


def variant_of(variants: Sequence[StepVariant], graph: DecodeGraph | GraphShape) -> StepVariant:
    """Return the variant of a graph. Names are those of the step that is launched now: adapters
    with factors or biases change them."""
    return next(one for one in variants if one.name == graph.variant)


class StepGraphs(NamedTuple):
    """Of which steps there are graphs."""

    shapes: Sequence[GraphShape]  # with prompts, ascending
    rows: int  # of the largest decode step, or 0
    draft_sizes: Sequence[int]  # tokens of decode steps with drafts, in no variant without prompts
    samples: bool  # the model's last layer is here


def find_graph_groups(
    cache: CudaGraphCache[Any],
    variants: Sequence[StepVariant],
    steps: StepGraphs,
    drafter: DraftingOwner | None,
) -> list[list[GraphKey]]:
    """Return all graphs that steps may run, those of a variant together.

    Each group begins with its largest. Variants may run graphs of their own afterwards.
    """
    groups: list[list[GraphKey]] = []
    for variant in variants:
        if steps.rows and variant.decodes:
            drafts = max(steps.draft_sizes, default=0) if variant.has_prompts else 0
            found = decode_graph_groups(steps.rows, variant, drafts)
            groups += [[*group] for group in found if steps.samples or group[0].kind is None]
        if variant.has_prompts:
            groups.append(
                [shape._replace(variant=variant.name) for shape in reversed(steps.shapes)]
            )
    for variant in variants:
        own = variant.own_graphs(OwnedGraphs(cache, variant.name))
        groups.append([OwnedGraph(key, variant.name) for key in own])
    drafted = [] if drafter is None else drafter.graph_groups(steps.draft_sizes, steps.shapes)
    groups += [[OwnedGraph(key, DRAFTER) for key in group] for group in drafted]
    return [group for group in groups if group]
