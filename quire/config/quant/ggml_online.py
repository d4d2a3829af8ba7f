"""The block types of GGUF files, made on load: `--quantization gguf:Q4_K_M`.

Each matrix has the type that a file of this mix would give it. The output head and embeddings stay
unquantized, as with every format that is made on load, unless the head is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.config.quant.facts import LayerRule, QuantFacts, WeightFormat
from quire.config.quant.ggml import held_bits
from quire.config.quant.ggml_mixes import MIXES, fitting_type, head_type, layers_with_more_bits
from quire.config.quant.held import MatrixFacts
from quire.errors import ConfigError

PREFIX = "gguf:"
VALUE_LIKE = {"attn_v": "v_proj", "ffn_down": "down_proj"}
"""Matrices that a mix may give more bits to: name in GGUF files -> in other checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgmlOnlineFormat(WeightFormat):
    """Blocks of one type, made of a layer's weight when it has loaded."""

    method: ClassVar[str] = "online"
    is_stored: bool = False
    type: str

    def group_of(self, inputs: int) -> int | None:
        """Return a number if a matrix with so many inputs has blocks; None: it has none."""
        return None if fitting_type(self.type, inputs) is None else inputs

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        kind = fitting_type(self.type, matrix.inputs)
        return None if kind is None else held_bits(kind, matrix.inputs, device)


def read_mix(name: str, layers: int) -> QuantFacts:
    """Return the facts of a mix, the part of `name` behind PREFIX. Raises ConfigError."""
    mix = name.removeprefix(PREFIX).upper()
    if mix not in MIXES:
        known = ", ".join(PREFIX + one for one in MIXES)
        raise ConfigError(f"quantization={name!r}: there is no such mix; allowed: {known}")
    base, more = MIXES[mix]
    rules = []
    for matrix, leaf in VALUE_LIKE.items() if more is not None else ():
        assert more is not None
        if numbers := layers_with_more_bits(mix, matrix, layers):
            listed = "|".join(map(str, numbers))
            pattern = rf"re:(?:.*\.)?(?:layers|h|blocks)\.(?:{listed})\.(?:.*\.)?{leaf}$"
            rules.append(LayerRule(pattern, GgmlOnlineFormat(type=more)))
    default = GgmlOnlineFormat(type=base)
    return QuantFacts(quant_method=name, rules=tuple(rules), default=default)


def head_format(name: str) -> GgmlOnlineFormat:
    """Return the format of the output head in a file of a known mix."""
    base, _ = MIXES[name.removeprefix(PREFIX).upper()]
    return GgmlOnlineFormat(type=head_type(base))
