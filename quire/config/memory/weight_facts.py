"""Sizes of a model's weights, by tensor headers or config.json, in any format: arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.config.quant.facts import MIN_OUTPUTS, QuantFacts, WeightFormat

NON_LINEAR_NAMES = ("embed", "wte", "wpe", "lm_head", "shared.weight", "relative_attention_bias")
"""Parts of matrix names that mark matrices other than the decoder's linear layers."""
HEADS = ("lm_head.", "embed_out.")
"""Parts of the names of output heads that multiply by a matrix of their own."""
ROUTERS = ("gate", "router", "wg")
"""Last components of the names of what chooses experts."""
ABSORBED = ("kv_b_proj",)
"""Last components of the names of matrices that are multiplied from both sides: held plain."""


class Header(Protocol):
    """The header of a tensor, as quire.weights reads it."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def is_plain(self) -> bool:
        """Whether its numbers are floats of 16 or more bits, or positions: no quantized weight."""
        ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MatrixFacts:
    """A linear layer, or a bank of experts. The sizes are over all ranks.

    stored_bytes: of all tensors of a quantized matrix, codes_bytes: of the largest. 0: it is plain.
    """

    name: str
    outputs: int
    inputs: int
    stored_bytes: int = 0
    codes_bytes: int = 0

    def count(self, form: WeightFormat | None) -> int:
        """Elements. form: of a quantized matrix."""
        if not self.codes_bytes:
            return self.outputs * self.inputs
        return int(self.codes_bytes * 8 / (8 if form is None else form.stored_bits))

    def held_bytes(self, form: WeightFormat | None, itemsize: int, device: str) -> float:
        """Bytes as a device ("cpu" or "cuda") holds the matrix. itemsize: of the model's dtype."""
        plain = self.count(form) * itemsize
        last = self.name.rpartition(".")[2]
        if self.codes_bytes:
            bits = None if form is None else form.held_bits(self.inputs, device)
            if last in ABSORBED or last in ROUTERS:
                return plain
            return self.stored_bytes if bits is None else self.count(form) * bits / 8
        if form is None or last in ABSORBED or self.outputs < MIN_OUTPUTS:
            return plain
        if form.only_experts and "experts" not in self.name.split("."):
            return plain
        bits = form.held_bits(self.inputs, device)
        return plain if bits is None else self.count(form) * bits / 8


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """Sizes of weights. Matrices are sharded over ranks, vectors are replicated."""

    matrices: int  # elements of unquantized matrices, those of `layers` included
    vectors: int
    layers: tuple[MatrixFacts, ...] = ()  # which may be quantized, or are so in the checkpoint
    head: MatrixFacts | None = None  # a plain output head, one of `matrices`

    def bytes(
        self,
        itemsize: int,
        ranks: int = 1,
        quantized: QuantFacts | None = None,
        device: str = "cpu",
    ) -> int:
        """Bytes on one rank. itemsize: of the model's dtype. device: "cpu" or "cuda"."""
        total = float(self.matrices * itemsize)
        if self.head is not None and quantized is not None and quantized.head is not None:
            total += self.head.held_bytes(quantized.head, itemsize, device)
            total -= self.head.count(quantized.head) * itemsize
        for layer in self.layers:
            form = _format_of(layer, quantized)
            total += layer.held_bytes(form, itemsize, device)
            if not layer.codes_bytes:
                total -= layer.count(form) * itemsize
        return math.ceil(total / ranks) + self.vectors * itemsize

    def elements(self, quantized: QuantFacts | None = None) -> int:
        """All numbers, over all ranks."""
        stored = (layer for layer in self.layers if layer.codes_bytes)
        counts = (one.count(_format_of(one, quantized)) for one in stored)
        return self.matrices + self.vectors + sum(counts)


def _format_of(layer: MatrixFacts, quantized: QuantFacts | None) -> WeightFormat | None:
    return None if quantized is None else quantized.format_of([layer.name])


def count_tensors(headers: Iterable[tuple[str, Header]], *, tied: bool = False) -> WeightFacts:
    """Count the weights that are loaded, from (name, header) of their tensors.

    tied: whether the largest embedding is the output head too.
    """
    modules: dict[str, dict[str, Header]] = {}
    for name, header in headers:
        module, _, param = name.rpartition(".")
        modules.setdefault(module, {})[param] = header
    matrices = vectors = 0
    layers, heads = [], []
    for module, params in modules.items():
        if not all(header.is_plain for header in params.values()):
            stored = {name: one for name, one in params.items() if not name.endswith("bias")}
            layers += _stored_matrices(module, stored)
            params = {name: one for name, one in params.items() if name not in stored}
        for param, header in params.items():
            name, shape = f"{module}.{param}", header.shape
            size = math.prod(shape)
            if len(shape) < 2 or "norm" in name:  # norms of heads may have two axes
                vectors += size
                continue
            matrices += size
            path = module if param == "weight" else name
            found = MatrixFacts(path, size // shape[-1], shape[-1])
            if any(word in name for word in NON_LINEAR_NAMES):
                if tied or any(head in name for head in HEADS):
                    heads.append(found)
            elif not _is_router(module):
                layers.append(found)
    head = max(heads, key=lambda one: one.outputs, default=None)
    return WeightFacts(matrices, vectors, tuple(layers), head)


def _stored_matrices(module: str, params: Mapping[str, Header]) -> list[MatrixFacts]:
    """A module's matrix; or those of a bank, whose tensors are gate_up_proj_blocks, ..."""
    own: dict[str, dict[str, Header]] = {}
    for param, header in params.items():
        stem, found, _ = param.partition("_proj_")
        own.setdefault(f"{module}.{stem}_proj" if found else module, {})[param] = header
    return [_stored_matrix(name, of) for name, of in own.items()]


def _stored_matrix(module: str, params: Mapping[str, Header]) -> MatrixFacts:
    codes = max(params.values(), key=lambda one: one.nbytes)
    size = math.prod(codes.shape)
    inputs = max(codes.shape[-2:], default=1)
    total = sum(one.nbytes for one in params.values())
    return MatrixFacts(module, size // max(inputs, 1), inputs, total, codes.nbytes)


def _is_router(module: str) -> bool:
    return module.rpartition(".")[2] in ROUTERS
