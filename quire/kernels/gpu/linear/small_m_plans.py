"""Small-M plans: which kernel multiplies two to 64 rows by a weight of a shape, where measured.

    pipeline     small_m_gemm.py: Triton's own pipeline
    registers    small_m_registers.py: weights go from memory to the registers that multiply
    ring         small_m_ring.py: weights go through stages in shared memory

The table is quire/kernels/tuned/small_m.json, as bench/small_m_gpu.py finds it. A shape that it
lacks is multiplied as small_m_linear.py and the library do.
"""

from __future__ import annotations

import functools
import json
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from quire.kernels.gpu.linear import small_m_gemm
from quire.kernels.gpu.linear.gemv import FusedActivation
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.target import gpu_target

_MIN_CAPABILITY = (9, 0)


class MeasuredPlan(NamedTuple):
    """A kernel's name and its plan, as numbers."""

    kernel: str
    numbers: tuple[int, ...]


def shape_name(outputs: int, inputs: int, pair: bool) -> str:
    """A weight's key in the table: outputs of a half, inputs, whether an activation follows."""
    return f"{outputs}x{inputs}{' pair' if pair else ''}"


def find_plan(rows: int, weight: Tensor, pair: bool) -> MeasuredPlan | None:
    """Return the plan that was fastest for such a product, if it was measured."""
    outputs, inputs = weight.shape
    if gpu_target(weight.device).capability < _MIN_CAPABILITY:
        return None
    of_rows = load_table().get(shape_name(outputs // 2 if pair else outputs, inputs, pair), {})
    found = of_rows.get(str(max(2, next_power_of_2(rows))))
    return None if found is None else MeasuredPlan(found[0], tuple(found[1:]))


def launch(
    z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: FusedActivation | None,
    plan: MeasuredPlan,
) -> None:
    """z [T, O] = x @ weight.T + bias; fills act's result too."""
    if plan.kernel == "pipeline":
        small_m_gemm.launch(z, x, weight, bias, act, small_m_gemm.SmallMPlan(*plan.numbers))
        return
    body, plan_class = _gluon_kernel(plan.kernel)
    body.launch(z, x, weight, bias, act, plan_class(*plan.numbers))


@functools.cache
def _gluon_kernel(name: str) -> tuple[Any, Any]:
    """(module, class of its plans); imported late, as some of Triton's versions lack Gluon."""
    body = import_module(f"quire.kernels.gpu.linear.small_m_{name}")
    return body, getattr(body, f"{name.capitalize()}Plan")


@functools.cache
def load_table() -> dict[str, dict[str, list[Any]]]:
    """{shape: {rows, rounded up to a power of two: [kernel, numbers of its plan]}}."""
    path = Path(__file__).parents[2] / "tuned" / "small_m.json"
    table: dict[str, dict[str, list[Any]]] = json.loads(path.read_text())["plans"]
    return table
