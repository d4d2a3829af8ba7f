"""GPTQ: rounds the columns of a matrix in turn; the columns that follow make up for each error.

With H = x.T x of the matrix's inputs, rounding column j with the error e changes the outputs least
if the later columns move by -e * U[j, j+1:] / U[j, j], U being the upper Cholesky factor of the
inverse of H.

Source: https://arxiv.org/abs/2210.17323. Axes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.quantizers.integers import group_factors
from quire.quantize.schemes import Scheme

COLUMNS = 128
"""Columns whose errors are added to the rest of the matrix at once."""
MAX_DAMP = 1.0
MIN_IMPORTANCE = 1e-3
"""Of inputs that no text has, beside a mean of 1: other texts have them."""


def gptq(
    weight: Tensor,
    gram: Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    *,
    damp: float,
    act_order: bool,
) -> WeightCodes:
    """Quantize a weight [O, I].

    gram: x.T @ x [I, I]. damp: share of its mean diagonal that is added to it. act_order: inputs of
    large activations are rounded first; groups stay runs of neighbours.
    """
    matrix, inputs = weight.float().clone(), weight.shape[1]
    group = scheme.group or inputs
    diagonal = gram.diagonal()
    importance = diagonal / diagonal.mean().clamp(min=1e-20) + MIN_IMPORTANCE
    order = torch.arange(inputs, device=weight.device)
    if act_order:
        order = diagonal.argsort(descending=True, stable=True)
    factor = _inverse_factor(gram[order][:, order], damp)
    matrix = matrix[:, order]

    def find(part: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return group_factors(part, scheme.bits, group, scheme.symmetric, scale_dtype, weights)

    scale, zero = find(weight.float(), importance)  # [O, G]
    codes = torch.empty_like(matrix)
    top = (1 << scheme.bits) - 1
    for begin, end in _column_blocks(inputs, group):
        if begin and begin % group == 0 and not act_order:
            at = begin // group
            columns = slice(begin, begin + group)
            scale[:, at : at + 1], zero[:, at : at + 1] = find(
                matrix[:, columns], importance[columns]
            )
        block, errors = matrix[:, begin:end].clone(), torch.empty_like(matrix[:, begin:end])
        upper = factor[begin:end, begin:end]
        for j in range(end - begin):
            at = int(order[begin + j]) // group
            s, z, column = scale[:, at], zero[:, at], block[:, j]
            q = ((column / s).round() + z).clamp(0, top)
            codes[:, begin + j] = q
            error = (column - (q - z) * s) / upper[j, j]
            block[:, j + 1 :] -= error[:, None] * upper[j, j + 1 :]
            errors[:, j] = error
        matrix[:, end:] -= errors @ factor[begin:end, end:]
    q = torch.empty(codes.shape, dtype=torch.uint8, device=weight.device)
    q[:, order] = codes.to(torch.uint8)
    return WeightCodes(
        q=q,
        bits=scheme.bits,
        group=group,
        scale=GroupFactors(scale.to(scale_dtype)),
        zero=1 << scheme.bits - 1 if scheme.symmetric else zero.to(torch.uint8),
    )


def _column_blocks(inputs: int, group: int) -> list[tuple[int, int]]:
    """Runs of columns of at most COLUMNS, none across a border of groups."""
    found, at = [], 0
    while at < inputs:
        end = min(at + COLUMNS, inputs, (at // group + 1) * group)
        found.append((at, end))
        at = end
    return found


def _inverse_factor(gram: Tensor, damp: float) -> Tensor:
    """The upper Cholesky factor of the inverse of a gram matrix, damped until it has one."""
    mean = gram.diagonal().mean().clamp(min=1e-20)
    unused = (gram.diagonal() == 0).float() * mean
    while True:
        damped = gram + torch.diag(unused + damp * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
        if damp >= MAX_DAMP:
            return torch.eye(len(gram), device=gram.device)  # rounds each column alone
        damp = min(damp * 10, MAX_DAMP)
