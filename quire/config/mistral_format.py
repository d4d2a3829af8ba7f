"""Mistral format: reads params.json, Mistral's own configuration, as a config.json.

    params.json                {dim, n_layers, n_heads, head_dim, moe, yarn, vision_encoder, ...}
    consolidated*.safetensors  weights under Mistral's names (quire.weights.mistral_layout)
    tekken.json                tokenizer (quire.text.tokenizing.tekken)

Source: the files of https://huggingface.co/mistralai
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.json_file import MAX_CONFIG_BYTES, read_json_object
from quire.errors import ConfigError

Json = Mapping[str, Any]
PARAMS_FILE = "params.json"
DEFAULT_MAX_LEN = 128_000

_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
_SAME_MEANING = {
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
    "dtype": "dtype",
}
_SCHEMES = {"TENSOR": "static", "NO_SCALES": "dynamic"}
"""qscheme_act -> activation_scheme of the same weights in a config.json."""
_TOWERS = ("vision_encoder", "multimodal")
TEXT_ONLY = "mistral-format"
"""Type of a wrapper in this format: its towers have other names and orders than those of Hugging
Face's mistral3, and are not read."""
_UNSUPPORTED = {
    "qk_nope_head_dim": "latent attention",
    "q_lora_rank": "latent attention",
    "kv_lora_rank": "latent attention",
}


def read_params(folder: Path) -> dict[str, Any]:
    """Read params.json of a folder. Raises ConfigError, also if there is none."""
    try:
        return read_json_object(folder / PARAMS_FILE, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        raise ConfigError(
            f"no {PARAMS_FILE} in {folder}, which config_format=mistral needs; leave config_format "
            "out to read config.json"
        ) from None


def head_size(params: Json) -> int:
    """Channels of a head."""
    return int(params.get("head_dim") or _size(params, "dim") // _size(params, "n_heads"))


def config_of_params(params: Json) -> dict[str, Any]:
    """Return the config.json that describes the same model as a params.json.

    Raises: ConfigError (a size is missing; a feature that no model of quire has).
    """
    _refuse_unsupported(params)
    hf: dict[str, Any] = {ours: _size(params, theirs) for theirs, ours in _SIZES.items()}
    stated = {ours: params[name] for name, ours in _SAME_MEANING.items() if params.get(name)}
    length = params.get("max_position_embeddings") or params.get("max_seq_len") or DEFAULT_MAX_LEN
    hf |= stated | {"head_dim": head_size(params), "max_position_embeddings": length}
    hf |= _windows(params, hf["num_hidden_layers"]) | _experts(params) | _rope(params)
    hf |= _quantization(params)
    towers = {name: params[name] for name in _TOWERS if params.get(name)}
    return {"model_type": TEXT_ONLY, "text_config": hf, **towers} if towers else hf


def _size(params: Json, name: str) -> int:
    value = params.get(name)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{PARAMS_FILE}: {name} is {value!r:.40}; it must be a positive integer")
    return value


def _refuse_unsupported(params: Json) -> None:
    if params.get("model_type") not in (None, "transformer"):
        raise ConfigError(
            f"{PARAMS_FILE}: model_type is {params['model_type']!r:.40}; supported: transformer"
        )
    found = [what for name, what in _UNSUPPORTED.items() if params.get(name)]
    if isinstance(moe := params.get("moe"), Mapping) and moe.get("num_shared_experts"):
        found.append("shared experts")
    if found:
        raise ConfigError(
            f"{PARAMS_FILE} describes a model with {found[0]}, which is read from config.json "
            "only; give a folder with the model's Hugging Face files"
        )


def _windows(params: Json, layers: int) -> dict[str, Any]:
    """A window of all layers, or a list of them that repeats; null is full attention."""
    given = params.get("_sliding_window") or params.get("sliding_window")
    pattern = given if isinstance(given, list) else [given]
    sizes = {one for one in pattern if one is not None}
    if not sizes:
        return {"sliding_window": None}
    if len(sizes) > 1 or layers % len(pattern):
        raise ConfigError(
            f"{PARAMS_FILE}: sliding_window is {given!r:.80}; it must have one length, and a "
            f"number of entries that divides n_layers, which is {layers}"
        )
    kinds = ["full_attention" if one is None else "sliding_attention" for one in pattern]
    return {"sliding_window": sizes.pop(), "layer_types": kinds * (layers // len(pattern))}


def _experts(params: Json) -> dict[str, Any]:
    moe = params.get("moe")
    if not moe:
        return {"model_type": "mistral"}
    return {
        "model_type": "mixtral",
        "num_local_experts": _size(moe, "num_experts"),
        "num_experts_per_tok": _size(moe, "num_experts_per_tok"),
    }


def _rope(params: Json) -> dict[str, Any]:
    """yarn, and queries that grow with their position."""
    yarn, growth = params.get("yarn"), params.get("llama_4_scaling")
    if not yarn and not growth:
        return {}
    rope: dict[str, Any] = {"rope_theta": params.get("rope_theta") or 10_000.0}
    if yarn:
        names = {"factor": "factor", "beta": "beta_fast", "alpha": "beta_slow"}
        rope |= {"rope_type": "yarn"} | {
            ours: float(yarn[name]) for name, ours in names.items() if name in yarn
        }
        rope["original_max_position_embeddings"] = _size(yarn, "original_max_position_embeddings")
        if yarn.get("apply_scale") is False:
            rope["attention_factor"] = 1.0
    if not growth:
        return {"rope_parameters": rope}
    length = _size(growth, "original_max_position_embeddings")
    if rope.setdefault("original_max_position_embeddings", length) != length:
        raise ConfigError(
            f"{PARAMS_FILE}: llama_4_scaling.original_max_position_embeddings is {length}; it must "
            f"be that of yarn, which is {rope['original_max_position_embeddings']}"
        )
    rope["llama_4_scaling_beta"] = float(growth.get("beta") or 0.0)
    return {"rope_parameters": rope, "model_type": "ministral3"}


def _quantization(params: Json) -> dict[str, Any]:
    given = params.get("quantization")
    if not given:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{PARAMS_FILE}: quantization is {given!r:.80}; it must be an object")
    if str(given.get("quant_method", "")).replace("_", "-") == "compressed-tensors":
        return {"quantization_config": {**given, "quant_method": "compressed-tensors"}}
    known = {"qformat_weight": ("fp8_e4m3",), "qscheme_act": (*_SCHEMES, None)}
    for key, value in {"qformat_weight": None, **given}.items():
        if value not in known.get(key, ()):
            allowed = ", ".join(f"{name} {' or '.join(map(str, of))}" for name, of in known.items())
            raise ConfigError(
                f"{PARAMS_FILE}: quantization has {key!r:.60} {value!r:.60}; supported: {allowed}"
            )
    scheme = _SCHEMES[given.get("qscheme_act") or "TENSOR"]
    made = {"quant_method": "fp8", "activation_scheme": scheme}
    return {"quantization_config": {**made, "modules_to_not_convert": ["lm_head"]}}
