"""Reads quant_method "gguf": the ggml type of each layer, as quire writes it for a GGUF file.

    {"quant_method": "gguf", "types": {"model.layers.0.self_attn.q_proj": "Q4_K", ...}}

Layers that are not there are unquantized.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.config.json_file import MAX_CONFIG_BYTES, read_json_object
from quire.config.quant.facts import LayerRule, QuantFacts
from quire.config.quant.fields import Json, require_value
from quire.config.quant.ggml import TYPE_BY_NAME, GgmlFormat
from quire.errors import ConfigError

METHOD = "gguf"


def with_stored_types(hf: Json, folder: Path) -> dict[str, Any]:
    """Return another config.json for the weights in a folder: with their types, if it has a GGUF
    file's. Raises ConfigError."""
    path = folder / "config.json"
    own = read_json_object(path, MAX_CONFIG_BYTES) if path.is_file() else {}
    stored = own.get("quantization_config")
    if isinstance(stored, dict) and stored.get("quant_method") == METHOD:
        return {**hf, "quantization_config": stored}
    return dict(hf)


def read(found: Json) -> QuantFacts:
    """Read the types. Raises ConfigError."""
    types = found.get("types")
    if not isinstance(types, dict):
        raise ConfigError(
            "config.json: quantization_config.quant_method is gguf; such weights are read from a "
            "GGUF file: give the file as the model"
        )
    known = [name for name, kind in TYPE_BY_NAME.items() if kind.is_quantized]
    for layer, kind in types.items():
        require_value(f"quantization_config.types.{layer}", kind, *known)
    formats = {kind: GgmlFormat(type=kind) for kind in dict.fromkeys(types.values())}
    rules = tuple(LayerRule(layer, formats[kind]) for layer, kind in types.items())
    return QuantFacts(quant_method=METHOD, rules=rules, default=None)
