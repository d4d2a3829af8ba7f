"""Prompt embeddings part: puts vectors in place of the token embeddings of prompt positions.

A row that computes a chunk of a prompt brings the vectors of that chunk. Rows without vectors in
the same step keep the embeddings of their ids.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import torch

from quire.core.types import StepPlan
from quire.kernels.framework import lazy_fusion
from quire.models.base import LanguageModel, StepInputs
from quire.runner.parts.base import StepPart, StepVariant
from quire.runner.step_batch import StepBatch
from quire.sampling.h2d import move_tensor, to_device


class EmbedsPiece(msgspec.Struct, frozen=True, array_like=True):
    """Vectors of neighbouring tokens of a step."""

    first_token: int  # index among the step's T tokens
    dtype: str
    data: bytes  # [tokens, width]


class PromptEmbedsPart(StepPart, frozen=True, array_like=True):
    """All vectors of one step."""

    pieces: tuple[EmbedsPiece, ...]
    token_slots: bytes  # int32 [T], of each token's sequence

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> PromptEmbedsPart | None:
        """Copy the vectors from the plan; None if no row has any: that costs one attribute per
        row."""
        if not batch.may_have_prompts:
            return None
        pieces = []
        for at, i in enumerate(batch.rows):
            row = plan.rows[i]
            for embeds in row.seq.request.prompt_embeds:
                start = max(embeds.start, row.start)
                end = min(embeds.start + embeds.length, row.start + row.count)
                if start < end:
                    first = int(batch.q_starts[at]) + start - row.start
                    pieces.append(EmbedsPiece(first, embeds.dtype, embeds.rows(start, end)))
        return cls(tuple(pieces), batch.token_slots.tobytes()) if pieces else None

    def before_forward(
        self, model: LanguageModel, step: StepInputs, variant: StepVariant
    ) -> StepInputs:
        """Write the vectors over the token embeddings, on the first pipeline stage."""
        if step.carried is not None:
            return step
        vectors = step.inputs_embeds
        if vectors is None:
            slots = np.frombuffer(self.token_slots, np.int32).copy()
            with variant.forward(to_device(slots, step.token_ids.device)):
                vectors = model.embed_tokens(step.token_ids.clamp(min=0))  # rows of media too
            lazy_fusion.flush()
        for piece in self.pieces:
            data = torch.frombuffer(bytearray(piece.data), dtype=getattr(torch, piece.dtype))
            rows = data.view(-1, vectors.shape[1])
            end = piece.first_token + len(rows)
            vectors[piece.first_token : end] = move_tensor(rows, vectors.device)
        return replace(step, inputs_embeds=vectors)


PART = PromptEmbedsPart
