"""Steps of two to eight rows: products by bands, with what is fused into them, and whole steps.

    python bench/bands_gpu.py [--parts check,sweep,chain] [--models llama-8b,qwen3-0.6b] [--json FILE]

JSON lines. check: results beside float64. sweep: plans of products, whose weights come from memory,
beside that of one row and the kernels that do the same one after the other. chain: captured steps
with context 300, with bands and without, rotations of drafts inside and apart.

Each part runs in processes of its own: an error of one plan costs the rest of its product only.
"""

import argparse
import functools
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from gpu_decode import Stack
from gpu_ops import graph_ms
from small_m_gpu import CONTEXT, MULTIPROCESSORS, PEAK, in_process, verify_inputs

from quire.kernels.gpu.attention import paged_attention_drafts_fused
from quire.kernels.gpu.linear import small_m_bands, small_m_linear, small_m_plans
from quire.kernels.gpu.linear.gemv import AddedResidual, FusedActivation, FusedNorm
from quire.kernels.gpu.linear.small_m_bands import BandsPlan
from quire.kernels.gpu.rowwise import rms_norm

SHAPES = {  # outputs of one half, inputs, what is fused
    "llama-8b gate_up": (14336, 4096, "norm act"),
    "llama-8b down": (4096, 14336, "add"),
    "llama-8b qkv": (6144, 4096, "norm"),
    "llama-8b o": (4096, 4096, "add"),
    "llama-8b head": (128256, 4096, "norm"),
    "qwen3-0.6b gate_up": (3072, 1024, "norm act"),
    "qwen3-0.6b down": (1024, 3072, "add"),
    "qwen3-0.6b qkv": (4096, 1024, "norm"),
    "qwen3-0.6b o": (1024, 2048, "add"),
    "llama-8b of two ranks qkv": (3072, 4096, "norm"),
    "llama-8b of two ranks o": (4096, 2048, ""),
    "llama-8b of two ranks gate_up": (7168, 4096, "norm act"),
    "llama-8b of two ranks down": (4096, 7168, ""),
}
PLANS = (  # warps, columns, stages, programs of a multiprocessor
    (4, 512, 2, 1), (4, 256, 4, 1), (4, 256, 2, 1), (4, 256, 2, 2), (4, 128, 4, 1), (4, 128, 4, 2),
    (8, 256, 2, 1), (8, 128, 4, 1), (8, 128, 2, 1), (2, 512, 4, 1), (2, 512, 2, 2),
)  # fmt: skip
WITHOUT_BANDS = mock.patch.object(small_m_plans, "find_bands", return_value=None)
ROTATION_APART = mock.patch.object(paged_attention_drafts_fused, "supports", return_value=False)


