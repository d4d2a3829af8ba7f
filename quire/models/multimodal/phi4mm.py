"""Phi-4-multimodal as the hub has it: other names, and the audio section as its code has it.

Source: model_type "phi4mm", https://huggingface.co/microsoft/Phi-4-multimodal-instruct;
        transformers convert_phi4_multimodal_weights_to_hf.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.multimodal import phi4_multimodal
from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal.phi4_multimodal import AT

NAMES = {
    "image_embed.glb_GN": "image.global_mark.weight",
    "image_embed.sub_GN": "image.sub_mark.weight",
}
PATHS = {
    "image_embed.img_projection.0": "image.projector.linear_1",
    "image_embed.img_projection.2": "image.projector.linear_2",
    "audio_embed.audio_projection.speech.0": "audio.speech.linear_1",
    "audio_embed.audio_projection.speech.2": "audio.speech.linear_2",
    "audio_embed.audio_projection.vision.0": "audio.with_images.linear_1",
    "audio_embed.audio_projection.vision.2": "audio.with_images.linear_2",
}
WITHIN = {
    "net.0.linear": "gate_up_proj",
    "net.2": "down_proj",
    "self_attn.linear_q": "self_attn.q_proj",
    "self_attn.linear_k": "self_attn.k_proj",
    "self_attn.linear_v": "self_attn.v_proj",
    "self_attn.linear_out": "self_attn.o_proj",
}
"""Paths in its checkpoint -> ours, or those of transformers."""
FIELDS = {
    "attention_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
    "linear_units": "intermediate_size",
}
"""Fields of its audio section -> those of transformers."""


class Encoder(phi4_multimodal.Encoder):
    def __init__(self, hf: Hf) -> None:
        super().__init__({**hf, "vision_config": vision_of(hf), "audio_config": audio_of(hf)})
        alias = {
            f"{outer}{AT}.{theirs}": ours
            for outer in ("", "model.")
            for theirs, ours in NAMES.items()
        }
        self.weights = replace(
            self.weights,
            paths={f"{AT}.{one}": to for one, to in PATHS.items()}
            | WITHIN
            | {**self.weights.paths},
            alias={**self.weights.alias, **alias},
        )


def vision_of(hf: Hf) -> dict[str, Any]:
    """Return the vision section: its code has the sizes of the tower."""
    layers = field_of(hf, "embd_layer", dict, default={})
    layout = field_of(layers, "image_embd_layer", dict, default={})
    field_of(layout, "hd_transform_order", str, default="sub_glb", one_of={"sub_glb"})
    for name in ("use_hd_transform", "with_learnable_separator"):
        field_of(layout, name, bool, default=True, one_of={True})
    crop = {"crop_size": layout["crop_size"]} if "crop_size" in layout else {}
    return crop | field_of(hf, "img_processor", dict, default={})


def audio_of(hf: Hf) -> dict[str, Any]:
    """Return the audio section with the names of transformers."""
    given = field_of(field_of(hf, "audio_processor", dict, default={}), "config", dict, default={})
    found = {FIELDS.get(key, key): value for key, value in given.items()}
    nemo = field_of(found, "nemo_conv_settings", dict, default={})
    bias = field_of(found, "relative_attention_bias_args", dict, default={})
    field_of(bias, "type", str, default="t5", one_of={"t5"})
    if "conv_channels" in nemo:
        found["nemo_conv_channels"] = nemo["conv_channels"]
    if "t5_bias_max_distance" in bias:
        found["bias_max_distance"] = bias["t5_bias_max_distance"]
    layers = field_of(hf, "embd_layer", dict, default={})
    layout = field_of(layers, "audio_embd_layer", dict, default={})
    return found | {key: layout[key] for key in ("downsample_rate",) if key in layout}
