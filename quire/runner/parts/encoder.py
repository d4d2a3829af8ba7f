"""Encoder part: encodes the sources of sequences that start with a step, before the decoder runs.

A source is brought by the one sequence whose start writes its blocks; others find them.
"""

from __future__ import annotations

from typing import cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.attention.base import CrossAttentionStep
from quire.core.types import MediaTensor, Request, StepPlan
from quire.kernels.framework import lazy_fusion
from quire.models.base import EncoderDecoderModel, LanguageModel, SourceInputs, StepInputs
from quire.runner.parts.base import StepPart, StepVariant
from quire.runner.step_batch import StepBatch
from quire.sampling.h2d import move_tensor, to_device


class EncoderSource(msgspec.Struct, frozen=True, array_like=True):
    """One source, and the blocks that get the keys and values of its output."""

    token_ids: tuple[int, ...]
    blocks: list[int]
    slot: int  # of the sequence
    features: MediaTensor | None = None  # of a recording; its token ids only count then


class EncoderPart(StepPart, frozen=True, array_like=True):
    """All sources of one step."""

    sources: tuple[EncoderSource, ...]

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> EncoderPart | None:
        """Copy the new sources from the plan; None if there is none."""
        starting = [seq for seq in plan.joins if seq.encoder_step == plan.step]
        if not starting:
            return None
        return cls(
            tuple(
                EncoderSource(
                    seq.request.encoder_prompt,
                    list(seq.cross_table),
                    seq.slot,
                    _features_of(seq.request),
                )
                for seq in starting
            )
        )

    def before_forward(
        self, model: LanguageModel, step: StepInputs, variant: StepVariant
    ) -> StepInputs:
        """Run the encoder, which fills the blocks."""
        attention = cast(CrossAttentionStep, step.attention)
        size, device = attention.block_size, step.token_ids.device
        lengths = [len(source.token_ids) for source in self.sources]
        positions = np.concatenate([np.arange(length) for length in lengths])
        blocks = np.concatenate(
            [np.array(one.blocks)[np.arange(n) // size] for one, n in zip(self.sources, lengths)]
        )
        ids = [token for source in self.sources for token in source.token_ids]
        source = SourceInputs(
            token_ids=to_device(np.array(ids, np.int32), device),
            positions=to_device(positions.astype(np.int32), device),
            starts=to_device(np.cumsum([0, *lengths], dtype=np.int32), device),
            longest=max(lengths),
            slots=to_device(blocks.astype(np.int64) * size + positions % size, device),
            attention=attention,
            features=tuple(
                _on_device(one.features, device) for one in self.sources if one.features is not None
            ),
        )
        slots = np.repeat(np.array([one.slot for one in self.sources], np.int32), lengths)
        with variant.forward(to_device(slots, device)):
            cast(EncoderDecoderModel, model).encode(source)
        lazy_fusion.flush()
        return step


def _features_of(request: Request) -> MediaTensor | None:
    return None if request.encoder_media is None else request.encoder_media.tensors[0]


def _on_device(tensor: MediaTensor, device: torch.device) -> Tensor:
    data = torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype))
    return move_tensor(data.view(tensor.shape), device)


PART = EncoderPart
