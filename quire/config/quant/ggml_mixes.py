"""Which block type each matrix of a GGUF file has: one type, or a mix such as Q4_K_M.

Values and down-projections feed what every later layer reads, so the mixes give more bits to some
of them; the output head always has 6 bits or more. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.config.quant.ggml import TYPE_BY_NAME
from quire.errors import ConfigError

FALLBACKS: Mapping[str, str] = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""Type of a matrix whose rows are not whole blocks of 256, but of 32."""

MIXES: Mapping[str, tuple[str, str | None]] = {
    **{name: (name, None) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *FALLBACKS)},
    "Q4_K_S": ("Q4_K", "Q5_K"),
    "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"),
}
"""Name of a mix -> (type of most matrices, type of some of VALUE_LIKE; None: the same)."""

VALUE_LIKE = ("attn_v", "ffn_down", "ffn_down_exps")
"""Matrices, by their names in GGUF files, that a mix may give more bits to."""

FIRST_VALUES = 4
"""Layers whose values have more bits in a mix of size S."""


def ggml_type(mix: str, matrix: str, inputs: int, layer: int = 0, layers: int = 1) -> str:
    """Return the type of a matrix [O, inputs].

    mix: a key of MIXES. matrix: its name in GGUF files, "attn_q", "ffn_down", or "output" for the
    output head (and an embedding that is the head too). layer: its layer, of so many `layers`.
    Raises ConfigError for an unknown mix.
    """
    if mix not in MIXES:
        raise ConfigError(f"no GGUF type {mix!r}; there are {', '.join(MIXES)}")
    base, more = MIXES[mix]
    if matrix == "output":
        kind = head_type(base)
    elif more is not None and matrix in VALUE_LIKE and _has_more_bits(mix, matrix, layer, layers):
        kind = more
    else:
        kind = base
    return fitting_type(kind, inputs) or "F16"


def head_type(base: str) -> str:
    """Return the type of the output head in a mix whose other matrices have the type `base`."""
    return "Q8_0" if base == "Q8_0" else "Q6_K"


def fitting_type(kind: str, inputs: int) -> str | None:
    """Return the type of a matrix with so many inputs that is to have a type. None: no blocks."""
    if inputs % TYPE_BY_NAME[kind].values:
        kind = FALLBACKS.get(kind, kind)
    return None if inputs % TYPE_BY_NAME[kind].values else kind


def layers_with_more_bits(mix: str, matrix: str, layers: int) -> tuple[int, ...]:
    """Return the layers in which one of VALUE_LIKE has the second type of the mix."""
    return tuple(i for i in range(layers) if _has_more_bits(mix, matrix, i, layers))


def _has_more_bits(mix: str, matrix: str, layer: int, layers: int) -> bool:
    eighth = layers // 8
    if mix.endswith("_S"):
        return layer < (FIRST_VALUES if matrix == "attn_v" else eighth)
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def nbytes(kind: str, elements: int) -> int:
    """Bytes of a tensor of a type; its rows are whole blocks."""
    return elements // TYPE_BY_NAME[kind].values * TYPE_BY_NAME[kind].nbytes
