"""Steps of two to eight rows: products by bands beside those before, and the fastest plans.

    python bench/bands_gpu.py [--parts check,sweep,chain,ring] [--json FILE] [--seconds 200]

JSON lines. check: results beside float64. sweep: every plan of every product of two models, with what
is fused into it, its weights from memory; old: the kernels that did the same before. chain: captured
steps with bands and without. ring: the ring whose first rows of x pass through registers.
"""

import argparse
import functools
import json
import multiprocessing
import os
import time
from pathlib import Path
from unittest import mock

import torch
from gpu_decode import Stack
from gpu_ops import graph_ms
from small_m_gpu import CONTEXT, META, PEAK, kernel_times, verify_inputs

from quire.kernels.framework import lazy_fusion
from quire.kernels.gpu.attention import paged_attention_drafts_fused as packed_fused
from quire.kernels.framework.kernel_precompile import KernelCompilers
from quire.kernels.framework.meta_device import on_meta_device, trace_kernels
from quire.kernels.gpu.linear import small_m_bands, small_m_linear, small_m_plans, small_m_ring
from quire.kernels.gpu.linear.gemv import AddedResidual, FusedActivation, FusedNorm
from quire.kernels.gpu.linear.small_m_bands import BandsPlan
from quire.kernels.gpu.rowwise import rms_norm
from quire.kernels.gpu.runtime.target import GpuTarget

SHAPES = {  # outputs of one half, inputs, what is fused
    "llama-8b gate_up": (14336, 4096, "norm act"),
    "llama-8b down": (4096, 14336, "add"),
    "llama-8b qkv": (6144, 4096, "norm"),
    "llama-8b o": (4096, 4096, "add"),
    "qwen3-0.6b gate_up": (3072, 1024, "norm act"),
    "qwen3-0.6b down": (1024, 3072, "add"),
    "qwen3-0.6b qkv": (4096, 1024, "norm"),
    "qwen3-0.6b o": (1024, 2048, "add"),
    "llama-8b head": (128256, 4096, "norm"),
    "llama-8b of two ranks qkv": (3072, 4096, "norm"),
    "llama-8b of two ranks o": (4096, 2048, ""),
    "llama-8b of two ranks gate_up": (7168, 4096, "norm act"),
    "llama-8b of two ranks down": (4096, 7168, ""),
}
SMS = 132
RULE = small_m_plans.bands_of
NONE = mock.patch.object(small_m_plans, "find_bands", return_value=None)
APART = mock.patch.object(packed_fused, "supports", return_value=False)


def candidates(outputs, inputs, fused):
    pair, normed = "act" in fused, "norm" in fused
    found = []
    for plan in ((4, 512, 2, 1), (4, 512, 1, 1), (4, 256, 4, 1), (4, 256, 3, 1), (4, 256, 2, 1), (8, 256, 2, 1), (8, 256, 1, 1),
                 (8, 128, 4, 1), (8, 128, 3, 1), (8, 128, 2, 1), (16, 128, 2, 1), (16, 64, 4, 1), (4, 128, 4, 1), (4, 256, 2, 2), (4, 128, 4, 2),
                 (2, 512, 2, 2), (8, 512, 1, 1), (2, 512, 4, 1), (8, 128, 2, 2)):
        plan = BandsPlan(*plan[:3], plan[3] * SMS)
        if small_m_bands.fits(plan, outputs, inputs, pair, normed):
            found.append(plan)
    return found


