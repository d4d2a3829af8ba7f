"""Graph groups: all CUDA graphs that an engine captures, and those that are no forward pass of the
model but a variant's own: of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.runner.gpu.cuda_graphs import CudaGraphCache, DecodeGraph, decode_graph_groups
from quire.runner.gpu.draft_chain import ChainGraph
from quire.runner.gpu.mixed_batch_graphs import GraphShape
from quire.runner.parts.base import StepVariant


class VariantGraph(NamedTuple):
    """The key of a graph of a variant's own."""

    key: int
    variant: str


GraphKey = DecodeGraph | GraphShape | VariantGraph | ChainGraph


@dataclass(frozen=True, slots=True)
class VariantGraphs:
    """Those of one variant, by its own keys."""

    cache: CudaGraphCache[Any]
    variant: str

    def __contains__(self, key: int) -> bool:
        return VariantGraph(key, self.variant) in self.cache

    def run(self, key: int) -> None:
        """Replay a graph on the current stream; without one, launch its kernels."""
        self.cache.run(VariantGraph(key, self.variant))


def find_graph_groups(
    cache: CudaGraphCache[Any],
    variants: Sequence[StepVariant],
    shapes: Sequence[GraphShape],
    decode_rows: int,
    draft_rows: int = 0,
    *,
    samples: bool = True,
) -> list[list[GraphKey]]:
    """Return all graphs that steps may run, those of a variant together.

    Each group begins with its largest. shapes: ascending. decode_rows: of the largest decode step,
    or 0. draft_rows: of the largest with drafts, which have no variant without prompts. samples:
    whether the model's last layer is here. Variants may run graphs of their own afterwards.
    """
    groups: list[list[GraphKey]] = []
    for variant in variants:
        if decode_rows and variant.decodes:
            drafts = draft_rows if variant.has_prompts else 0
            found = decode_graph_groups(decode_rows, variant, drafts)
            groups += [[*group] for group in found if samples or group[0].kind is None]
        if variant.has_prompts:
            groups.append([shape._replace(variant=variant.name) for shape in reversed(shapes)])
    for variant in variants:
        own = variant.own_graphs(VariantGraphs(cache, variant.name))
        groups.append([VariantGraph(key, variant.name) for key in own])
    return [group for group in groups if group]
