"""Config files of models for satellite images, with the sizes in `pretrained_cfg`, in usual form.

    {"architectures": ["PrithviGeoSpatialMAE"], "pretrained_cfg": {"embed_dim": 768, ...}}
    {"architectures": [...], "pretrained_cfg": {"model_args": {"backbone": "prithvi_eo_v2_300_tl"}}}

The second form names an encoder by the word of terratorch, and changes it by fields with the prefix
`backbone_`. Both become a multimodal config.json: the layers are the text half, without words.

Source: config.json of ibm-nasa-geospatial/Prithvi-EO-2.0-300M-TL; terratorch, prithvi_vit.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError

Json = Mapping[str, Any]

WRAPPER, LAYERS = "prithvi_geospatial_mae", "prithvi"
"""Model types of the whole model and of its layers."""
SECTION = "pretrained_cfg"
LARGEST_SIDE = 512
"""Pixels of a side that the context has space for, if config.json states no length."""
DEFAULTS = {"img_size": 224, "num_frames": 1, "patch_size": [1, 16, 16], "in_chans": 6}
_TL = {"coords_encoding": ["time", "location"]}
_BASE = {"embed_dim": 768, "depth": 12, "num_heads": 12}
_LARGE = {"embed_dim": 1024, "depth": 24, "num_heads": 16}
_HUGE = {"embed_dim": 1280, "depth": 32, "num_heads": 16, "patch_size": [1, 14, 14]}
BACKBONES: Mapping[str, Json] = {
    "prithvi_eo_v1_100": _BASE,
    "prithvi_eo_v2_100_tl": _BASE | _TL,
    "prithvi_eo_v2_300": _LARGE,
    "prithvi_eo_v2_300_tl": _LARGE | _TL,
    "prithvi_eo_v2_600": _HUGE,
    "prithvi_eo_v2_600_tl": _HUGE | _TL,
}
"""Encoders by the names that terratorch gives them."""
NO_DECODER = (None, "IdentityDecoder")


def is_geospatial(hf: Json) -> bool:
    """Whether a config.json is that of such a model, not yet in the usual form."""
    classes = hf.get("architectures") or [hf.get("architecture")]
    named = isinstance(classes, list) and any(
        one == "PrithviGeoSpatialMAE" or str(one).startswith("prithvi_eo_") for one in classes
    )
    return (named or hf.get("model_type") == WRAPPER) and "text_config" not in hf


def as_multimodal(hf: Json) -> dict[str, Any]:
    """Return the config.json in the usual form. Raises ConfigError for what is not served."""
    section = hf.get(SECTION) or {}
    args = section.get("model_args") or hf.get("model_args")
    stated = {**DEFAULTS, **(section if args is None else _backbone(args))}
    sizes: dict[str, Any] = {key: stated.get(key) for key in ("embed_dim", "depth", "num_heads")}
    missing = [key for key, value in sizes.items() if not _is_size(value)]
    if missing:
        raise ConfigError(
            f"config.json: {SECTION} has no {' and no '.join(missing)}: positive integers, the "
            "sizes of the encoder"
        )
    patch, frames = stated["patch_size"], stated["num_frames"]
    patch = [1, patch, patch] if _is_size(patch) else patch
    image = stated["img_size"]
    image = image[0] if isinstance(image, list) and len(set(image)) == 1 else image
    if not isinstance(patch, list) or len(patch) != 3 or not all(map(_is_size, patch)):
        raise ConfigError(
            f"config.json: patch_size is {patch!r:.40}; it must be three positive integers"
        )
    counts = {"img_size": image, "num_frames": frames, "in_chans": stated["in_chans"]}
    for key, value in counts.items():
        if not _is_size(value):
            raise ConfigError(f"config.json: {key} is {value!r:.40}; it must be a positive integer")
    if patch[1] != patch[2] or image < patch[1] or frames % patch[0]:
        raise ConfigError(
            f"config.json: patch_size is {patch}; patches must be square, at most img_size "
            f"({image}) wide, and their frames must divide num_frames ({frames})"
        )
    hidden, heads = sizes["embed_dim"], sizes["num_heads"]
    if hidden % heads or hidden % 16:
        raise ConfigError(
            f"config.json: embed_dim is {hidden}; it must be a multiple of 16 and of num_heads, "
            f"{heads}"
        )
    side = max(image, LARGEST_SIDE) // patch[1]
    text = {
        "model_type": LAYERS,
        "hidden_size": hidden,
        "num_hidden_layers": sizes["depth"],
        "num_attention_heads": heads,
        "intermediate_size": int(hidden * stated.get("mlp_ratio", 4)),
        "vocab_size": 2,
        "max_position_embeddings": frames // patch[0] * side**2 + 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    grid = {**counts, "patch_size": patch, "coords_encoding": stated.get("coords_encoding") or []}
    classes = hf.get("architectures") or ["PrithviGeoSpatialMAE"]
    made = {**hf, "model_type": WRAPPER, "architectures": classes}
    return {**made, SECTION: {**stated, **grid}, "text_config": text}


def _backbone(args: Json) -> Json:
    """Return the sizes of an encoder that is named."""
    decoder, name = args.get("decoder"), args.get("backbone")
    if decoder not in NO_DECODER:
        raise ConfigError(
            f"config.json: the decoder {decoder!r:.40} is not served, the encoder alone is: give a "
            "checkpoint without a head for segmentation or regression"
        )
    if not isinstance(name, str) or name not in BACKBONES:
        known = ", ".join(BACKBONES)
        raise ConfigError(f"config.json: backbone is {name!r:.40}; known are {known}")
    prefix = "backbone_"
    own = {key.removeprefix(prefix): value for key, value in args.items() if prefix in key}
    if (bands := own.get("bands")) is not None:
        own["in_chans"] = len(bands)
    return {**BACKBONES[name], **{key: value for key, value in own.items() if value is not None}}


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
