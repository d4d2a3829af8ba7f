"""Which layers of a model are quantized, and how each is stored: data, without tensors.

A reader of one writer's configuration (the other modules of this package) makes QuantFacts of
config.json. quire.quant makes a method of each WeightFormat, which handles the tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from quire.config.quant.held import MatrixFacts

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

    def stored_size(self, matrix: MatrixFacts) -> tuple[int, int]:
        """Return outputs (over all experts of a bank) and inputs, by the checkpoint's tensors."""
        *outputs, inputs = matrix.tensor("weight").shape
        return math.prod(outputs), inputs

    def sized(self, matrix: MatrixFacts) -> MatrixFacts:
        """Return a matrix with its sizes, which of a quantized one the format reads."""
        if not matrix.tensors:
            return matrix
        try:
            outputs, inputs = self.stored_size(matrix)
        except (ValueError, IndexError):  # loading will refuse such tensors by name
            outputs, inputs = 0, 1
        return replace(matrix, outputs=outputs, inputs=max(inputs, 1))

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        """Bits per weight of a matrix as a device holds it, with its scales.

        matrix: with sizes. device: see quire.config.quant.held. None: of a format that is made on
        load: such a matrix is not quantized.
        """
        return None


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
