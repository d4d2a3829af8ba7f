"""Encoder part: encodes the sources of sequences that start with a step, before the decoder runs.

A source is brought by the one sequence whose start writes its blocks; others find them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

import msgspec
import numpy as np
import torch

from quire.attention.base import CrossAttentionStep
from quire.core.media.sources import sources_of
from quire.core.types import MediaItem, Sequence, StepPlan
from quire.kernels.framework import lazy_fusion
from quire.models.base import (
    EncoderDecoderModel,
    EncoderInput,
    LanguageModel,
    SourceInputs,
    StepInputs,
)
from quire.runner.parts.base import ChangeTensors, StepPart, StepVariant
from quire.runner.step_batch import StepBatch
from quire.sampling.h2d import bytes_to_device, to_device


class EncoderSource(msgspec.Struct, frozen=True, array_like=True):
    """One source, and the blocks that get the keys and values of its output."""

    token_ids: tuple[int, ...]
    blocks: list[int]
    slot: int  # of the sequence
    media: tuple[MediaItem, ...] = ()  # its recording or images


class EncoderPart(StepPart, frozen=True, array_like=True):
    """All sources of one step."""

    sources: tuple[EncoderSource, ...]

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> EncoderPart | None:
        """Copy the new sources from the plan; None if there is none."""
        starting = [seq for seq in plan.joins if seq.encoder_step == plan.step]
        if not starting:
            return None
        return cls(tuple(one for seq in starting for one in _new_sources(seq)))

    def with_tensors(self, change: ChangeTensors) -> EncoderPart:
        def changed(item: MediaItem) -> MediaItem:
            return replace(item, tensors=change(item.tensors))

        sources = [
            msgspec.structs.replace(one, media=tuple([changed(item) for item in one.media]))
            for one in self.sources
        ]
        return EncoderPart(tuple(sources))

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
            media=tuple(
                EncoderInput(
                    item.modality,
                    {
                        one.name: bytes_to_device(
                            one.data, getattr(torch, one.dtype), one.shape, device
                        )
                        for one in item.tensors
                    },
                )
                for one in self.sources
                for item in one.media
            ),
            media_rows=to_device(self._media_rows(lengths), device),
        )
        slots = np.repeat(np.array([one.slot for one in self.sources], np.int32), lengths)
        with variant.forward(to_device(slots, device)):
            cast(EncoderDecoderModel, model).encode(source)
        lazy_fusion.flush()
        return step

    def _media_rows(self, lengths: Seq[int]) -> np.ndarray:
        """Return the positions among packed sources that take rows of media: int64 [n]."""
        firsts = itertools.accumulate([0, *lengths])
        runs = [
            np.arange(count) + first + item.start + offset
            for source, first in zip(self.sources, firsts)
            for item in source.media
            for offset, count in item.runs
        ]
        return np.concatenate(runs) if runs else np.zeros(0, np.int64)


def _new_sources(seq: Sequence) -> Iterator[EncoderSource]:
    """Yield the sources that the step in which it starts encodes."""
    sources, ids = sources_of(seq.request), seq.request.encoder_prompt
    for i in seq.new_sources:
        made = ids or (0,) * sources[i].length
        yield EncoderSource(made, list(seq.cross_tables[i]), seq.slot, sources[i].items)


PART = EncoderPart
