"""Files beside config.json in which older writers state a quantization.

The settings in config.json go first: tools that convert a checkpoint may leave such a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.json_file import MAX_CONFIG_BYTES, read_json_object
from quire.config.quant.fields import Json
from quire.errors import ConfigError

CONFIG_KEYS = ("quantization_config", "compression_config")
"""Fields of config.json with the settings."""

SIDE_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Name of a file -> the quant_method that is meant where it states none."""


def with_side_file(folder: Path, hf: Json) -> Json:
    """Return config.json with the settings of a side file, if it has none itself."""
    sections = (hf, *(value for value in hf.values() if isinstance(value, Mapping)))
    if any(section.get(key) for section in sections for key in CONFIG_KEYS):
        return hf
    for name, usual in SIDE_FILES.items():
        path = folder / name
        if path.is_file():
            found = read_json_object(path, MAX_CONFIG_BYTES)
            return {**hf, CONFIG_KEYS[0]: _settings(found, usual, name)}
    return hf


def _settings(found: dict[str, Any], usual: str, name: str) -> dict[str, Any]:
    method = found.get("quant_method") or found.get("method") or usual
    if not isinstance(method, str):
        raise ConfigError(f"{name}: quant_method is {method!r:.80}; it must be a string")
    return {**found, "quant_method": method}
