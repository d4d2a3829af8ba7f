"""Reads which layers have a sliding window, from the fields that config.json files have for it."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.models.base import Hf, field_of

Windows = tuple[int | None, ...]
SLIDING, FULL = "sliding_attention", "full_attention"


def windows_of(hf: Hf, window: int | None, default: list[str]) -> Windows:
    """Return the window of each layer, or None. By `layer_types`; by `default` if it is absent."""
    kinds = field_of(hf, "layer_types", list, default=default)
    if len(kinds) != len(default):
        raise ConfigError(
            f"config.json: layer_types has {len(kinds)} entries; "
            f"num_hidden_layers is {len(default)}"
        )
    if unknown := sorted(set(map(str, kinds)) - {SLIDING, FULL}):
        raise ConfigError(
            f"config.json: layer_types has {', '.join(unknown)}; supported: {FULL}, {SLIDING}"
        )
    if SLIDING in kinds and (window is None or window < 1):
        raise ConfigError(
            f"config.json: sliding_window is {window!r}; with {SLIDING} layers it must be a "
            "positive integer"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_uniform_windows(hf: Hf, layers: int) -> Windows:
    """One window for all layers, or none. (Mistral, Phi-3)"""
    window = field_of(hf, "sliding_window", int, default=None)
    return windows_of(hf, window, [FULL if window is None else SLIDING] * layers)


def read_upper_layer_windows(hf: Hf, layers: int) -> Windows:
    """A window in layers from max_window_layers on, if use_sliding_window. (Qwen)"""
    if not field_of(hf, "use_sliding_window", bool, default=False):
        return (None,) * layers
    window = field_of(hf, "sliding_window", int, default=4096)
    first = field_of(hf, "max_window_layers", int, default=28)
    return windows_of(hf, window, [FULL if i < first else SLIDING for i in range(layers)])


def read_periodic_windows(hf: Hf, layers: int, *, window: int, period: int) -> Windows:
    """Every `period`-th layer has full attention, the others a window. (Gemma)"""
    window = field_of(hf, "sliding_window", int, default=window)
    kinds = [FULL if (i + 1) % period == 0 else SLIDING for i in range(layers)]
    return windows_of(hf, window, kinds)
