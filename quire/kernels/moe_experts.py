"""The experts' MLPs: each token goes through the few that were chosen for it.

    h = gate(x @ gate_up[i].T)                  for each of a token's experts i, rounded to x.dtype
    y = sum over k of weights[k] * (h @ down[i].T)     in fp32, in the order of k, then x.dtype

One op, not a sort, two products and a sum: which of them are separate launches depends on the
number of tokens, and the sum is deterministic whatever the batch.

Axes: T tokens in the step, E hidden size, F width of one expert, X experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.act import NATIVE_CODES, ActivationKind, activate
from quire.kernels.formats.fp8_weight import (
    Fp8ExpertWeights,
    quantize_blocks,
    quantize_channels,
)
from quire.kernels.formats.int8_weight import Int8ExpertWeights, quantize_outputs
from quire.kernels.formats.panel_codes import PanelExperts
from quire.kernels.formats.weight import StoredWeight, kernel_for
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.framework import lazy_fusion
from quire.kernels.framework.op import op
from quire.kernels.grouped_linear import pack_experts
from quire.kernels.native.library import CODES_EXPERTS, NativeOp, address_of, empty
from quire.kernels.native.op_tape import on_replay


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """How the two halves of the first product become one.

    clamped: gate <= limit, |up| <= limit, then gate * sigmoid(alpha * gate) * (up + 1). (GPT-OSS)
    relu2: the first product is up alone, [n, F] or of experts [X, F, E]: relu(up) ** 2. (Nemotron)
    """

    kind: ActivationKind | Literal["clamped", "relu2"] = "silu"
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def rows(self) -> int:
        """Outputs of the first product to one of the activation."""
        return 1 if self.kind == "relu2" else 2

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[n, 2F] = (gate | up) -> [n, F] of the same dtype, fp32 inside."""
        if self.kind == "relu2":
            return gate_up.float().relu().square().to(gate_up.dtype)
        gate, up = gate_up.float().chunk(2, -1)
        if self.kind == "clamped":
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            return (gate * torch.sigmoid(gate * self.alpha) * (up + 1)).to(gate_up.dtype)
        return (activate(gate, self.kind) * up).to(gate_up.dtype)


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    for t, e, f, x, k, dtype, gate in [
        (1, 64, 48, 4, 2, fp32, ExpertActivation()),
        (1, 128, 96, 8, 4, bf16, ExpertActivation()),
        (7, 96, 40, 60, 4, bf16, ExpertActivation("gelu_tanh")),
        (40, 64, 32, 4, 2, bf16, ExpertActivation()),
        (33, 100, 20, 8, 1, fp32, ExpertActivation("relu")),
        (70, 64, 64, 16, 8, bf16, ExpertActivation("gelu")),
        (5, 64, 48, 4, 2, bf16, ExpertActivation("clamped", limit=1.5)),
        (24, 64, 48, 8, 4, bf16, ExpertActivation("clamped")),
        (9, 72, 128, 4, 2, bf16, ExpertActivation()),
        (6, 64, 48, 8, 4, fp32, ExpertActivation("relu2")),
        (3, 64, 48, 8, 2, bf16, ExpertActivation("relu2")),
    ]:
        ids = torch.rand(t, x, device=device).argsort(-1)[:, :k].int()
        case = {
            "x": torch.randn(t, e, device=device).to(dtype),
            "ids": ids.contiguous(),
            "weights": torch.rand(t, k, device=device),
            "gate_up": (torch.randn(x, gate.rows * f, e, device=device) / e**0.5).to(dtype),
            "down": (torch.randn(x, e, f, device=device) / f**0.5).to(dtype),
            "gate": gate,
        }
        yield case
        if t in (1, 7, 33, 40):
            yield _absent_case(case)
        if f == 128 or t == 40:
            yield _fp8_case(case, f == 128)
        if t in (1, 9):
            yield _int8_case(case)
        if t == 9:
            yield _absent_case(_fp8_case(case, True))
        if dtype == bf16 and device.type == "cpu":
            yield _codes_case(case, 4 if t > 7 else 8)
            yield _absent_case(_codes_case(case, 8))
        if gate.kind == "clamped":
            first = torch.randn(x, 2 * f, device=device).to(dtype)
            second = torch.randn(x, e, device=device).to(dtype)
            case = {**case, "gate_up_bias": first, "down_bias": second}
            yield case
            for some in (3, t):
                rows = {name: case[name][:some] for name in ("x", "ids", "weights")}
                yield _absent_case({**case, **rows})


def _absent_case(case: dict[str, Any]) -> dict[str, Any]:
    """The same case where other ranks have some experts; one row has none here."""
    absent = torch.rand(case["ids"].shape, device=case["ids"].device) < 0.4
    absent[0] = True
    return {**case, "ids": case["ids"].masked_fill(absent, -1), "absent": True}


def _fp8_case(case: dict[str, Any], block: bool) -> dict[str, Any]:
    """The same case over banks in e4m3."""
    banks = {}
    for name in ("gate_up", "down"):
        by = quantize_blocks if block else quantize_channels
        ones = [by(one) for one in case[name]]
        banks[name] = Fp8ExpertWeights(
            torch.stack([one.data for one in ones]), torch.stack([one.scale for one in ones])
        )
    # where a sum is rounded to another e4m3 number, outputs differ by a sixteenth of a term
    return {**case, **banks, "weights": case["weights"] / 4}


