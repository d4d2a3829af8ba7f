"""Masks of a model: what each attention call may see, found by evaluating the model's mask.

transformers makes a mask as a function of two positions. The probe takes that function in place of
a mask, and compares it with causal attention, whole or in a window, for many queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.errors import ConfigError

MAX_KEYS = 1 << 17
"""Positions among which keys are compared."""
QUERIES = 24
NEAR_KEYS, SPREAD_KEYS = 2048, 4096
"""Keys compared for one query: on each side of an edge, and evenly over all positions."""


@dataclass(frozen=True, slots=True)
class MaskRecord:
    """A mask that a model has asked for."""

    token: Tensor  # handed to the attention calls in its place, and known by identity
    function: Callable[..., Any]  # (batch, head, query's position, key's position) -> visible
    windows: dict[int, int | None] = field(default_factory=dict)  # positions served -> the window


def record_mask(given: Mapping[str, Any]) -> MaskRecord:
    """Return a record of the arguments of a mask function of transformers."""
    shape = (given["batch_size"], 1, 1, 1)
    return MaskRecord(torch.empty(shape, device="meta"), given["mask_function"])


def window_of(mask: MaskRecord, path: str, max_len: int, both: bool = False) -> int | None:
    """Return the window of a mask; None: all tokens before. Raises ConfigError for another mask.

    path: of the attention module, for the message. max_len: positions that are served. both: tokens
    see those after them, in a window w all at a distance below w.
    """
    if max_len not in mask.windows:  # layers share a mask
        mask.windows[max_len] = _measure_window(mask, path, min(max_len, MAX_KEYS), both)
    return mask.windows[max_len]


def _measure_window(mask: MaskRecord, path: str, count: int, both: bool) -> int | None:
    last = count - 1
    window = int(_visible(mask, last, torch.arange(count), path).sum())
    spread = torch.linspace(0, last, QUERIES).long().tolist()
    edges = (0, 1, window - 1, window, window + 1, 2 * window - 1, 2 * window, 2 * window + 1)
    for query in sorted({min(max(q, 0), last) for q in (*spread, *edges)}):
        keys = _keys_to_compare(query, window, count)
        wanted = ((keys <= query) | both) & ((keys - query).abs() < window)
        seen = _visible(mask, query, keys, path)
        if not torch.equal(seen, wanted):
            raise ConfigError(
                f"{path} cannot be served: a token at position {query} sees "
                f"{_ranges(keys[seen])}, which is neither all tokens {'' if both else 'before it '}"
                f"nor a window of {'those around it' if both else 'the last ones'}"
            )
    return None if window >= count else window


def _keys_to_compare(query: int, window: int, count: int) -> Tensor:
    """Return positions all over, and every one near the query and both ends of its window.

    Few enough that torch compares them in this thread: starting others costs more than that.
    """
    near = [torch.arange(at - NEAR_KEYS, at + NEAR_KEYS) for at in (0, query - window, query)]
    near.append(torch.arange(query + window - NEAR_KEYS, query + window + NEAR_KEYS))
    found = torch.cat([torch.linspace(0, count - 1, SPREAD_KEYS).long(), *near])
    return found.clamp(0, count - 1).unique()


def _visible(mask: MaskRecord, query: int, keys: Tensor, path: str) -> Tensor:
    zero, at = torch.tensor(0), torch.tensor(query)
    try:
        with torch.inference_mode():
            found = mask.function(zero, zero, at, keys)
        return torch.as_tensor(found).expand(keys.shape).bool()
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path} cannot be served: its mask is neither all tokens before a token nor a window "
            f"of the last ones ({reason:.120})"
        ) from error


def _ranges(at: Tensor) -> str:
    """Text of positions."""
    return "no token" if not len(at) else f"positions {int(at[0])} to {int(at[-1])}"
