"""Shapes of mixed batches: pad steps with prompts to a few shapes so that graphs can replay them.

Up to some thousand tokens the host takes as long to launch such a step as the GPU to run it. A
shape has fixed places: decoding rows, padded; then the rows of prompts, the last of which has the
padding tokens. Padding has context 0 and no slot: it writes no keys, reads none, and its token is
dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.config.memory.memory_plan import CAPTURED_TOKENS
from quire.runner.step_batch import Ints, StepBatch

MAX_TOKENS = CAPTURED_TOKENS
"""A larger step keeps the GPU busy for longer than the host needs to launch it."""
MAX_TOKENS_WHEN_BUSY = 512
"""A larger step is replayed only if the GPU is idle: else the step before hides its launch, and
its padding would cost time."""
MAX_GRAPHS = 64
STEPS_BEFORE_CAPTURE = 2
"""The first steps of a shape are launched kernel by kernel: many shapes occur only once."""
PROMPT_ROW_COUNTS = (4, 16, 64)
"""Rows of prompts, the row of the padding included."""


class GraphShape(NamedTuple):
    """The sizes that a graph is captured for."""

    tokens: int
    decodes: int
    prompts: int

    @property
    def rows(self) -> int:
        return self.decodes + self.prompts


def select_graph_shape(
    inputs: StepBatch, most_tokens: int, most_rows: int, *, waits: bool
) -> GraphShape | None:
    """Return the smallest shape that holds the step; None: none does, or a replay is slower.

    most_tokens: of any step. most_rows: of any step. waits: the GPU is idle.
    """
    prompts = len(inputs.slots) - inputs.num_decodes
    places = next((n for n in PROMPT_ROW_COUNTS if n > prompts), None)
    if places is None:
        return None
    decodes = _padded_decodes(inputs.num_decodes)
    tokens = _padded_tokens(len(inputs.token_ids) - inputs.num_decodes + decodes)
    most = min(MAX_TOKENS if waits else MAX_TOKENS_WHEN_BUSY, most_tokens)
    fits = tokens <= most and decodes + places <= most_rows
    return GraphShape(tokens, decodes, places) if fits else None


def largest_graph_shape(most_tokens: int, most_rows: int) -> GraphShape | None:
    """Return the shape that takes the most memory; None if there is none."""
    tokens = next(
        (n for n in range(min(MAX_TOKENS, most_tokens), 0, -1) if _padded_tokens(n) == n), None
    )
    if tokens is None or most_rows < PROMPT_ROW_COUNTS[0]:
        return None
    decodes = max(n for n in range(most_rows - PROMPT_ROW_COUNTS[0] + 1) if _padded_decodes(n) == n)
    return GraphShape(tokens, min(decodes, tokens // 2), PROMPT_ROW_COUNTS[0])


def pad_to_shape(inputs: StepBatch, shape: GraphShape) -> StepBatch:
    """Return the step padded to the shape. `sampled_slots` end with -1; `rows` have no meaning."""
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
    none = shape.rows - len(sampled)
    return StepBatch(
        rows=range(shape.rows),
        slots=_pad_split(inputs.slots, decodes, shape.decodes, shape.rows, 0),
        token_ids=_pad_split(inputs.token_ids, decodes, shape.decodes, width, 0),
        token_slots=_pad_split(inputs.token_slots, decodes, shape.decodes, width, -1),
        positions=_pad_split(inputs.positions, decodes, shape.decodes, width, 0),
        q_starts=starts,
        contexts=_pad_split(inputs.contexts, decodes, shape.decodes, shape.rows, 0),
        sampled_tokens=np.pad(sampled, (0, none)),
        sampled_rows=inputs.sampled_rows,
        sampled_slots=inputs.sampled_slots + (-1,) * none,
        num_outputs=np.pad(inputs.num_outputs, (0, none)),
        num_decodes=shape.decodes,
        max_query=width,
        max_context=inputs.max_context,
        decode_only=False,
    )


def _pad_split(values: Ints, decodes: int, places: int, length: int, blank: int) -> Ints:
    """Return the decodes' values from 0 on, the others' from `places` on, `blank` elsewhere."""
    out = np.full(length, blank, dtype=np.int32)
    out[:decodes] = values[:decodes]
    out[places : places + len(values) - decodes] = values[decodes:]
    return out


def _padded_decodes(rows: int) -> int:
    """Return the number of places for so many decoding rows."""
    if rows <= 4:
        return 4 if rows else 0
    return -(-rows // 16) * 16 if rows <= 64 else -(-rows // 32) * 32


def _padded_tokens(count: int) -> int:
    """Return the padded token count of a step: the library's tiles pad a product about as far."""
    grain = 64 if count <= 512 else 128
    return -(-count // grain) * grain
