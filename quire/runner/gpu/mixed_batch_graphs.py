"""Shapes of mixed batches: pad steps with prompts to a few shapes so that graphs can replay them.

Up to some thousand tokens the host takes as long to launch such a step as the GPU to run it. A
shape has fixed places: decoding rows, padded; then the rows of prompts, the last of which has the
padding tokens. Padding has context 0 and no slot: it writes no keys, reads none, and its token is
dropped. The shapes are few, because each is captured before the first request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.config.memory.captured_steps import CAPTURED_TOKENS, MOST_CAPTURED_TOKENS
from quire.core.types import DataParallelTokens, RankRows
from quire.runner.step_batch import Ints, StepBatch

TOKEN_COUNTS = (64, 128, 256, 384, 512, 768, CAPTURED_TOKENS)
DECODE_COUNTS = (0, 16, 64, 128, 256, 384, 512)
LARGE_TOKEN_COUNTS = (1280, 1536, 2048, 2560, 3072, MOST_CAPTURED_TOKENS)
"""Of small models, whose padding takes little time: a third of such a shape may be padding."""
LARGE_DECODE_COUNTS = (256, 512)
PROMPT_ROWS = 16
"""Rows of prompts of a shape, the row of the padding included. Attention has an empty tile for each
row that a step lacks."""
CROWD_TOKENS, MAX_PROMPT_ROWS = 128, 32
"""A shape of so many tokens has so many. Such a step takes the GPU no longer than the host takes to
launch it, so graphs gain more than empty tiles cost: 13 to 25 % for 17 prompts at once on an H200.
With 64 rows in larger shapes, other crowds of prompts lost 4 to 12 %."""
MAX_PADDING = 256
"""More padding tokens take the GPU longer than the host takes to launch the step: 6 ms of a step of
16 to 25 for an 8B model on an H200, less for smaller ones."""


class GraphShape(NamedTuple):
    """The sizes that a graph is captured for."""

    tokens: int
    decodes: int
    variant: str = ""

    @property
    def prompt_rows(self) -> int:
        return MAX_PROMPT_ROWS if self.tokens == CROWD_TOKENS else PROMPT_ROWS

    @property
    def rows(self) -> int:
        return self.decodes + self.prompt_rows

    @property
    def has_prompts(self) -> bool:
        """Whether steps have rows of prompts; else they have a graph for decoding rows alone."""
        return self.decodes < self.tokens


def graph_shapes(
    max_tokens: int, max_rows: int, captured_tokens: int = CAPTURED_TOKENS
) -> list[GraphShape]:
    """Return the shapes of steps of up to so many tokens and decoding rows, ascending.

    A shape may have up to MAX_PROMPT_ROWS rows more than max_rows. captured_tokens: of the largest
    step that is captured, if it has prompts: quire.config.memory.captured_steps.
    """
    most, found = min(max_tokens, captured_tokens), []
    grids = (TOKEN_COUNTS, DECODE_COUNTS), (LARGE_TOKEN_COUNTS, LARGE_DECODE_COUNTS)
    for token_counts, decode_counts in grids:
        decodes = sorted({min(n, max_rows) for n in decode_counts})
        found += [GraphShape(t, d) for t in token_counts if t <= most for d in decodes if d < t]
    return found


def select_graph_shape(inputs: StepBatch, shapes: Sequence[GraphShape]) -> GraphShape | None:
    """Return the first, smallest shape that holds the step; None: none does with little padding."""
    decodes = inputs.num_decodes
    rows = RankRows(decodes, len(inputs.slots) - decodes)
    return _select_shape([len(inputs.token_ids)], [rows], shapes)


def select_shared_shape(
    shared: DataParallelTokens, sizes: Sequence[int], shapes: Sequence[GraphShape]
) -> GraphShape | None:
    """Return the smallest shape that holds the step of each data-parallel rank.

    sizes: of steps whose rows all decode, ascending; such a shape has no rows of prompts.
    """
    if not shared.rows:
        return None
    if shared.decodes:
        size = sizes[bisect_left(sizes, max(shared.counts))]
        return GraphShape(size, size)
    return _select_shape(shared.counts, shared.rows, shapes)


def _select_shape(
    counts: Sequence[int], rows: Sequence[RankRows], shapes: Sequence[GraphShape]
) -> GraphShape | None:
    """counts: of tokens of each rank."""
    decodes, prompts = max(one.ones for one in rows), max(one.others for one in rows)
    most = max(count - one.ones for count, one in zip(counts, rows, strict=True))
    for shape in shapes:
        has_rows = decodes <= shape.decodes and prompts < shape.prompt_rows
        fits = has_rows and shape.decodes + most <= shape.tokens
        if fits and shape.tokens - max(counts) <= max_padding(shape):
            return shape
    return None


def max_padding(shape: GraphShape) -> int:
    """Return how many tokens of a shape may be padding."""
    return MAX_PADDING if shape.tokens <= CAPTURED_TOKENS else shape.tokens // 3


def pad_to_shape(inputs: StepBatch, shape: GraphShape, axes: int = 1) -> StepBatch:
    """Return the step with its rows and tokens padded to the shape; `rows` have no meaning.

    axes: of the rotary positions that the graph reads.
    """
    decodes, width = inputs.num_decodes, shape.tokens
    shift = shape.decodes - decodes
    used = len(inputs.token_ids) + shift
    prompts = len(inputs.slots) - decodes
    starts = np.full(shape.rows + 1, used, dtype=np.int32)
    starts[: shape.decodes] = np.arange(shape.decodes)
    starts[shape.decodes : shape.decodes + prompts + 1] = inputs.q_starts[decodes:] + shift
    starts[-1] = width
    sampled = inputs.sampled_tokens + np.where(inputs.sampled_tokens >= decodes, shift, 0).astype(
        np.int32
    )
    return StepBatch(
        rows=range(shape.rows),
        slots=_pad_split(inputs.slots, decodes, shape.decodes, shape.rows, 0),
        token_ids=_pad_split(inputs.token_ids, decodes, shape.decodes, width, 0),
        token_slots=_pad_split(inputs.token_slots, decodes, shape.decodes, width, -1),
        positions=_pad_split(inputs.positions, decodes, shape.decodes, width, 0),
        q_starts=starts,
        contexts=_pad_split(inputs.contexts, decodes, shape.decodes, shape.rows, 0),
        sampled_tokens=sampled,
        sampled_rows=inputs.sampled_rows,
        sampled_slots=inputs.sampled_slots,
        num_outputs=inputs.num_outputs,
        num_decodes=shape.decodes,
        max_query=width,
        max_context=inputs.max_context,
        decode_only=False,
        rotary=_pad_rotary(inputs, shape, axes),
        continued=inputs.continued,
    )


def without_padding(states: Tensor, inputs: StepBatch, shape: GraphShape) -> Tensor:
    """Return the states [T, E] of the step's tokens, of those of the padded step."""
    decodes, places = inputs.num_decodes, shape.decodes
    end = places + len(inputs.token_ids) - decodes
    return torch.cat([states[:decodes], states[places:end]])


def pad_tokens(values: Ints, inputs: StepBatch, shape: GraphShape) -> Ints:
    """Return numbers of the step's tokens [T], of those of the padded step; 0 of the padding."""
    return _pad_split(values, inputs.num_decodes, shape.decodes, shape.tokens, 0)


def _pad_rotary(inputs: StepBatch, shape: GraphShape, axes: int) -> Ints | None:
    if inputs.rotary is None and axes == 1:
        return None
    spread = np.broadcast_to(inputs.rotary_positions, (axes, len(inputs.positions)))
    decodes, places = inputs.num_decodes, shape.decodes
    return np.concatenate([_pad_split(one, decodes, places, shape.tokens, 0) for one in spread])


def _pad_split(values: Ints, decodes: int, places: int, length: int, blank: int) -> Ints:
    """Return the decodes' values from 0 on, the others' from `places` on, `blank` elsewhere."""
    out = np.full(length, blank, dtype=np.int32)
    out[:decodes] = values[:decodes]
    out[places : places + len(values) - decodes] = values[decodes:]
    return out