def _int8_case(case: dict[str, Any]) -> dict[str, Any]:
    """The same case over banks in bytes, with asymmetric rows for one token."""
    banks = {}
    for name in ("gate_up", "down"):
        made = [quantize_outputs(one, symmetric_inputs=len(case["x"]) > 1) for one in case[name]]
        sums = [one.sums for one in made if one.sums is not None]
        banks[name] = Int8ExpertWeights(
            data=torch.stack([one.data for one in made]),
            scale=torch.stack([one.scale for one in made]),
            sums=torch.stack(sums) if sums else None,
        )
    return {**case, **banks, "weights": case["weights"] / 4}


def _codes_case(case: dict[str, Any], bits: int) -> dict[str, Any]:
    """The same case over banks of few bits, a scale per output."""
    banks, middle = {}, 1 << bits - 1
    for name in ("gate_up", "down"):
        plain = case[name].float()
        step = plain.abs().amax(-1, keepdim=True) / middle
        codes = WeightCodes(
            q=((plain / step).round() + middle).clamp(0, 2 * middle - 1).to(torch.uint8),
            bits=bits, group=plain.shape[-1], scale=GroupFactors(step), zero=middle,
        )  # fmt: skip
        banks[name] = pack_experts(codes, case["x"].dtype)
    return {**case, **banks, "weights": case["weights"] / 4}


_run = NativeOp(CODES_EXPERTS, "qqqqqqqqqqqqqdd")
_CLAMPED = 16


def _native(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Any,
    down: Any,
    gate: ExpertActivation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    absent: bool = False,
) -> Tensor:
    for bank, bias in ((gate_up, gate_up_bias), (down, down_bias)):
        if not isinstance(bank, PanelExperts) or not bank[0].in_integers:
            return NotImplemented
        if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
            return NotImplemented
    if gate.kind == "relu2" or x.dtype != torch.bfloat16:
        return NotImplemented
    if x.stride(1) != 1 or not ids.is_contiguous():
        return NotImplemented
    if weights.dtype != torch.float32 or not weights.is_contiguous() or ids.dtype != torch.int32:
        return NotImplemented
    y = empty((len(x), down.shape[1]), x.dtype)
    _run(
        x.data_ptr(), x.stride(0) * x.element_size(), ids.data_ptr(), weights.data_ptr(),
        gate_up.header.data_ptr(), down.header.data_ptr(), address_of(gate_up_bias),
        address_of(down_bias), y.data_ptr(), *ids.shape, len(down),
        _CLAMPED if gate.kind == "clamped" else NATIVE_CODES[gate.kind], gate.alpha, gate.limit,
    )  # fmt: skip
    return y


@kernel_for("mlp", "plain", "fp8", "grouped", "tiled", "panel_codes", "panel_int8", "int8", "parts")
@op(cases=_cases, atol=4e-2, native=_native, gpu="moe.moe_experts")
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | Fp8ExpertWeights,
    down: Tensor | Fp8ExpertWeights,
    gate: ExpertActivation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    absent: bool = False,
) -> Tensor:
    """Send every row of x through its experts and sum the results.

    x: [T, E]. ids: [T, k] int32, no expert twice in a row. weights: [T, k] float32.
    absent: some ids are -1, of experts that are not in these banks: they add nothing.
    gate_up: [X, 2F, E], down: [X, E, F], gate_up_bias: [X, 2F], down_bias: [X, E], of x's dtype;
    the products of other banks are those of their experts: `fp8_linear`, `int8_linear`...
    Returns a new [T, E].
    """
    biases = gate_up_bias, down_bias
    if not x.is_cpu:
        return multiply_all_experts(x, ids, weights, gate_up, down, gate, biases)
    multiply = partial(_multiply_chosen, gate_up=gate_up, down=down, gate=gate, biases=biases)
    return on_replay(multiply, x, ids, weights)


def _multiply_chosen(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Any,
    down: Any,
    gate: ExpertActivation,
    biases: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Send each row through its experts only: which these are decides the shapes."""
    tokens, k = ids.shape
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten() + 1, minlength=len(gate_up) + 1).tolist()
    outputs = x.new_empty(tokens * k, x.shape[1])
    elsewhere, *pairs_of = order.split(counts)
    outputs[elsewhere] = 0
    for i, pairs in enumerate(pairs_of):
        if len(pairs):
            h = gate(product_of(x[pairs // k], gate_up[i], bias_of(biases[0], i)))
            outputs[pairs] = product_of(h, down[i], bias_of(biases[1], i))
    return (outputs.view(tokens, k, -1).float() * weights[:, :, None]).sum(1).to(x.dtype)


def multiply_all_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Any,
    down: Any,
    gate: ExpertActivation,
    biases: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """The same, every row through every expert: a CUDA graph cannot wait for which are chosen.

    It serves banks without kernels on a GPU. Terms are added in the order of experts, not of k.
    """
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for i in range(len(gate_up)):
        chosen = ids == i
        h = gate(product_of(x, gate_up[i], bias_of(biases[0], i)))
        out = product_of(h, down[i], bias_of(biases[1], i)).float()
        share = (weights * chosen).sum(1)
        y = torch.where(chosen.any(1)[:, None], y + share[:, None] * out, y)
    return y.to(x.dtype)


def product_of(x: Tensor, weight: Tensor | StoredWeight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, StoredWeight):
        out = weight.product(x, bias)
        lazy_fusion.flush()  # on a GPU: the arithmetic that reads it is not an op
        return out
    return F.linear(x, weight, bias)


def bias_of(bias: Tensor | None, i: int) -> Tensor | None:
    return None if bias is None else bias[i]
