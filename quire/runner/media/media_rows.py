"""Media rows: the variant of steps in which rows of media items take the place of embeddings.

A token id of FIRST_ROW is row 0 of the encoder pool, FIRST_ROW - 1 is row 1, and so on. Ids and
pool have fixed addresses, so CUDA graphs can read both. Rows of a model with DeepStack are wider
than embeddings: what is behind these goes to its first layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from quire.core.types import UNKNOWN
from quire.kernels.framework import lazy_fusion
from quire.layers import Rope
from quire.models.base import LanguageModel, ResultRows, StepInputs
from quire.runner.media.encoder_pool import EncoderPool
from quire.runner.parts.base import OwnGraphs

FIRST_ROW: Final = UNKNOWN - 1


class MediaRows:
    """The variant of a model with a media encoder."""

    name = "media"
    changes_logits = False
    decodes = False
    least_rows = 1
    most_rows = None
    few_graphs = False
    has_prompts = True

    def __init__(
        self, embed: Callable[[Tensor], Tensor], pool: EncoderPool, rotary_axes: int
    ) -> None:
        """embed: token ids [T] -> [T, E]."""
        self._embed = embed
        self.pool = pool
        self.rotary_axes = rotary_axes

    def reset(self) -> None:
        """Allocate what graphs that are captured next read."""
        self.pool.allocate()
        self.pool.graphs.allocate()

    def own_graphs(self, graphs: OwnGraphs) -> Sequence[int]:
        """Those of the encoder."""
        self.pool.graphs.bind(graphs)
        return self.pool.graphs.sizes[::-1]

    def prepare_own(self, key: int) -> None:
        self.pool.graphs.prepare(key)

    def launch_own(self, key: int) -> None:
        self.pool.graphs.launch(key)

    def forward(self, token_slots: Tensor) -> AbstractContextManager[object]:
        return nullcontext()

    def logits(self, row_slots: Tensor) -> AbstractContextManager[object]:
        return nullcontext()

    def inputs(
        self, step: StepInputs, embed: Callable[[Tensor], Tensor] | None = None
    ) -> StepInputs:
        """Put rows of the pool in place of embeddings or results. Such tokens have id 0 then.

        Rows of some encoders are added to the embedding of one token. embed: of the model that
        reads the step; None: the one with the encoder.
        """
        if step.carried is not None:
            return step
        ids = step.token_ids
        is_row = (ids <= FIRST_ROW)[:, None]
        token_ids = ids.clamp(min=0)
        rows = self.pool.gather((FIRST_ROW - ids).clamp(min=0))
        if self.pool.makes_results:
            return replace(step, token_ids=token_ids, result_rows=ResultRows(is_row, rows))
        vectors, embed = step.inputs_embeds, embed or self._embed
        if vectors is None:
            vectors = embed(token_ids)
            lazy_fusion.flush()
        rows = rows.to(vectors.dtype)
        if self.pool.added_token is not None:
            rows = rows + self._added(embed, self.pool.added_token, ids)
        width = vectors.shape[1]
        embeds = torch.where(is_row, rows[:, :width], vectors)
        step = replace(step, token_ids=token_ids, inputs_embeds=embeds)
        if rows.shape[1] == width:
            return step
        return replace(step, deepstack=torch.where(is_row, rows[:, width:], 0))

    def _added(self, embed: Callable[[Tensor], Tensor], token: int, ids: Tensor) -> Tensor:
        """Return the embedding of a token: [1, E]."""
        found = embed(torch.full_like(ids[:1], token))
        lazy_fusion.flush()
        return found


def attach_media_rows(
    model: LanguageModel, num_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Give a model with a media encoder its pool and the variant, for the parts of steps."""
    if model.media_encoder is None:
        return
    pool = EncoderPool(model.media_encoder, num_rows, dtype, device)
    assert isinstance(model, nn.Module)
    layers = getattr(model, "layers", None)  # an encoder has positions of its own
    has_axes = isinstance(layers, nn.Module) and any(
        isinstance(m, Rope) and m.config.axes for m in layers.modules()
    )
    rows = MediaRows(model.embed_tokens, pool, 3 if has_axes else 1)
    model.media_rows = rows  # type: ignore[assignment]


def find_media_rows(model: object) -> MediaRows | None:
    """Return the variant of a model; None: of one without an encoder, as later stages have."""
    found = getattr(model, "media_rows", None)
    assert found is None or isinstance(found, MediaRows)
    return found