class Problem:
    """One product with what is fused into it: copies of its weight, rows, and results."""

    def __init__(self, outputs, inputs, fused, device="cuda", copies=None):
        self.outputs, self.inputs, self.device = outputs, inputs, device
        self.pair, self.normed, self.adds = ("act" in fused, "norm" in fused, "add" in fused)
        total = outputs * (1 + self.pair)
        self.bytes = 2 * total * inputs
        copies = copies or max(2, min(48, int(4e8 // self.bytes)))
        self.weights = [self._rand(total, inputs) * inputs**-0.5 for _ in range(copies)]
        self.x, self.scale = self._rand(8, inputs), self._rand(inputs)
        self.z, self.a, self.y = (self._rand(8, n) for n in (total, outputs, inputs))
        self.residual, self.r = self._rand(8, total), self._rand(8, total)
        self.in_residual, self.in_r = self._rand(8, inputs), self._rand(8, inputs)
        self.squares = torch.empty((total // 16, 8), device=device, dtype=torch.float32)
        self.in_squares = torch.empty((inputs // 16, 8), device=device, dtype=torch.float32)
        if device != META:
            self.in_squares.copy_(self.x.float().square().view(8, -1, 16).sum(2).t())
        self.norm2 = self._rand(total)

    def _rand(self, *shape):
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def _act(self, rows):
        return FusedActivation("silu", self.a[:rows]) if self.pair else None

    def launch(self, rows, plan, copy):
        norm = added = None
        if self.normed:
            norm = FusedNorm(self.x[:rows], self.scale, 1e-5, None, 0.0, self.y[:rows],
                             self.in_r[:rows], self.in_squares)  # fmt: skip
        if self.adds:
            added = AddedResidual(self.residual[:rows], self.r[:rows], self.squares)
        small_m_bands.launch(self.z[:rows], self.x[:rows], self.weights[copy], None, plan, norm,
                             self._act(rows), added)  # fmt: skip

    def launch_old(self, rows, copy):
        """The kernels that did the same before: of a norm, all of it is before the product."""
        x = self.x[:rows]
        if self.normed:
            rms_norm.launch((self.y[:rows], self.in_r[:rows]), x, self.scale, 1e-5,
                            self.in_residual[:rows])  # fmt: skip
            x = self.y[:rows]
        with NONE:
            small_m_linear.launch(self.z[:rows], x, self.weights[copy], act=self._act(rows))

    def launch_one(self, rows, copy):
        """The kernel of one row."""
        norm = None
        if self.normed:
            norm = FusedNorm(self.x[:1], self.scale, 1e-5, self.in_residual[:1], 0.0, self.y[:1], self.in_r[:1])
        small_m_linear.launch(self.z[:1], self.x[:1], self.weights[copy], None, norm, self._act(1))

    def us(self, launch, rows, *plan):
        calls = [functools.partial(launch, rows, *plan, copy) for copy in range(len(self.weights))]
        return graph_ms(calls * max(1, 8 // len(calls)), 6) * 1e3

    def fault(self, rows, plan):
        """Return what is wrong with a plan's results; nothing: ""."""
        for one in (self.z, self.a, self.y, self.r, self.squares):
            one.fill_(float("nan"))
        self.launch(rows, plan, 0)
        x = self.x[:rows].double()
        wrong = []

        def compare(name, got, want, limit=4e-3):
            error = ((got.double() - want).norm() / want.norm()).item()
            if not error < limit:
                wrong.append(f"{name} {error:.2g}")

        if self.normed:
            y = x * torch.rsqrt(x.square().mean(1, True) + 1e-5) * self.scale.double()
            compare("y", self.y[:rows], y)
            x = self.y[:rows].double()
        z = x @ self.weights[0].double().t()
        compare("z", self.z[:rows], z)
        got = self.z[:rows]
        if self.pair:
            gate, up = got.double().chunk(2, 1)
            compare("a", self.a[:rows], torch.nn.functional.silu(gate) * up)
        if self.adds:
            compare("r", self.r[:rows], got.double() + self.residual[:rows].double())
            compare("squares", self.squares.sum(0)[:rows], self.r[:rows].double().square().sum(1), 1e-5)
        if rows < 8 and not self.z[rows:].isnan().all():
            wrong.append("writes other rows")
        keep, own, first = rows - 1, self.x.clone(), got.clone()
        self.x[: rows - 1].normal_()
        self.launch(rows, plan, 0)
        self.x.copy_(own)
        if not torch.equal(self.z[keep], first[keep]):
            wrong.append("a row depends on others")
        return ", ".join(wrong)


def compile_all(names, processes, most):
    began = time.monotonic()
    target = GpuTarget((9, 0), SMS)
    compilers = KernelCompilers(target, processes, launchers=torch.cuda.is_available())
    with on_meta_device(target), trace_kernels(compilers.add):
        for name in names:
            outputs, inputs, fused = SHAPES[name]
            problem = Problem(outputs, inputs, fused, META, 1)
            for plan in candidates(outputs, inputs, fused)[:most]:
                problem.launch(4, plan, 0)
            problem.launch_old(4, 0)
    found = sum(1 for _ in compilers.results())
    print(json.dumps({"part": "compile", "kernels": found, "seconds": round(time.monotonic() - began, 1)}), flush=True)


def check(note):
    for name, (outputs, inputs, fused) in SHAPES.items():
        if "head" in name:
            continue
        problem = Problem(outputs, inputs, fused, copies=1)
        plan = small_m_plans.bands_of(4, outputs, inputs, problem.pair, problem.normed, SMS)
        plan = plan or BandsPlan(4, 256, 2, SMS)
        faults = {}
        for rows in (2, 3, 4, 5, 8):
            try:
                if wrong := problem.fault(rows, plan):
                    faults[rows] = wrong
            except Exception as error:  # noqa: BLE001
                faults[rows] = f"{type(error).__name__}: {error}"[:300]
        note(part="check", shape=name, plan=plan and list(plan), faults=faults)


def check_attention(note):
    """Rows with drafts in one kernel beside the ops one by one, on this device."""
    from quire.kernels.kv_write import kv_write
    from quire.kernels.paged_attention import _case, paged_attention
    from quire.kernels.rms_norm import rms_norm
    from quire.kernels.rope import rope

    chains = [33, 34, 35, 0, 128, 129, 130, 131, 132, 7, 1, 2, 3, 4, 5]
    kinds = (
        ((32, 8, 128), torch.bfloat16, None, False, False),
        ((16, 8, 128), torch.bfloat16, None, True, False),
        ((32, 8, 128), torch.float32, None, False, False),
        ((8, 4, 64), torch.bfloat16, 20, True, True),
    )
    all_contexts = ([300, 301, 302, 303], [8000, 8001, 8002, 8003], chains, list(range(60, 73)))
    for (heads, kv_heads, size), dtype, window, normed, interleaved in kinds:
        for contexts in all_contexts:
            rows = len(contexts)
            torch.manual_seed(0)
            case = _case(torch.device("cuda"), (heads, kv_heads, size, 16), [(1, c) for c in contexts],
                         dtype, window, features="decodes rows drafts")
            case["decodes"] = rows
            qkv = torch.randn(rows, heads + 2 * kv_heads, size, device="cuda").to(dtype)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
            positions = torch.tensor([max(c - 1, 0) for c in contexts], dtype=torch.int32, device="cuda")
            angles = torch.outer(torch.arange(9000.0), 0.9 ** torch.arange(size // 2))
            table = torch.cat([angles.cos(), angles.sin()], -1).cuda()
            weight = torch.randn(size, device="cuda").to(dtype)
            block = case["tables"][case["rows"].long(), positions.long() // 16].long()
            slots = torch.where(case["contexts"] > 0, block * 16 + positions % 16, -1)
            for slot in slots[slots >= 0].tolist():
                case["cache"][slot // 16, :, :, slot % 16] = float("nan")
            given = {n: x for n, x in case.items() if n not in ("q", "cache")}
            given["counters"] = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")

            def run(cache):
                a, b = q, k
                if normed:
                    a, b = rms_norm(q, weight, 1e-6)[0], rms_norm(k, weight, 1e-6)[0]
                a, b = rope(a, b, positions, table, interleaved)
                kv_write(b, v, cache, slots)
                y = paged_attention(a, cache, k=b, v=v, **given)
                del a, b
                lazy_fusion.flush()
                return y

            started, real = [], packed_fused.launch

            def launch(*args):
                started.append(1)
                real(*args)

            first, second = case["cache"].clone(), case["cache"].clone()
            try:
                with lazy_fusion.disabled():
                    want = run(first)
                with mock.patch.object(packed_fused, "launch", launch):
                    got = run(second)
                error = ((got.double() - want.double()).norm() / want.double().norm()).item()
                kept = (second.double() - first.double()).nan_to_num().abs().max().item()
                bad = not error < (1e-5 if dtype == torch.float32 else 8e-3) or not kept < 0.05
                nan = (second.isnan() != first.isnan()).any().item()
                if bad or nan or not got.isfinite().all():
                    note(part="attention", contexts=contexts[:4], heads=[heads, kv_heads, size], dtype=str(dtype),
                         window=window, error=error, cache=kept, nan=nan, fused=len(started))
                else:
                    show(f"attention {contexts[0]} x {rows}, {heads}/{kv_heads}/{size}, {dtype}, {window}: {error:.2g} fused {len(started)}")
            except Exception as error:  # noqa: BLE001
                note(part="attention", contexts=contexts[:4], heads=[heads, kv_heads, size], dtype=str(dtype),
                     wrong=f"{type(error).__name__}: {error}"[:300])
    note(part="attention", done=True)


def show(text):
    print(text, flush=True)


def sweep(name, deadline, note):
    outputs, inputs, fused = SHAPES[name]
    problem = Problem(outputs, inputs, fused)
    floor = problem.bytes / PEAK
    old = {rows: problem.us(problem.launch_old, rows) for rows in (2, 4, 8)}
    one = problem.us(problem.launch_one, 1)
    timed, faults = [], []
    plans = candidates(outputs, inputs, fused)
    for plan in plans:
        if time.time() > deadline:
            note(part="sweep", shape=name, stopped="no time left", left=len(plans) - len(timed))
            break
        try:
            fault = problem.fault(4, plan)
            if not fault:
                timed.append((problem.us(problem.launch, 4, plan), plan))
        except Exception as error:  # noqa: BLE001
            fault = f"{type(error).__name__}: {error}"[:200]
        if fault:
            faults.append([list(plan), fault])
    timed.sort()
    for rows in (2, 4, 8):
        best = timed if rows == 4 else sorted((problem.us(problem.launch, rows, plan), plan) for _, plan in timed[:3])
        note(part="sweep", shape=name, rows=rows, floor=round(floor, 2), one_row=round(one, 2), old=round(old[rows], 2),
             best=[[round(us, 2), *plan] for us, plan in best[: 12 if rows == 4 else 3]], tried=len(timed))
    by = {}
    for us, plan in timed:
        by.setdefault(str((*plan[:2], plan.programs)), [round(us, 2), plan[2]])
    note(part="by", shape=name, best=by, faults=faults[:3], wrong=len(faults))


def ring(name, note):
    """The ring in use beside the one whose first rows of x pass through registers."""
    import ring_x

    outputs, inputs, fused = SHAPES[name]
    problem = Problem(outputs, inputs, "act" if "act" in fused else "")
    for rows in (8, 16, 32):
        plan = small_m_plans.plan_of(rows, outputs, inputs, problem.pair)
        if plan is None or plan.kernel != "ring":
            continue
        big = [torch.randn(32, n, device="cuda").bfloat16() for n in (inputs, outputs * (1 + problem.pair), outputs)]
        found = {}
        for kind, body in {"now": small_m_ring, "x": ring_x}.items():
            def launch(rows, copy, body=body):
                act = FusedActivation("silu", big[2][:rows]) if problem.pair else None
                body.launch(big[1][:rows], big[0][:rows], problem.weights[copy], None, act, body.RingPlan(*plan.numbers))
            found[kind] = round(problem.us(launch, rows), 2)
            launch(rows, 0)
            found[f"{kind} sum"] = big[1][:rows].float().abs().sum().item()
        note(part="ring", shape=name, rows=rows, plan=list(plan.numbers), floor=round(problem.bytes / PEAK, 2), **found)


def best_plans(path):
    found = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if line.get("part") == "sweep" and line.get("rows") == 4 and line.get("best"):
            outputs, inputs, fused = SHAPES[line["shape"]]
            found[outputs, inputs, "act" in fused] = BandsPlan(*line["best"][0][1:])
    return found


def wide(real, rows, *shape):
    return real(8 if 2 <= rows <= 4 else rows, *shape)


def chain(model, path, note):
    """Time whole steps: as before, with bands by the rule, with the best bands, and others."""
    stack, best = Stack(model, lambda weight: weight), best_plans(path)
    floor = stack.bytes() / PEAK / 1e3
    rule = small_m_plans.bands_of
    in_use = small_m_plans.plan_of

    def found(rows, outputs, inputs, pair, normed, sms, best=best):
        plan = rule(rows, outputs, inputs, pair, normed, sms)
        return plan and best.get((outputs, inputs, pair), plan)

    def unfused(x, weight, squares):
        return x.shape[0] == 1

    chosen = mock.patch.object(small_m_plans, "bands_of", found)
    eight = mock.patch.object(small_m_plans, "plan_of", functools.partial(wide, in_use))
    kinds = {
        "before": [NONE, APART],
        "rotation inside": [NONE],
        "ring of 8": [NONE, eight],
        "rule": [],
        "best": [chosen],
        "rule, rotation apart": [APART],
        "rule, norms apart": [
            mock.patch.object(small_m_linear, "fuses_norm", unfused),
            mock.patch.object(small_m_linear, "adds_residual", lambda *args: False),
        ],
    }
    for rows in ("verify 4", 4, 1, 2, 8, "verify 8"):
        t = stack.inputs(rows, CONTEXT) if isinstance(rows, int) else verify_inputs(stack, int(rows[-1]) - 1)
        step, times, outs = functools.partial(stack.step, t), {}, {}
        for kind, patches in kinds.items():
            if rows == 1 and kind != "before":
                continue
            with _all(patches):
                try:
                    outs[kind] = step().float()
                    times[kind] = round(graph_ms([step], 10), 3)
                except Exception as error:  # noqa: BLE001
                    times[kind] = f"{type(error).__name__}: {error}"[:200]
        want = outs.get("before")
        errors = {k: round(((o - want).norm() / want.norm()).item(), 4) for k, o in outs.items() if k != "before"}
        note(part="chain", model=model, rows=rows, floor_ms=round(floor, 3), **times, errors=errors)
        if rows in ("verify 4", 1):
            for kind, patches in kinds.items():
                if kind not in ("before", "rule") or (rows == 1 and kind != "before"):
                    continue
                with _all(patches):
                    try:
                        kernels = kernel_times(step)
                    except Exception as error:  # noqa: BLE001
                        kernels = f"{type(error).__name__}: {error}"[:200]
                note(part="kernels", model=model, rows=rows, kind=kind, us_a_layer=kernels)


def two(normed_plan, plain_plan, rows, outputs, inputs, pair, normed, sms):
    """Plans of products with a norm, and of those without, if they fit; else those of the rule."""
    if not 2 <= rows <= 8 or outputs * inputs < 8_000_000:
        return None
    warps, columns, stages, each = normed_plan if normed else plain_plan
    if not normed and each == 0:  # two programs for long bands
        stages, each = (stages, 1) if inputs < 8192 else (stages // 2, 2)
    for some in range(stages, 0, -1):
        plan = BandsPlan(warps, columns, some, each * sms)
        if small_m_bands.fits(plan, outputs, inputs, pair, normed):
            return plan
    return RULE(rows, outputs, inputs, pair, normed, sms)


def rules(model, note):
    """Time the whole step with one plan for products with a norm and one for those without."""
    stack = Stack(model, lambda weight: weight)
    steps = {"verify 4": functools.partial(stack.step, verify_inputs(stack, 3))}
    for rows in (2, 4, 8):
        steps[rows] = functools.partial(stack.step, stack.inputs(rows, CONTEXT))
    found = []
    normed = ((4, 512, 2, 1), (4, 256, 4, 1), (4, 256, 3, 1), (4, 256, 2, 1), (8, 256, 2, 1), (8, 128, 4, 1), (8, 128, 3, 1), (16, 128, 2, 1), (8, 256, 1, 1))
    plain = ((4, 256, 4, 0), (4, 256, 4, 1), (4, 512, 2, 1), (8, 128, 4, 0), (4, 128, 8, 0), (4, 256, 2, 1), (4, 256, 3, 1))
    pairs = [(one, plain[0]) for one in normed] + [(normed[i], one) for one in plain[1:] for i in (0, 4)]
    for pair in pairs:
        with mock.patch.object(small_m_plans, "bands_of", functools.partial(two, *pair)):
            times = {}
            for name, step in steps.items():
                try:
                    times[name] = round(graph_ms([step], 8), 3)
                except Exception as error:  # noqa: BLE001
                    times[name] = f"{type(error).__name__}: {error}"[:80]
        found.append([times, *pair])
        show(f"rules {model} {found[-1]}")
    found.sort(key=lambda one: str(one[0]["verify 4"]))
    note(part="rules", model=model, found=found)


def _all(patches):
    from contextlib import ExitStack

    stack = ExitStack()
    for one in patches:
        stack.enter_context(one)
    return stack


def in_process(seconds, path, body, *args):
    def note(**line):
        print(json.dumps(line), flush=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def run():
        with torch.inference_mode():
            body(*args, note)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(max(1, seconds))
    if process.is_alive():
        process.kill()
        note(part=body.__name__, of=str(args[0]) if args else "", stopped=f"after {seconds:.0f} s")
    process.join()
    if process.exitcode:
        note(part=body.__name__, of=str(args[0]) if args else "", stopped=f"exit status {process.exitcode}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150, help="of the sweep")
    parser.add_argument("--json", type=Path, default=Path("/tmp/bands_gpu.jsonl"))
    parser.add_argument("--parts", default="check,sweep,chain,ring")
    parser.add_argument("--models", default="llama-8b,qwen3-0.6b")
    parser.add_argument("--shapes", default="", help="those of the sweep whose names begin so")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--compile-only", type=int, default=0)
    args = parser.parse_args()
    parts = args.parts.split(",")
    names = [name for name in SHAPES if name.startswith(args.shapes)]
    if args.compile_only:
        compile_all(names, args.processes, args.compile_only)
        return
    compiling = multiprocessing.get_context("fork").Process(target=compile_all, args=(names, args.processes, 999))
    if "sweep" in parts:
        compiling.start()
    if "check" in parts:
        in_process(90, args.json, check)
        in_process(90, args.json, check_attention)
    if "sweep" in parts:
        compiling.join(90)
        end = time.time() + args.seconds
        for i, name in enumerate(names):
            deadline = time.time() + max(3, (end - time.time()) / (len(names) - i))
            in_process(deadline - time.time() + 15, args.json, sweep, name, deadline)
        if compiling.is_alive():
            compiling.kill()
    if "chain" in parts:
        for model in args.models.split(","):
            in_process(100, args.json, chain, model, args.json)
    if "rules" in parts:
        in_process(150, args.json, rules, "llama-8b")
    if "ring" in parts:
        for name in [n for n in names if "ranks" not in n and "head" not in n]:
            in_process(20, args.json, ring, name)


if __name__ == "__main__":
    main()
