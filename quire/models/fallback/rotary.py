"""Rotary frequencies that depend on the length: fixed once, for the longest served sequence.

transformers chooses them by the largest position of a batch. In a packed step that would be another
sequence's, and keys in the cache would have been rotated by other frequencies.
"""

from __future__ import annotations

from typing import Any

import torch

STATIC = "static"


def fix_frequencies(skeleton: Any, max_len: int) -> None:
    """Let each rotary module choose its frequencies for max_len positions, and keep them."""
    for module in skeleton.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
                continue
            given = () if layer_type is None else (layer_type,)
            with torch.device("cpu"), torch.no_grad():
                last = torch.tensor([[max_len - 1]])
                module(torch.zeros(1, 1, 1), last, *given)
            if isinstance(kinds, dict):
                kinds[layer_type] = STATIC
            else:
                module.rope_type = STATIC
