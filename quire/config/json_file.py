"""JSON file reader: checks size, depth and numbers of JSON files that come with models.

The files are untrusted, so this happens before anything of a given size is allocated: a config.json
of a few bytes can request a billion layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

MAX_BYTES = 256 << 20
"""Limit for an index or a tokenizer file. Those of the largest models have a tenth of that."""
MAX_CONFIG_BYTES = 16 << 20
MAX_LEVELS = 64

_SIZE_LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (1, 1 << 12)),
    **dict.fromkeys(("vocab_size",), (1, 1 << 26)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), (1, 1 << 20)),
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim"), (0, 1 << 24)
    ),
    **dict.fromkeys(("shared_expert_intermediate_size", "word_embed_proj_dim"), (0, 1 << 24)),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), (1, 1 << 16)),
    **dict.fromkeys(("num_key_value_heads", "head_dim"), (1, 1 << 16)),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"), (0, 1 << 20)
    ),
    **dict.fromkeys(("qk_nope_head_dim", "qk_head_dim"), (0, 1 << 20)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, 1 << 16)),
    **dict.fromkeys(("num_experts_per_tok", "n_shared_experts", "n_group"), (0, 1 << 16)),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), (1, 1 << 31)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"), (0, 1)),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), (1e-6, 1e18)),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (0, 1)),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), (1e-3, 1e6)),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), (0, 1e6)),
    **dict.fromkeys(("original_max_position_embeddings",), (1, 1 << 31)),
    **dict.fromkeys(("sliding_window", "attention_window"), (0, 1 << 31)),
}
"""Field -> minimum and maximum over all known models, with a wide margin."""


LFS_HEAD = b"version https://git-lfs.github.com/spec/"


def missing_content(path: Path) -> str | None:
    """Say in a clause what a file has in place of its content; None if it has content.

    Raises: OSError.
    """
    with path.open("rb") as file:
        head = file.read(len(LFS_HEAD))
    if not head:
        return "is empty; download it again"
    if head == LFS_HEAD:
        return "is a pointer of git-lfs and not the file; run `git lfs pull` in its folder"
    return None


def read_json_object(path: Path, most: int = MAX_BYTES) -> dict[str, Any]:
    """Read the object in a JSON file. Raises ConfigError, and FileNotFoundError."""
    try:
        value = json.loads(read_text(path, most))
    except RecursionError:
        raise ConfigError(f"{path} is not valid JSON: it is nested too deep") from None
    except ConfigError:
        raise
    except ValueError as error:
        why = missing_content(path) or f"is not valid JSON: {error}"
        raise ConfigError(f"{path} {why}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_text(path: Path, most: int) -> str:
    """Read a text file of at most `most` bytes. Raises ConfigError and FileNotFoundError."""
    try:
        check_bytes(path, most)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error


def check_bytes(path: Path, most: int) -> None:
    """Raise ConfigError for a file that is implausibly large. Raises OSError."""
    size = path.stat().st_size
    if size > most:
        raise ConfigError(f"{path} has {size} bytes; the maximum is {most}")


@contextmanager
def raise_as_config_error(name: str) -> Iterator[None]:
    """Turn errors that a file causes in library code into ConfigErrors that name the file."""
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{name} does not describe a valid model: {why:.300}") from error


def check_sizes(config: Mapping[str, Any], name: str = "config.json", level: int = 0) -> None:
    """Raise ConfigError for sizes that no model has, also in nested configs."""
    if level > MAX_LEVELS:
        raise ConfigError(f"{name} is nested deeper than {MAX_LEVELS} levels")
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_sizes(value, name, level + 1)
        elif isinstance(value, int | float) and not isinstance(value, bool) and key in _SIZE_LIMITS:
            least, most = _SIZE_LIMITS[key]
            if not least <= value <= most:  # also true for NaN
                raise ConfigError(
                    f"{name}: {key} is {value!r:.40}; it must be from {least} to {most}"
                )