class Problem:
    """One product with what is fused into it: copies of its weight, rows, and results."""

    def __init__(self, outputs, inputs, fused, copies=None):
        self.pair, self.normed, self.adds = (word in fused for word in ("act", "norm", "add"))
        total = outputs * (1 + self.pair)
        self.bytes = 2 * total * inputs
        copies = copies or max(2, min(48, int(4e8 // self.bytes)))
        self.weights = [rand(total, inputs) * inputs**-0.5 for _ in range(copies)]
        self.x, self.scale, self.y, self.r = rand(8, inputs), rand(inputs), *rand(2, 8, inputs)
        self.z, self.a = rand(8, total), rand(8, outputs)
        self.added = AddedResidual(*rand(2, 8, total), small_m_plans.empty_squares(self.z))
        self.squares = self.x.float().square().view(8, -1, 16).sum(2).t().contiguous()

    def launch(self, rows, plan, copy):
        norm = added = None
        if self.normed:
            norm = FusedNorm(self.x[:rows], self.scale, 1e-5, None, 0.0, self.y[:rows],
                             self.r[:rows], self.squares)  # fmt: skip
        if self.adds:
            residual, r, squares = self.added
            added = AddedResidual(residual[:rows], r[:rows], squares)
        weight, act = self.weights[copy], self._act(rows)
        small_m_bands.launch(self.z[:rows], self.x[:rows], weight, None, plan, norm, act, added)

    def launch_apart(self, rows, copy):
        """The kernels without bands: the sum is the norm's, and a norm is a kernel."""
        x = self.x[:rows]
        if self.normed:
            rms_norm.launch((self.y[:rows], self.r[:rows]), x, self.scale, 1e-5, x)
            x = self.y[:rows]
        with WITHOUT_BANDS:
            small_m_linear.launch(self.z[:rows], x, self.weights[copy], act=self._act(rows))

    def launch_row(self, rows, copy):
        """The kernel of one row."""
        x, norm = self.x[:1], None
        if self.normed:
            norm = FusedNorm(x, self.scale, 1e-5, x, 0.0, self.y[:1], self.r[:1])
        small_m_linear.launch(self.z[:1], x, self.weights[copy], None, norm, self._act(1))

    def us(self, launch, rows, *plan):
        calls = [functools.partial(launch, rows, *plan, copy) for copy in range(len(self.weights))]
        return round(graph_ms(calls * max(1, 8 // len(calls)), 6) * 1e3, 2)

    def fault(self, rows, plan):
        """Return what is wrong with a plan's results; nothing: ""."""
        residual, r, squares = self.added
        for one in (self.z, self.a, self.y, r, squares):
            one.fill_(float("nan"))
        self.launch(rows, plan, 0)
        x, wrong = self.x[:rows].double(), []

        def compare(name, got, want, limit=4e-3):
            error = ((got.double() - want).norm() / want.norm()).item()
            if not error < limit:
                wrong.append(f"{name} {error:.2g}")

        if self.normed:
            scale = torch.rsqrt(x.square().mean(1, True) + 1e-5)
            compare("y", self.y[:rows], x * scale * self.scale.double())
            x = self.y[:rows].double()
        got = self.z[:rows].clone()
        compare("z", got, x @ self.weights[0].double().t())
        if self.pair:
            gate, up = got.double().chunk(2, 1)
            compare("a", self.a[:rows], torch.nn.functional.silu(gate) * up)
        if self.adds:
            compare("r", r[:rows], got.double() + residual[:rows].double())
            compare("squares", squares.sum(0)[:rows], r[:rows].double().square().sum(1), 1e-5)
        if rows < 8 and not self.z[rows:].isnan().all():
            wrong.append("writes other rows")
        own = self.x.clone()
        self.x[: rows - 1].normal_()
        self.launch(rows, plan, 0)
        self.x.copy_(own)
        if not torch.equal(self.z[rows - 1], got[-1]):
            wrong.append("a row depends on others")
        return ", ".join(wrong)

    def _act(self, rows):
        return FusedActivation("silu", self.a[:rows]) if self.pair else None


def rand(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def plans_of(outputs, inputs, fused):
    """(plan of the rule or None, plans that are tried)."""
    pair, normed = "act" in fused, "norm" in fused
    rule = small_m_plans.bands_of(4, outputs, inputs, pair, normed, MULTIPROCESSORS)
    some = [BandsPlan(*plan[:3], plan[3] * MULTIPROCESSORS) for plan in PLANS]
    fitting = [one for one in some if small_m_bands.fits(one, outputs, inputs, pair, normed)]
    return rule, list(dict.fromkeys([*([rule] if rule else []), *fitting]))


def check(name, note):
    """Compare the plan in use, or another, with float64."""
    problem, (_, plans) = Problem(*SHAPES[name], copies=1), plans_of(*SHAPES[name])
    faults = {rows: problem.fault(rows, plans[0]) for rows in (2, 3, 4, 5, 8)}
    note(part="check", shape=name, plan=plans[0], faults={k: v for k, v in faults.items() if v})


def sweep(name, note):
    """Time the plans of a product."""
    problem, (rule, plans) = Problem(*SHAPES[name]), plans_of(*SHAPES[name])
    row = problem.us(problem.launch_row, 1)
    for rows in (2, 4, 8):
        times = sorted((problem.us(problem.launch, rows, plan), *plan) for plan in plans)
        note(
            part="sweep", shape=name, rows=rows, floor=round(problem.bytes / PEAK, 2), one_row=row,
            apart=problem.us(problem.launch_apart, rows), best=times[:6],
            used=next((one for one in times if rule and one[1:] == rule), None),
        )  # fmt: skip


def chain(model, note):
    """Time whole steps with bands and without."""
    stack = Stack(model, lambda weight: weight)
    kinds = {"apart": (WITHOUT_BANDS, ROTATION_APART), "bands": (ROTATION_APART,), "fused": ()}
    for rows in (1, 2, 4, 8, "verify 4", "verify 8"):
        alone = isinstance(rows, int)
        t = stack.inputs(rows, CONTEXT) if alone else verify_inputs(stack, int(rows[-1]) - 1)
        step, times, outs = functools.partial(stack.step, t), {}, {}
        for kind, patches in kinds.items():
            with ExitStack() as held:
                for patch in patches:
                    held.enter_context(patch)
                outs[kind] = step().float()
                times[kind] = round(graph_ms([step], 10), 3)
        differ = ((outs["fused"] - outs["apart"]).norm() / outs["apart"].norm()).item()
        floor = round(stack.bytes() / PEAK / 1e3, 3)
        note(part="chain", model=model, rows=rows, floor_ms=floor, **times, differ=differ)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("/tmp/bands_gpu.jsonl"))
    parser.add_argument("--parts", default="check,sweep,chain")
    parser.add_argument("--models", default="llama-8b,qwen3-0.6b")
    args = parser.parse_args()
    models = args.models.split(",")
    names = [name for name in SHAPES if name.split()[0] in models]
    runs = {"check": (check, names), "sweep": (sweep, names), "chain": (chain, models)}
    for part in args.parts.split(","):
        body, cases = runs[part]
        for case in cases:
            in_process(100, args.json, body, case)


if __name__ == "__main__":
    main()
