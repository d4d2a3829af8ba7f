"""Which layers of a model are quantized, and how each is stored: data, without tensors.

A reader of one writer's configuration (the other modules of this package) makes QuantFacts of
config.json. quire.quant makes a method of each WeightFormat, which handles the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

MIN_OUTPUTS = 16
"""Minimum of outputs of a layer that quire quantizes: a smaller gate gains too little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How the weights of a layer are stored. Each subclass belongs to one module of quire.quant."""

    method: ClassVar[str]
    """The module of quire.quant whose Method(format) handles the tensors."""

    is_stored: bool = True
    """Whether the checkpoint has the weights in this format. False: it is made on load."""

    wide_inputs: bool = False
    """Whether the checkpoint was made for activations of fewer bits, which stay in 16 bits here."""

    only_experts: bool = False
    """Whether layers that are no experts stay unquantized."""

    @property
    def stored_bits(self) -> float:
        """Bits of a code in the checkpoint's largest tensor of a matrix."""
        return 8

    def held_bits(self, inputs: int, device: str) -> float | None:
        """Bits per weight of a matrix with so many inputs as its device holds it, with scales.

        device: "cpu" or "cuda". None: as many as the checkpoint's tensors have; of a format that is
        made on load: such a matrix is not quantized.
        """
        return None


def group_bits(bits: int, group: int, scale_bits: int, *, has_zeros: bool = False) -> float:
    """Return bits per weight of codes with a scale per group, and a byte of zeros if there are."""
    return bits + (scale_bits + 8 * has_zeros) / group


@dataclass(frozen=True, slots=True)
class LayerRule:
    """The format of layers with a name. format None: they are unquantized."""

    pattern: str  # a run of whole name components, or "re:" and a pattern from the start
    format: WeightFormat | None

    def matches(self, name: str) -> bool:
        """Whether a layer has the name that this rule is about."""
        if self.pattern.startswith("re:"):
            return re.match(self.pattern[3:], name) is not None
        return f".{self.pattern}." in f".{name}."


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantFacts:
    """How the weights of a model are stored."""

    quant_method: str  # of the checkpoint, or the value of the option
    rules: tuple[LayerRule, ...] = ()  # the first that matches decides
    default: WeightFormat | None  # of layers that no rule is about
    head: WeightFormat | None = None
    """What the output head, and an embedding that it shares, become on load. None: they stay."""
    kv_cache: str | None = None
    """The KV format whose scales the checkpoint has: "float8_e4m3fn" or "int8" (a name in
    quire.config.memory.kv_format.KV_FORMATS). None: it states nothing of the cache."""

    @property
    def is_stored(self) -> bool:
        """Whether the checkpoint has quantized weights. False: they are made on load."""
        formats = [self.default, *(rule.format for rule in self.rules)]
        return any(one is not None and one.is_stored for one in formats)

    def format_of(self, names: Iterable[str]) -> WeightFormat | None:
        """Return the format of the layer that has any of these names; None: unquantized."""
        names = tuple(names)
        for rule in self.rules:
            if any(rule.matches(name) for name in names):
                return rule.format
        return self.default


def unquantized(patterns: Iterable[str]) -> tuple[LayerRule, ...]:
    """Return rules that leave the layers of these patterns unquantized."""
    return tuple(LayerRule(pattern, None) for pattern in patterns)
