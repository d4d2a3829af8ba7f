"""Media warm-up: images or recordings through the encoder, in a start on a GPU.

A small one has its kernels compiled and loaded before the engine is ready: the first request with
media would wait for seconds otherwise. The largest show how much memory the encoder takes.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from quire.config.engine_config import EngineConfig
from quire.config.memory.part_facts import PAGE_ROWS
from quire.core.params import SamplingParams
from quire.core.types import MediaItem, Request, StopConditions
from quire.errors import RequestError
from quire.media.processor import (
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    MediaProcessor,
    ProcessorFiles,
    processor_type,
)
from quire.runner.media.encoder_pool import EncodeItem

SIDE = 224
"""Pixels of each side of the image."""
DIGEST = bytes(32)


LARGE_SIDES = (3584, 1024, SIDE)
LARGE_SECONDS = (30, 1)
"""Items among which the largest is sought."""


def media_request(config: EngineConfig) -> Request | None:
    """Return a request of one token with a small item. None: the model reads text only.

    The prompt has as many tokens as the encoder makes rows; which tokens does not matter.
    """
    processor = _processor_of(config)
    if processor is None or config.media is None:
        return None
    with suppress(RequestError):  # limits or options that so small an item does not fit
        made = processor.process(_example(processor, SIDE, 1), config.media.kwargs)
        expansion = processor.expand(made, 1)
        rows = expansion.rows
        item = MediaItem(
            made.modality,
            DIGEST,
            0,
            max(rows, 1),
            ((0, rows),) if rows else (),
            made.tensors,
            expansion.bidirectional,
            expansion.source_rows,
        )
        return Request(
            "start-media",
            (0,) * (item.length + 1),
            StopConditions(max_tokens=1),
            SamplingParams(temperature=0.0),
            read_prefix_cache=False,
            media=(item,),
            extra_content=((0, DIGEST),),
        )
    return None


def largest_items(config: EngineConfig) -> list[EncodeItem]:
    """Return items with as many rows as a step may encode, of the largest that were tried.

    They are written to the same pages. [] of a model that reads text only.
    """
    processor, section = _processor_of(config), config.media_encoder
    if processor is None or section is None or config.media is None:
        return []
    for side, seconds in zip(LARGE_SIDES, (LARGE_SECONDS[0], *LARGE_SECONDS)):
        with suppress(RequestError):  # larger than limits or options allow
            made = processor.process(_example(processor, side, seconds), config.media.kwargs)
            rows = processor.expand(made, 1).rows
            if rows > section.step_rows:
                continue
            pages = tuple(range(-(-rows // PAGE_ROWS)))
            return [EncodeItem(made.modality, rows, made.tensors, pages)] * (
                section.step_rows // rows
            )
    return []


def _processor_of(config: EngineConfig) -> MediaProcessor | None:
    """Return a processor that knows no token. None: the model reads text only."""
    section = config.media
    kind = processor_type(section.family) if section is not None and config.reads_media else None
    if section is None or kind is None:
        return None
    return kind(
        ProcessorFiles(
            section.config,
            section.preprocessors,
            section.processor,
            encode=lambda text: (0,),
            vocabulary=lambda text: 0,
        )
    )


def _example(processor: MediaProcessor, side: int, seconds: int) -> DecodedMedia:
    if "image" in processor.modalities:
        return DecodedImage(np.zeros((side, side, 3), np.uint8))
    rate = processor.sampling_rate
    return DecodedAudio(np.zeros(seconds * rate, np.float32), rate)
