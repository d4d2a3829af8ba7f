"""Config of a model that runs through transformers: what the probe has found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.config.architectures import CLASSES, check_class
from quire.config.conventions import ENCODERS
from quire.config.facts import context_length
from quire.config.memory.kv_layout import LayerFacts
from quire.errors import ConfigError
from quire.models.base import Hf, ModelConfig
from quire.models.fallback import hf_classes
from quire.models.fallback.probe import NAME, AttentionCall, Probe, check_mixing, run_probe
from quire.models.fallback.registration import register
from quire.models.fallback.rotary import fix_frequencies

UNLIMITED = 1 << 17
"""Positions of a model whose config.json has no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    hf: Hf
    code: Path | None  # folder whose Python code may run
    version: str  # of transformers
    probe: Probe
    first_position: int = 0  # number of the first one, as the class counts

    @classmethod
    def from_hf(cls, hf: Hf, code: Path | None = None) -> Config:
        """Probe the model of a config.json. Raises ConfigError."""
        model_type = str(hf.get("model_type", ""))
        check_class(model_type)
        version = hf_classes.import_transformers().__version__
        register()
        config = hf_classes.read_config(hf, code)
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(
                f"models of type {model_type!r:.80} are not supported: they are encoder-decoders, "
                "of which the class of transformers serves the decoder only"
            )
        both = model_type in ENCODERS
        if both:
            kind = hf_classes.encoder_class(config, "none")
        else:
            kind = hf_classes.model_class(config, hf, code)
        max_len = context_length(plain_fields(config)) or UNLIMITED
        first = config.pad_token_id + 1 if ENCODERS.get(model_type) else 0
        max_len -= first
        try:
            skeleton = hf_classes.build_skeleton(kind, config, torch.bfloat16, NAME, NAME)
        except ConfigError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())
            if isinstance(error, KeyError) and NAME in reason:  # a table of their own classes
                reason = "its layers have attention of their own, which cannot be replaced"
            raise ConfigError(
                f"{kind.__name__} of transformers cannot be built from config.json: {reason:.300}"
            ) from error
        fix_frequencies(skeleton, max_len)
        found = run_probe(skeleton, max_len, both=both)
        if model_type not in CLASSES and not both:  # those are known, and tested
            check_mixing(skeleton, max_len)
        call = found.calls[0]
        text = config.get_text_config()
        return cls(
            vocab=int(text.vocab_size),
            hidden=found.hidden,
            layers=len(found.calls),
            heads=max(call.heads for call in found.calls),
            kv_heads=call.kv_heads,
            head_dim=call.head_dim,
            mlp=_mlp_width(text) or 4 * found.hidden,
            max_len=max_len,
            norm_eps=0.0,
            act="silu",
            tied=bool(getattr(skeleton, "all_tied_weights_keys", None)),
            dtype=_dtype_of(text, config),
            hf=hf,
            code=code,
            version=version,
            probe=found,
            bidirectional=both,
            first_position=first,
        )

    def usual_fields(self) -> dict[str, Any]:
        """Return config.json with the defaults of its class, under the usual names."""
        fields = plain_fields(hf_classes.read_config(self.hf, self.code))
        return {"num_hidden_layers": self.layers} | fields | {"intermediate_size": self.mlp}

    def attention_layers(self) -> tuple[LayerFacts, ...]:
        """Return what each call with keys and values of its own stores in the cache."""
        return tuple(
            LayerFacts(call.kv_heads, call.head_dim, self.window_of(call))
            for call in self.probe.calls
            if call.source is None and not self.bidirectional
        )

    def window_of(self, call: AttentionCall) -> int | None:
        """Return the window of a call; None if it covers every served length."""
        return call.window if call.window is not None and call.window < self.max_len else None


def plain_fields(config: Any) -> dict[str, Any]:
    """Return config.json as other code of quire reads it: with the usual names of the sizes."""
    text = config.get_text_config()
    fields: dict[str, Any] = {**config.to_dict(), **text.to_dict()}
    for usual in text.attribute_map:
        fields.setdefault(usual, getattr(text, usual, None))
    return {key: value for key, value in fields.items() if value is not None}


def _mlp_width(config: Any) -> int:
    """Return the widest MLP's width; 0 if the config has no field of the usual name."""
    width = getattr(config, "intermediate_size", None) or 0
    return max(width) if isinstance(width, (list, tuple)) else int(width)


def _dtype_of(*configs: Any) -> str | None:
    found = next((one.dtype for one in configs if getattr(one, "dtype", None) is not None), None)
    return None if found is None else str(found).removeprefix("torch.")
