"""Small-M plans: which Gluon kernel multiplies two to 32 rows by a weight, and how it splits it.

    registers    small_m_registers.py: weights go from memory to the registers that multiply
    ring         small_m_ring.py: weights go through stages in shared memory, filled before the wait
    bands        small_m_bands.py: the same from one band of outputs to the next, up to eight rows

The rules were read off a sweep of all plans over the products of models of 0.6 and 8 billion
parameters on an H200 (bench/small_m_gpu.py, bands_gpu.py): the plans of a rule take at most a few
percent more than the best of their shape. Where no plan was better than the kernels before, there
is none.
"""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.kernels.gpu.linear.gemv import FusedActivation
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.target import gpu_target

MAX_ROWS = 32
_MIN_CAPABILITY = (9, 0)
_SMALL_WEIGHT = 8_000_000
"""Numbers of a weight (of one half) whose product is over before many stages are filled."""
_LARGE_WEIGHT = 70_000_000
"""Numbers of a weight that the library multiplies as fast."""
_FEW_OUTPUTS = 2048
"""Outputs of a small weight for which a ring has too few programs."""
_OUTPUTS_OF_32_ROWS = range(3072, 8192 + 1)
"""Fewer are too few programs of 32 outputs; with many more the library was as fast or faster."""
MAX_NORMED_ROWS = 4
"""Rows that a program of bands norms as fast as a kernel of its own; those of eight took longer."""
_LONG_BAND = 8192
"""Inputs of a product whose bands are streamed best by two programs of a multiprocessor."""
_MULTIPROCESSORS = 132
_MOST_AHEAD = 16
"""Slices of 32 inputs that a warp's registers have space for."""


class GluonPlan(NamedTuple):
    """A kernel's name, and the numbers of its plan."""

    kernel: str
    numbers: tuple[int, ...]


def find_plan(rows: int, weight: Tensor, pair: bool) -> GluonPlan | None:
    """Return the plan of a product. pair: an activation of its two halves follows."""
    outputs, inputs = weight.shape
    if gpu_target(weight.device).capability < _MIN_CAPABILITY or not _has_gluon():
        return None
    return plan_of(rows, outputs // 2 if pair else outputs, inputs, pair)


@functools.cache
def plan_of(rows: int, outputs: int, inputs: int, pair: bool) -> GluonPlan | None:
    """As find_plan, for the outputs of one half."""
    if not 2 <= rows <= MAX_ROWS:
        return None
    width, small = max(8, next_power_of_2(rows)), outputs * inputs < _SMALL_WEIGHT
    large = outputs * inputs > _LARGE_WEIGHT and not pair
    if large or (not small and (rows <= 4 or (pair and width != 16))):
        return None  # the kernels before are as fast, and overlap with their neighbours
    if small and outputs <= _FEW_OUTPUTS and (width == 8 or (width == 16 and not pair)):
        return _registers(width, outputs, inputs)
    if pair and not small:
        return _ring(width, 64, 128, 5, outputs, inputs, pair)
    if small:
        long = width == 32 and outputs <= _FEW_OUTPUTS and inputs >= 2048
        band, columns = 32 if width == 8 else 16, 512 if long else 256
        stages = 3 if width == 32 and not long else 4
    elif width == 32:
        if outputs not in _OUTPUTS_OF_32_ROWS:
            return None
        # stages of 512 inputs leave a multiprocessor space for one program
        one_each = outputs <= 32 * _MULTIPROCESSORS and not inputs % 512
        band, columns, stages = 32, 512 if one_each else 256, 3
    else:
        band, columns = 16 if width == 8 else 32, 256
        stages = 8 if inputs >= 8192 else 6 if width == 8 else 4
    return _ring(width, band, columns, stages, outputs, inputs, pair)


def _ring(
    width: int, band: int, columns: int, stages: int, outputs: int, inputs: int, pair: bool
) -> GluonPlan | None:
    body, plan_class = _gluon_kernel("ring")
    plan = plan_class(width, band, columns, stages, band // 16)
    return GluonPlan("ring", plan) if body.fits(plan, outputs, inputs, pair) else None


def _registers(width: int, outputs: int, inputs: int) -> GluonPlan | None:
    """Every slice is on its way at once."""
    body, plan_class = _gluon_kernel("registers")
    for deep in (4, 8) if width == 8 else (8,):
        ahead = inputs // (body.SLICE * deep)
        plan = plan_class(width, 16, deep, ahead)
        if 0 < ahead <= _MOST_AHEAD and body.fits(plan, outputs, inputs):
            return GluonPlan("registers", plan)
    return None


def find_bands(rows: int, weight: Tensor, pair: bool, normed: bool) -> Any:
    """Return the plan of small_m_bands.py for a product, or None. pair: an activation of its two
    halves follows. normed: it begins with a norm."""
    outputs, inputs = weight.shape
    target = gpu_target(weight.device)
    if target.capability < _MIN_CAPABILITY or not _has_gluon():
        return None
    return bands_of(rows, outputs // 2 if pair else outputs, inputs, pair, normed, target.sm_count)


@functools.cache
def bands_of(
    rows: int, outputs: int, inputs: int, pair: bool, normed: bool, multiprocessors: int
) -> Any:
    """As find_bands, for the outputs of one half."""
    body, plan_class = _gluon_kernel("bands")
    most = MAX_NORMED_ROWS if normed else body.MAX_ROWS
    if not 2 <= rows <= most or outputs * inputs < _SMALL_WEIGHT:
        return None  # a small weight is over before a program has gone through a few bands
    bands = outputs * (2 if pair else 1) // body.BAND
    each = 2 if inputs >= _LONG_BAND and not normed else 1
    for columns in (512, 256, 128, 64) if bands > 2 * multiprocessors else (256, 128, 64):
        for stages in (4, 3, 2) if columns < 512 else (2,):
            plan = plan_class(4, columns, stages // each, each * multiprocessors)
            if body.fits(plan, outputs, inputs, pair, normed):
                return plan
    return None


def launch(
    z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: FusedActivation | None,
    plan: GluonPlan,
) -> None:
    """z [T, O] = x @ weight.T + bias; fills act's result too."""
    body, plan_class = _gluon_kernel(plan.kernel)
    body.launch(z, x, weight, bias, act, plan_class(*plan.numbers))


def empty_squares(r: Tensor) -> Tensor:
    """Return space for the partial sums that small_m_bands.py adds up of the squares of r."""
    body, _ = _gluon_kernel("bands")
    size = r.shape[1] // body.BAND, body.MAX_ROWS
    return torch.empty(size, dtype=torch.float32, device=r.device)


def launch_bands(z: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Any,
                 *fused: Any) -> None:  # fmt: skip
    """z [T, O] = x @ weight.T + bias, by a plan of find_bands. fused: small_m_bands.launch."""
    _gluon_kernel("bands")[0].launch(z, x, weight, bias, plan, *fused)


@functools.cache
def _has_gluon() -> bool:
    return find_spec("triton.experimental.gluon") is not None


@functools.cache
def _gluon_kernel(name: str) -> tuple[Any, Any]:
    """(module, class of its plans); imported late, as some of Triton's versions lack Gluon."""
    body = import_module(f"quire.kernels.gpu.linear.small_m_{name}")
    return body, getattr(body, f"{name.capitalize()}Plan")
