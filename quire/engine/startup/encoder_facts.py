"""Facts of a media encoder, read from a model of shapes, for the memory plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.config.facts import ModelFacts
from quire.config.memory.part_facts import MediaEncoderFacts
from quire.config.options import Options
from quire.layers import Linear
from quire.models.base import Hf, ModelConfig
from quire.models.build import describe_media_encoder, read_model_config


def with_media_encoder(facts: ModelFacts, options: Options, hf: Hf, code: Path) -> ModelFacts:
    """Add the facts of the media encoder of a config.json, and of the layers that attend to its
    output. code: as in read_model_config()."""
    trusted = code if options.model.trust_remote_code else None
    config = read_model_config(
        hf,
        options.model.model_impl,
        trusted,
        language_model_only=options.media.language_model_only,
    )[1]
    encoder = media_encoder_facts(config)
    if facts.encoder is None or facts.encoder.start_id is not None:
        return replace(facts, media_encoder=encoder)
    kept = None if encoder is None else facts.encoder
    return replace(facts, media_encoder=encoder, layers=config.attention_layers(), encoder=kept)


def media_encoder_facts(config: ModelConfig) -> MediaEncoderFacts | None:
    """Return the facts of a model's media encoder; None: it has none."""
    encoder = describe_media_encoder(config)
    if encoder is None:
        return None
    layers = [module for module in encoder.modules() if isinstance(module, Linear)]
    return MediaEncoderFacts(
        width=encoder.width,
        largest={one: encoder.max_rows(one) for one in encoder.modalities},
        widest=max(
            (one.inputs + sum(out.rows for out in one.outputs) for one in layers),
            default=encoder.width,
        ),
        bidirectional=encoder.bidirectional,
        patches_per_row=encoder.patches_per_row,
        slices=encoder.slices,
    )
