"""One to eight rows times a plain weight, with their adapters in the same launch: which kernel.

    one row       gemv_lora.py
    few rows      small_m_lora.py

A product of other kernels has its adapters behind it, as lora_linear.py.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels.formats.lora_bank import LoraBank, LoraRows
from quire.kernels.gpu.linear import gemv, small_m_linear
from quire.kernels.gpu.linear.gemv import FusedActivation, FusedNorm
from quire.kernels.gpu.lora import gemv_lora, small_m_lora
from quire.kernels.lora import check_rows


def supports(x: Tensor, weight: object, bias: Tensor | None, bank: LoraBank) -> bool:
    """Whether adapters can be computed with a product that lazy fusion holds."""
    if not isinstance(weight, Tensor) or bank.a.dtype != x.dtype:
        return False
    if len(x) == 1:
        return gemv.supports(x, weight, bias) and gemv_lora.supports(bank)
    return small_m_lora.supports(bank) and not small_m_linear.multiplies_rows(weight, len(x))


def launch(
    z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bank: LoraBank,
    rows: LoraRows,
    norm: FusedNorm | None = None,
    act: FusedActivation | None = None,
    memory_idle: bool = False,
) -> None:
    """z [T, O] = x @ weight.T + bias and their adapters; fills the results of norm (of one row)
    and act too."""
    check_rows(z, bank, rows)
    if len(x) == 1:
        gemv_lora.launch(z, x, weight, bias, bank, rows, norm, act, memory_idle)
    else:
        small_m_lora.launch(z, x, weight, bias, bank, rows, act)
