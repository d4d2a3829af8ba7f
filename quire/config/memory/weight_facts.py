"""Sizes of a model's weights, by tensor headers or config.json, in any format: arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from quire.config.quant.facts import MIN_OUTPUTS, QuantFacts, WeightFormat
from quire.config.quant.held import Header, MatrixFacts

NON_LINEAR_NAMES = ("embed", "wte", "wpe", "lm_head", "shared.weight", "relative_attention_bias")
"""Parts of matrix names that mark matrices other than the decoder's linear layers."""
HEADS = ("lm_head.", "embed_out.")
"""Parts of the names of output heads that multiply by a matrix of their own."""
ROUTERS = ("gate", "router", "wg")
"""Last components of the names of what chooses experts."""
ABSORBED = ("kv_b_proj",)
"""Last components of the names of matrices that are multiplied from both sides: held plain."""

PLAIN = WeightFormat()
"""The format of an unquantized matrix."""


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """Sizes of weights. Matrices are sharded over ranks; vectors and the media encoder are not."""

    matrices: int  # elements of unquantized matrices, those of `layers` included
    vectors: int
    layers: tuple[MatrixFacts, ...] = ()  # which may be quantized, or are so in the checkpoint
    head: MatrixFacts | None = None  # a plain output head, one of `matrices`
    tied: bool = False  # the head is the token embedding
    by_layer: tuple[WeightFacts, ...] = field(default=(), compare=False)
    """Of each decoder layer; (): all are alike."""
    media: int = 0  # elements of the media encoder, which the first pipeline stage has

    def bytes(
        self,
        itemsize: int,
        ranks: int = 1,
        quantized: QuantFacts | None = None,
        device: str = "cpu",
        more_experts: float = 0.0,
        data: int = 1,
    ) -> int:
        """Bytes on one rank. itemsize: of the model's dtype. device: as in quire.config.quant.

        ranks: tensor-parallel ones. more_experts: those beyond a rank's share, times all ranks, as
        a share of all experts. data: data-parallel ranks, which have a share of the experts each,
        and all else.
        """
        total = float(self.matrices * itemsize)
        if self.head is not None and quantized is not None and quantized.head is not None:
            total += _held_bytes(self.head, quantized.head, itemsize, device)
            total -= self.head.outputs * self.head.inputs * itemsize
        for layer in self.layers:
            form = _format_of(layer, quantized)
            found = form.sized(layer)
            held = _held_bytes(found, form, itemsize, device)
            total += held * (1 + more_experts) / data if _is_of_experts(layer) else held
            if not layer.tensors:
                total -= layer.outputs * layer.inputs * itemsize
        return math.ceil(total / ranks) + (self.vectors + self.media) * itemsize

    def of_layers(self, stage: range, depth: int, *, ends: bool = True) -> WeightFacts:
        """Return the weights of a pipeline stage of a model of so many layers.

        ends: with the embeddings in the first stage, and the output head in the last.
        """
        head = 0 if self.head is None else self.head.outputs * self.head.inputs
        by_layer = self.by_layer or (self._even_layer(head, depth),) * depth
        own = by_layer[stage.start : stage.stop]
        outside = self.matrices - sum(one.matrices for one in by_layer)
        matrices, vectors = sum(one.matrices for one in own), sum(one.vectors for one in own)
        layers = [matrix for one in own for matrix in one.layers]
        is_first, is_last = ends and stage.start == 0, ends and stage.stop == depth
        if is_first and self.by_layer:
            layers += [one for one in self.layers if layer_number(one.name) is None]
        if is_first:
            matrices += outside - (0 if self.tied else head)
        if is_last:
            matrices += 0 if self.tied and is_first else head
            vectors += self.vectors - sum(one.vectors for one in by_layer)
        media = self.media if is_first else 0
        head_facts = self.head if is_last else None
        return WeightFacts(matrices, vectors, tuple(layers), head_facts, media=media)

    def _even_layer(self, head: int, depth: int) -> WeightFacts:
        """Return an equal share of what is neither embedding nor output head."""
        inner = self.matrices - head * (1 if self.tied else 2)
        layers = tuple(replace(one, outputs=one.outputs // depth) for one in self.layers)
        return WeightFacts(inner // depth, self.vectors // depth, layers)

    def elements(self, quantized: QuantFacts | None = None) -> int:
        """All numbers, over all ranks."""
        stored = (layer for layer in self.layers if layer.tensors)
        found = (_format_of(one, quantized).sized(one) for one in stored)
        rest = self.matrices + self.vectors + self.media
        return rest + sum(one.outputs * one.inputs for one in found)


def _format_of(layer: MatrixFacts, quantized: QuantFacts | None) -> WeightFormat:
    """Return the format of a layer; PLAIN: it is unquantized, or loading will refuse it."""
    found = None if quantized is None else quantized.format_of([layer.name])
    return found or PLAIN


def _held_bytes(matrix: MatrixFacts, form: WeightFormat, itemsize: int, device: str) -> float:
    """Bytes as a device holds a matrix with sizes. itemsize: of the model's dtype."""
    count, last = matrix.outputs * matrix.inputs, matrix.name.rpartition(".")[2]
    plain = count * itemsize
    if last in ABSORBED or (matrix.tensors and last in ROUTERS):
        return plain
    if matrix.tensors and form is PLAIN:
        return sum(one.nbytes for one in matrix.tensors.values())
    if not matrix.tensors:
        spared = form.only_experts and not _is_of_experts(matrix)
        if matrix.outputs < MIN_OUTPUTS or spared:
            return plain
    bits = form.held_bits(matrix, device)
    return plain if bits is None else count * bits / 8


def layer_number(name: str) -> int | None:
    """Return the number of the layer that a tensor or module belongs to; None: to none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _is_of_experts(matrix: MatrixFacts) -> bool:
    return "experts" in matrix.name.split(".")


def count_tensors(headers: Iterable[tuple[str, Header]], *, tied: bool = False) -> WeightFacts:
    """Count the weights that are loaded, from (name, header) of their tensors.

    tied: whether the largest embedding is the output head too.
    """
    whole = list(headers)
    by_layer: dict[int, list[tuple[str, Header]]] = {}
    for name, header in whole:
        if (number := layer_number(name)) is not None:
            by_layer.setdefault(number, []).append((name, header))
    layers = tuple(_count(by_layer.get(i, ())) for i in range(max(by_layer, default=-1) + 1))
    return replace(_count(whole, tied=tied), tied=tied, by_layer=layers)


def count_media(headers: Iterable[Header], itemsize: int = 2) -> int:
    """Count the elements of a media encoder. itemsize: in which quantized ones are expressed."""
    return sum(math.prod(one.shape) if one.is_plain else one.nbytes // itemsize for one in headers)


def _count(headers: Iterable[tuple[str, Header]], *, tied: bool = False) -> WeightFacts:
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
    return [MatrixFacts(name, 0, 0, tensors) for name, tensors in own.items()]


def _is_router(module: str) -> bool:
    return module.rpartition(".")[2] in ROUTERS
