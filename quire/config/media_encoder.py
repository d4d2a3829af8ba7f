"""Media encoder: decides how many rows of images, video and audio a step makes, and how many the
device keeps."""

from __future__ import annotations

from dataclasses import replace

from quire.config.decisions import DecisionLog
from quire.config.engine_config import MediaEncoderSection
from quire.config.facts import ITEMSIZE, ModelFacts
from quire.config.media import item_counts
from quire.config.memory.memory_plan import GIB, EngineShape
from quire.config.memory.part_facts import PAGE_ROWS, MediaEncoderFacts
from quire.config.options import Options
from quire.errors import ConfigError

USUAL_PATCHES = 4
"""Patches of a row of most families: a row of more counts as several tokens of a step."""


USUAL_IMAGES = 2
"""Images of the largest size that cross attention reads of one prompt, unless limit_mm_per_prompt
has another number."""


def resolve_source_len(options: Options, model: ModelFacts, why: DecisionLog) -> int:
    """Resolve the positions of all sources of a request; 0: there are none."""
    if model.encoder is None:
        return 0
    if model.encoder.start_id is not None or model.media_encoder is None:
        return model.encoder.max_len
    count = item_counts(options.media).get("image", USUAL_IMAGES)
    length = max(count, 1) * model.media_encoder.largest["image"]
    return int(
        why.record("encoder.max_len", length, f"of {max(count, 1)} images of the largest size")
    )


def _largest_items(options: Options, encoder: MediaEncoderFacts) -> dict[str, int]:
    """Return the rows of the largest item of each modality that requests may have."""
    counts = item_counts(options.media)
    return {one: rows for one, rows in encoder.largest.items() if counts.get(one, 1)}


def resolve_encoder_rows(
    options: Options, model: ModelFacts, shape: EngineShape, why: DecisionLog
) -> EngineShape:
    """Return the shape with the rows of the media encoder."""
    encoder, given_gb = model.media_encoder, options.cache.mm_encoder_cache_gb
    if encoder is None:
        if given_gb is not None:
            raise ConfigError("mm_encoder_cache_gb: this engine reads text only; leave it out")
        return shape
    items = _largest_items(options, encoder)
    if not items:
        why.record("media_encoder.cache_rows", 0, "limit_mm_per_prompt allows no item")
        return shape
    if model.encoder is not None:  # the cache has the KV of its rows
        step = max(*items.values(), shape.max_encoder_len)
        why.record("media_encoder.step_rows", step, "the positions of the longest source")
        return replace(shape, encoder_step_rows=step)
    largest = min(max(items.values()), shape.max_model_len)
    tokens = shape.max_num_batched_tokens * USUAL_PATCHES // encoder.patches_per_row
    step = max(largest, tokens)
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


def resolve_media_encoder(
    options: Options, model: ModelFacts, shape: EngineShape
) -> MediaEncoderSection | None:
    """Resolve the section. None: the engine reads text only."""
    encoder = model.media_encoder
    if encoder is None or not shape.encoder_cache_rows:
        return None
    return MediaEncoderSection(
        modalities=tuple(_largest_items(options, encoder)),
        step_rows=shape.encoder_step_rows,
        cache_rows=shape.encoder_cache_rows,
        row_bytes=encoder.width * ITEMSIZE[shape.dtype],
        bidirectional=encoder.bidirectional,
        slices=encoder.slices,
    )
