"""Counts the bytes that a built model's weights take, and describes quantized ones for the log."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from torch import Tensor, nn

from quire.layers import ParamModule, WeightModule
from quire.weights.mapping import stored_shape


def held_bytes(value: object) -> int:
    """Bytes of all tensors of a weight object."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (tuple, list)):
        return sum(map(held_bytes, value))
    if is_dataclass(value) and not isinstance(value, type):
        return sum(held_bytes(getattr(value, one.name)) for one in fields(value))
    return 0


def model_bytes(model: nn.Module) -> int:
    """Bytes of a built model's weights on this rank; a weight that layers share counts once."""
    found: dict[int, object] = {}
    for module in model.modules():
        if isinstance(module, WeightModule):
            found |= {id(one): one for one in (getattr(module, m) for m in module.matrices)}
        if isinstance(module, ParamModule):
            others = (getattr(module, name, None) for name in module.param_names())
            found |= {id(one): one for one in others if isinstance(one, Tensor)}
    return sum(map(held_bytes, found.values()))


def describe_weights(model: nn.Module, name: str) -> str:
    """One line about the quantized and the other weights, with real bits per weight."""
    bits, count, total = {True: 0, False: 0}, {True: 0, False: 0}, {True: 0, False: 0}
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, WeightModule):
            continue
        for matrix in module.matrices:
            weight = getattr(module, matrix)
            if id(weight) in seen:
                continue
            seen.add(id(weight))
            small = module.method.name != "none" and weight.kind != "plain"
            rows, *rest = stored_shape(module.weight_layout(matrix))
            count[small] += 1
            total[small] += rows * rest[0]
            bits[small] += 8 * held_bytes(weight)
    if not count[True]:
        return f"weights: {name} applies to no layer of this model"
    each = bits[True] / total[True]
    both = (bits[True] + bits[False]) / (total[True] + total[False])
    return (
        f"weights: {name} in {count[True]} matrices, {each:.2f} bits per weight with scales; "
        f"{count[False]} others (head, embeddings, small gates) unquantized; "
        f"{both:.2f} bits per weight in all, {model_bytes(model) / 2**30:.2f} GiB"
    )
