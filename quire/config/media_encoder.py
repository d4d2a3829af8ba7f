"""Media encoder: decides how many rows of images, video and audio a step makes, and how many the
device keeps."""

from __future__ import annotations

from dataclasses import replace

from quire.config.decisions import DecisionLog
from quire.config.engine_config import MediaEncoderSection
from quire.config.facts import ITEMSIZE, ModelFacts
from quire.config.memory.memory_plan import GIB, EngineShape
from quire.config.memory.part_facts import PAGE_ROWS
from quire.errors import ConfigError


def resolve_encoder_rows(
    given_gb: float | None, model: ModelFacts, shape: EngineShape, why: DecisionLog
) -> EngineShape:
    """Return the shape with the rows of the media encoder. given_gb: mm_encoder_cache_gb."""
    encoder = model.media_encoder
    if encoder is None:
        if given_gb is not None:
            raise ConfigError("mm_encoder_cache_gb: this engine reads text only; leave it out")
        return shape
    largest = min(max(encoder.largest.values()), shape.max_model_len)
    step = max(largest, shape.max_num_batched_tokens)
    reason = "the tokens of a step" if step > largest else "the largest item"
    why.record("media_encoder.step_rows", step, reason)
    row = encoder.width * ITEMSIZE[shape.dtype]
    if given_gb is None:
        cache = -(-step // PAGE_ROWS) * PAGE_ROWS
        why.record("media_encoder.cache_rows", cache, f"those of a step, {row} bytes each")
    else:
        cache = int(given_gb * GIB / row) // PAGE_ROWS * PAGE_ROWS
        if not cache:
            raise ConfigError(
                f"mm_encoder_cache_gb must have space for {PAGE_ROWS} embeddings of {row} bytes, "
                f"got {given_gb:g} GiB"
            )
        why.record("media_encoder.cache_rows", cache, f"requested, {row} bytes each")
    return replace(shape, encoder_step_rows=step, encoder_cache_rows=cache)


def resolve_media_encoder(model: ModelFacts, shape: EngineShape) -> MediaEncoderSection | None:
    """Resolve the section. None: the engine reads text only."""
    encoder = model.media_encoder
    if encoder is None:
        return None
    return MediaEncoderSection(
        modalities=tuple(encoder.largest),
        step_rows=shape.encoder_step_rows,
        cache_rows=shape.encoder_cache_rows,
        row_bytes=encoder.width * ITEMSIZE[shape.dtype],
        bidirectional=encoder.bidirectional,
    )
