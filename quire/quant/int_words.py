"""Codes of two to eight bits in int32 words, and groups of inputs: what GPTQ and AWQ share.

Axes: O outputs, I inputs, G groups; banks of experts have a leading axis X.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from quire.config.quant.held import LEAST_GROUP
from quire.errors import WeightError
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.grouped_linear import pack, pack_experts
from quire.kernels.linear import pack as pack_plain
from quire.quant.base import QuantizableLayer

log = logging.getLogger(__name__)


def names_any(stored: Iterable[str], *names: str) -> bool:
    """Whether a layer's parameters in a checkpoint have one of these; a bank prefixes a matrix."""
    return any(one == name or one.endswith(f"_{name}") for one in stored for name in names)


def set_grouped_weight(
    layer: QuantizableLayer,
    matrix: str,
    dtype: torch.dtype,
    *,
    q: Tensor,
    bits: int,
    scale: Tensor,
    zero: int | Tensor,
    groups: Tensor,
    group: int,
    shuffled: bool = False,
) -> None:
    """Set a matrix to the weight (q - zero) * scale, packed for its device.

    q: uint8 [..., O, I]. scale: float32 [..., O, G]. zero: an integer, or uint8 [..., O, G].
    groups: int64 [..., P, I], the group of each input in each of P parts, which have equally many
    or other numbers of outputs (those of the layer's layout). Inputs need not be in the order of
    their groups: then they are sorted. Weights whose groups are not of one size, or not equal in
    all parts, become plain ones in the model's dtype, with a warning.
    group, shuffled: what the configuration states about sizes and order, for meta tensors.
    """
    if q.is_meta:
        codes = _stated_codes(q, bits, scale, zero, groups, group, shuffled)
        layer.set_param(matrix, (pack_experts if layer.role == "experts" else pack)(codes, dtype))
        return
    if int(groups.min()) < 0 or int(groups.max()) >= scale.shape[-1]:
        raise WeightError(
            f"g_idx of {matrix} has groups from {int(groups.min())} to {int(groups.max())}; there "
            f"are scales of {scale.shape[-1]}"
        )
    own = groups[..., 0, :]
    size = 0
    if torch.equal(groups, own[..., None, :].expand(groups.shape)):
        order = own.argsort(dim=-1, stable=True)
        own = own.gather(-1, order)
        size = _group_size(own)
    if size < LEAST_GROUP and size != own.shape[-1]:
        _set_plain(layer, matrix, dtype, q, scale, zero, groups)
        return
    perm = None
    if not torch.equal(order, torch.arange(q.shape[-1], device=q.device).expand(order.shape)):
        perm = order.int()
        q = q.gather(-1, order[..., None, :].expand(q.shape))
    used = own[..., ::size]
    codes = WeightCodes(
        q=q, bits=bits, group=size, scale=GroupFactors(_narrowed(_pick(scale, used))),
        zero=_pick(zero, used) if isinstance(zero, Tensor) else zero, perm=perm,
    )  # fmt: skip
    layer.set_param(matrix, (pack_experts if layer.role == "experts" else pack)(codes, dtype))


def input_groups(layer: QuantizableLayer, matrix: str, group: int, device: torch.device) -> Tensor:
    """The group of each input that this rank has, int64 [1, I]. group 0: all are in one."""
    mine = layer.stored_layout(matrix)[0].ranges[1]
    inputs = torch.arange(mine.start, mine.stop, device=device)
    return (inputs // group if group else torch.zeros_like(inputs))[None]


def group_count(inputs: int, group: int) -> int:
    """Groups of a matrix. group 0: all inputs are in one."""
    return -(-inputs // group) if group else 1


def _stated_codes(
    q: Tensor,
    bits: int,
    scale: Tensor,
    zero: int | Tensor,
    groups: Tensor,
    group: int,
    shuffled: bool,
) -> WeightCodes:
    """The codes of a matrix without values, in groups of the size that is stated."""
    inputs = q.shape[-1]
    size = math.gcd(group or inputs, inputs)
    count = inputs // size
    return WeightCodes(
        q=q, bits=bits, group=size,
        scale=GroupFactors(scale.new_empty((*scale.shape[:-1], count), dtype=torch.float16)),
        zero=zero.new_empty((*zero.shape[:-1], count)) if isinstance(zero, Tensor) else zero,
        perm=groups[..., 0, :].int() if shuffled else None,
    )  # fmt: skip


def _group_size(groups: Tensor) -> int:
    """The largest size of equal runs that lie in one group each. groups: sorted, [..., I]."""
    changes = (groups[..., 1:] != groups[..., :-1]).reshape(-1, groups.shape[-1] - 1).any(0)
    return math.gcd(groups.shape[-1], *(changes.nonzero().flatten() + 1).tolist())


def _pick(numbers: Tensor, groups: Tensor) -> Tensor:
    """numbers [..., O, G], groups [..., n] -> [..., O, n]."""
    return numbers.gather(-1, groups[..., None, :].expand(*numbers.shape[:-1], groups.shape[-1]))


def _narrowed(scale: Tensor) -> Tensor:
    """The same numbers in 16 bits, if they are exact there: checkpoints have them so."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal((narrow := scale.to(dtype)).float(), scale):
            return narrow
    return scale


def _set_plain(
    layer: QuantizableLayer,
    matrix: str,
    dtype: torch.dtype,
    q: Tensor,
    scale: Tensor,
    zero: int | Tensor,
    groups: Tensor,
) -> None:
    experts = q.shape[0] if layer.role == "experts" else 1
    sizes = [part.shard_shape[0] for part in layer.stored_layout(matrix)]
    sizes = sizes[: len(sizes) // experts]
    of_part = groups.shape[-2] > 1
    plain = torch.empty(q.shape, dtype=dtype, device=q.device)
    start = 0
    for p, size in enumerate(sizes):
        rows, own = slice(start, start + size), groups[..., p if of_part else 0, :]
        numbers = _pick(zero[..., rows, :], own).float() if isinstance(zero, Tensor) else zero
        values = (q[..., rows, :].float() - numbers) * _pick(scale[..., rows, :], own)
        plain[..., rows, :] = values
        start += size
    log.warning(
        "a weight %s of %d bytes is unquantized in memory: the groups of its inputs are of several "
        "sizes or differ between its parts (desc_act; fewer ranks may help)",
        list(q.shape),
        plain.nbytes,
    )
    layer.set_param(matrix, plain if layer.role == "experts" else pack_plain(plain))
