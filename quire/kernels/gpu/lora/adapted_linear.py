"""Up to 64 rows times a plain weight, with their adapters: in which order, and which kernels.

    LATE      v = A x, then the product with v B^T in it. It begins where x is complete: v is
              computed beside it, and needed at its end
    EARLY     the same, but it begins before: its first weights are on the way while v is computed
    BEFORE    v = A x, the base product, v B^T
    BESIDE    v = A x on a stream of its own beside the base product, then v B^T
    BEHIND    the base product, v = A x, v B^T

The product is that of the base model in any form, with its bits. Products with v B^T in them:
gemv_lora.py for one row, small_m_ring_lora.py and small_m_lora.py for more; the rest: few_rows.py.
Adapters of other products are behind them (lora_linear.py).
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.lora_bank import LoraBank, LoraRows
from quire.kernels.gpu.linear import gemv, small_m_linear, small_m_plans
from quire.kernels.gpu.linear.gemv import FusedActivation, FusedNorm
from quire.kernels.gpu.lora import few_rows, gemv_lora, lora_linear, small_m_lora

LATE, EARLY, BEFORE, BESIDE, BEHIND = "late", "early", "before", "beside", "behind"
INSIDE = LATE, EARLY

FORMS = {32: LATE, 64: BESIDE}
"""The form of so many rows and fewer, as measured (bench/lora_gpu.py). Products that cannot have
adapters inside, of more than one row, have them BESIDE."""
MAX_RING_ROWS = 8
"""Rows of products with a ring that have adapters inside. Of 32 rows the ring takes longer with
them than they take BESIDE it."""
MAX_RANK_INSIDE = 32
"""Of several rows with larger ranks the sums inside the product take longer than behind it."""


def supports(x: Tensor, weight: object, bias: Tensor | None, bank: LoraBank) -> bool:
    """Whether launch() takes a product that lazy fusion holds, and adapters."""
    if not isinstance(weight, Tensor) or bank.a.dtype != x.dtype:
        return False
    form = _form_of(len(x), weight, bank, lora_linear.fuses_act(bank))
    if form not in INSIDE:
        return form is not None and len(x) <= few_rows.most_rows(bank)
    return len(x) > 1 or (gemv.supports(x, weight, bias) and gemv_lora.supports(bank))


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
    form = _form_of(len(x), weight, bank, act is not None) or BESIDE
    if form not in INSIDE:
        _launch_around(form, z, x, weight, bias, bank, rows, norm, act)
        return
    late = form == LATE and not memory_idle  # idle memory is used best by a product that is there
    ahead = weight if len(x) == 1 else None  # more rows fill the memory's pipe without it
    v = few_rows.launch_shrink(z, x, bank, rows, norm, ahead, early=not late)
    if len(x) == 1:
        gemv_lora.launch(z, x, weight, bias, bank, rows, v, late, norm, act, memory_idle)
    elif plan := small_m_plans.find_plan(len(x), weight, act is not None):
        _ring().launch(z, x, weight, bias, bank, rows, v, late, act, plan.numbers)
    else:
        small_m_lora.launch(z, x, weight, bias, bank, rows, v, late, act)


def _launch_around(
    form: str,
    z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bank: LoraBank,
    rows: LoraRows,
    norm: FusedNorm | None,
    act: FusedActivation | None,
) -> None:
    """The base product, with the first half of the adapters before, beside or behind it.

    With an activation it may be another kernel, whose bits it has here too; what it activates is
    written again.
    """
    fused = act if act is not None and small_m_linear.fuses_act(x, weight) else None

    def multiply() -> None:
        small_m_linear.launch(z, x, weight, bias, norm, fused)

    if form == BEHIND:
        multiply()
        v = few_rows.launch_shrink(z, x, bank, rows)
    elif form == BEFORE:
        v = few_rows.launch_shrink(z, x, bank, rows, norm, weight)
        multiply()
    else:
        main, side = torch.cuda.current_stream(), _side_stream(x.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            v = few_rows.launch_shrink(z, x, bank, rows, norm, weight)
        multiply()
        main.wait_stream(side)
    few_rows.launch_expand(z, v, bank, rows, act)


def _form_of(rows: int, weight: Tensor, bank: LoraBank, pair: bool) -> str | None:
    """None: none of this file; the adapters are kernels of their own (lora_linear.py).

    pair: an activation of the two halves follows.
    """
    form = next((form for most, form in FORMS.items() if rows <= most), BEHIND)
    if rows == 1 or form not in INSIDE:
        return form
    if bank.rank > MAX_RANK_INSIDE:
        return BEHIND
    # a product with a plan keeps it: so rows without an adapter have the bits of other steps
    if small_m_plans.find_bands(rows, weight, pair, normed=False):
        return BESIDE
    if plan := small_m_plans.find_plan(rows, weight, pair):
        few = plan.kernel == "ring" and rows <= MAX_RING_ROWS
        inside = few and _ring().supports(bank, plan.numbers)
        return form if inside else BESIDE
    if rows > small_m_linear.MAX_ROWS:
        return BESIDE
    inside = small_m_lora.supports(bank) and not small_m_linear.multiplies_rows(weight, rows)
    return form if inside else None


@functools.cache
def _ring() -> Any:
    """Imported where a product has a plan: Triton has Gluon then."""
    return import_module("quire.kernels.gpu.lora.small_m_ring_lora")


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
