"""Long contexts: the variant of steps whose decoding rows divide their keys evenly among programs.

Without it each row has as many programs as any other of the step, and a captured graph fixes how
many: one long context then leaves most of a GPU idle, and so do rows that ended.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Final, cast

from torch import Tensor

from quire.attention.base import BalancedAttentionStep
from quire.models.base import StepInputs
from quire.runner.parts.base import NoOwnGraphs

LONG_CONTEXT: Final = 4096
"""Tokens from which a context is long: a row then reads for longer than kernels need to begin."""
LEAST_KEYS: Final = 16384
"""Tokens that the rows of a step read: fewer are read as fast by one kernel with norms, rotation
and cache write in it."""
LONE_CONTEXT: Final = 65536
"""Tokens of a context that is a step's only row: with fewer, kernels apart take longer than they
save."""
MOST_ROWS: Final = 256
"""Rows of a step with the variant."""
LARGE_SHARE: Final = 1 / 64
"""Share of all tokens from which the longest context takes longer than the rest of a crowd."""


class LongContextRows(NoOwnGraphs):
    """The variant. It changes nothing but how attention is divided."""

    name = "long contexts"
    changes_logits = False
    decodes = True
    has_prompts = False
    least_rows = 1
    most_rows = MOST_ROWS
    few_graphs = True
    rotary_axes = 1

    def reset(self) -> None:
        pass

    def inputs(self, step: StepInputs) -> StepInputs:
        attention = cast(BalancedAttentionStep, step.attention)
        return replace(step, attention=attention.with_balance())

    def forward(self, token_slots: Tensor) -> AbstractContextManager[object]:
        return nullcontext()

    def logits(self, row_slots: Tensor) -> AbstractContextManager[object]:
        return nullcontext()


def attach_long_contexts(model: object) -> None:
    """Give a model the variant, for the parts of steps."""
    model.long_contexts = LongContextRows()  # type: ignore[attr-defined]


def find_long_contexts(model: object) -> LongContextRows | None:
    """Return the variant of a model; None: it has none."""
    found = getattr(model, "long_contexts", None)
    assert found is None or isinstance(found, LongContextRows)
    return found
