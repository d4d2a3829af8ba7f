"""Facts of a media encoder, read from a model of shapes, for the memory plan."""

from __future__ import annotations

from pathlib import Path

from quire.config.memory.part_facts import MediaEncoderFacts
from quire.config.options import Options
from quire.layers import Linear
from quire.models.base import Hf, ModelConfig
from quire.models.build import describe_media_encoder, read_model_config


def plan_media_encoder(options: Options, hf: Hf, code: Path) -> MediaEncoderFacts | None:
    """Return the facts of a config.json. code: as in read_model_config()."""
    trusted = code if options.model.trust_remote_code else None
    return media_encoder_facts(read_model_config(hf, options.model.model_impl, trusted)[1])


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
    )
