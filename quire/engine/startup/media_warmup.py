"""Media warm-up: one small image or recording through the encoder of a start on a GPU.

Its kernels are then compiled and loaded before the engine is ready. The first request with media
would wait for seconds otherwise.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from quire.config.engine_config import EngineConfig
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

SIDE = 224
"""Pixels of each side of the image."""
DIGEST = bytes(32)


def media_request(config: EngineConfig) -> Request | None:
    """Return a request of one token with a small item. None: the model reads text only.

    The prompt has as many tokens as the encoder makes rows; which tokens does not matter.
    """
    section = config.media
    kind = None if section is None or not config.media_encoder else processor_type(section.family)
    if section is None or kind is None:
        return None
    files = ProcessorFiles(
        section.config,
        section.preprocessors,
        section.processor,
        encode=lambda text: (0,),
        vocabulary=lambda text: 0,
    )
    with suppress(RequestError):  # limits or options that so small an item does not fit
        processor = kind(files)
        made = processor.process(_example(processor), section.kwargs)
        expansion = processor.expand(made, 1)
        rows = expansion.rows
        item = MediaItem(
            made.modality, DIGEST, 0, rows, ((0, rows),), made.tensors, expansion.bidirectional
        )
        return Request(
            "start-media",
            (0,) * (rows + 1),
            StopConditions(max_tokens=1),
            SamplingParams(temperature=0.0),
            read_prefix_cache=False,
            media=(item,),
            extra_content=((0, DIGEST),),
        )
    return None


def _example(processor: MediaProcessor) -> DecodedMedia:
    if "image" in processor.modalities:
        return DecodedImage(np.zeros((SIDE, SIDE, 3), np.uint8))
    return DecodedAudio(np.zeros(processor.sampling_rate, np.float32), processor.sampling_rate)
