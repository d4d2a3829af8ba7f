"""Model conventions: define how a family of models reads fields absent from its config.json.

A model file has them as a literal, `CONVENTIONS = {...}`, which is read without importing the
file, so that a model can be planned without torch. Its Config follows them too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.registry import PluginRegistry

Json = Mapping[str, Any]
LAST_LOWER_LAYER = 28
"""Default of max_window_layers."""


ENCODERS: dict[str, bool] = {
    "data2vec-text": True,
    "roberta-prelayernorm": True,
    "roc_bert": False,
    "ultrabert": False,
    "xlm-roberta-xl": True,
}
"""Encoders that run through transformers -> whether positions start after the padding token's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions:
    """Conventions of one family."""

    windows: Literal["all", "periodic", "upper", "alternate", "attention_types"] = "all"
    """Layers with a window where `layer_types` is absent: all; all but every `period`-th; from
    max_window_layers on; every other one below max_window_layers; by attention_types."""
    window: int | None = None  # length of the window if sliding_window is absent
    period: int = 1
    windows_on_request: bool = False  # only with use_sliding_window
    mlp_kind: Literal["gated", "plain"] = "gated"  # three matrices or two
    mlp_joined: bool = False  # intermediate_size is that of the gate and what it gates together
    positions_kind: Literal["rotary", "learned", "alibi", "relative", "computed"] = "rotary"
    tied: bool = False  # if tie_word_embeddings is absent
    source: Literal["tokens", "audio", "image", "images"] = "tokens"
    """What the encoder of an encoder-decoder reads; "images": a decoder reads those of its prompts
    by layers of cross attention."""
    fits_float16: bool = True  # False: activations overflow
    scaling_extends: bool = True  # rope scaling stretches max_position_embeddings
    uncached_layers: str = ""  # the field with the numbers of layers that keep nothing
    positions_after_padding: bool = False  # the first one is pad_token_id + 1
    bidirectional: bool = False  # an encoder: every token attends to all others
    embedding_keys: tuple[str, ...] = ("word_embed_proj_dim", "embedding_size")
    """Fields with the width of the vectors of tokens, if that is not the hidden size."""
    embedding_state: Literal["cls", "last"] = "cls"  # of an encoder: the token that is pooled
    embedding_field: str = ""  # the field with the size of projected embeddings
    states_are_results: bool = False  # of all tokens, as they are: no vector is normalized
    ends_prompts: bool = False  # an embedding is the state of the first end token
    pads_prompts: bool = False  # texts are padded to all positions, and tokens attend to that
    windows_unscaled: bool = False  # rope scaling is for layers without a window
    recurrent: Literal["", "mamba", "mamba2", "gated_delta_net", "short_conv"] = ""
    """Kind of the layers that keep a state of a sequence; "": there are none."""
    recurrent_layers: Literal["all", "both", "interval", "period", "indices", "pattern"] = "all"
    """Which these are, where `layer_types` is absent: all; all, with attention beside; what
    full_attention_interval, attn_layer_period, attn_layer_indices or hybrid_override_pattern leaves
    (quire.config.recurrent_layers)."""
    mtp_layers: int = 0
    """Layers of its checkpoints that predict further tokens, where config.json states none."""
    defaults: Json = field(default_factory=dict)  # other fields that config.json may leave out
    names: Json = field(default_factory=dict)  # of fields in config.json -> usual ones
    nested_defaults: Json = field(default_factory=dict)
    """More that the text half of a multimodal config.json may leave out."""

    def window_per_layer(self, hf: Json, count: int) -> list[int | None]:
        """Return the window of each layer, None for a layer without one."""
        if self.windows == "attention_types":
            kinds = expand_attention_types(hf)
            return [hf["window_size"] if kind == "local" else None for kind in kinds]
        window = hf.get("sliding_window") if "sliding_window" in hf else self.window
        if not window or hf.get("use_sliding_window", not self.windows_on_request) is False:
            return [None] * count
        if types := hf.get("layer_types"):
            return [window if "sliding" in types[i] else None for i in range(count)]
        return [window if self._slides(hf, i) else None for i in range(count)]

    def _slides(self, hf: Json, layer: int) -> bool:
        border = hf.get("max_window_layers")
        if self.windows == "periodic":
            return bool((layer + 1) % int(hf.get("sliding_window_pattern") or self.period))
        if self.windows == "upper":
            return layer >= int(border or 0)
        if self.windows == "alternate":
            return layer % 2 == 0 and layer < int(border or LAST_LOWER_LAYER)
        return True


def expand_attention_types(hf: Json) -> list[str]:
    """Return "global" or "local" per layer, of [[kinds of some layers, repetitions], ...]."""
    groups = hf.get("attention_types") or [[["global", "local"], 12]]
    return [kind for kinds, count in groups for kind in list(kinds) * int(count)]


def conventions_of(hf: Json) -> Conventions:
    """Return those of a config.json's model type; the defaults for an unknown type."""
    return _stated_conventions(str(hf.get("model_type", "")))


def with_usual_names(hf: Json) -> dict[str, Any]:
    """Return a config.json with the family's own fields under the usual names too."""
    names = conventions_of(hf).names
    return {**{usual: hf[own] for own, usual in names.items() if own in hf}, **hf}


def fill_defaults(hf: Json) -> dict[str, Any]:
    """Return a config.json with the family's defaults of fields that are absent or null.

    A list of layers gives their number too.
    """
    defaults = conventions_of(hf).defaults
    if layers := hf.get("layers_block_type"):
        defaults = {"num_hidden_layers": len(layers), **defaults}
    return {**hf, **{key: value for key, value in defaults.items() if hf.get(key) is None}}


@functools.lru_cache(maxsize=8)
def _stated_conventions(model_type: str) -> Conventions:
    models = PluginRegistry("quire.models")
    known = model_type in models.names()
    if not known and model_type in ENCODERS:
        return Conventions(
            mlp_kind="plain",
            positions_kind="learned",
            tied=True,
            bidirectional=True,
            positions_after_padding=ENCODERS[model_type],
        )
    return Conventions(**(models.read_literal(model_type, "CONVENTIONS") or {} if known else {}))


def spare_layers(hf: Json) -> tuple[str, ...]:
    """Parts of the names of layers after the last one."""
    hf = fill_defaults(hf)
    count = hf.get("num_nextn_predict_layers") or hf.get("num_mtp_modules") or 0
    first = int(hf.get("num_hidden_layers") or 0)
    return tuple(f"layers.{first + i}." for i in range(int(count)))
