"""Steps of 2 to 64 rows: where their time goes, and the fastest plans of their products.

    python bench/small_m_gpu.py [--seconds 150] [--only llama-8b,qwen3-0.6b] [--json FILE]
                                [--parts breakdown,sweep,chain,rule]

JSON lines, tables last. breakdown: a captured step by its kernels, microseconds a layer, beside the
bytes of its weights at 4.3 TB/s. sweep: every plan of every product, whose weights come from memory
(copies in turn), beside the plan in use, what is used without plans, and the library. chain: steps
with plans beside steps without. rule: the plans in use for products of other models.

Kernels are compiled by processes beside the first part. Each part runs in processes of its own, so
an error of one plan, or a kernel that never ends, costs the rest of its shape only.
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
from gpu_decode import BLOCK, Stack
from gpu_ops import graph_ms

from quire.kernels.act import act_mul
from quire.kernels.framework import lazy_fusion
from quire.kernels.framework.kernel_precompile import KernelCompilers
from quire.kernels.framework.meta_device import on_meta_device, trace_kernels
from quire.kernels.gpu.elementwise import act_mul as gpu_act_mul
from quire.kernels.gpu.linear import small_m_linear, small_m_plans, small_m_registers, small_m_ring
from quire.kernels.gpu.linear.gemv import FusedActivation
from quire.kernels.gpu.linear.small_m_plans import GluonPlan, plan_of
from quire.kernels.gpu.linear.small_m_registers import RegistersPlan
from quire.kernels.gpu.linear.small_m_ring import RingPlan
from quire.kernels.gpu.runtime.target import GpuTarget
from quire.kernels.linear import linear
from quire.kernels.rms_norm import rms_norm

PEAK = 4.3e6  # bytes of a microsecond
SHAPES = {  # outputs of one half, inputs, activation after
    "llama-8b gate_up": (14336, 4096, True),
    "llama-8b down": (4096, 14336, False),
    "llama-8b qkv": (6144, 4096, False),
    "llama-8b o": (4096, 4096, False),
    "qwen3-0.6b gate_up": (3072, 1024, True),
    "qwen3-0.6b down": (1024, 3072, False),
    "qwen3-0.6b qkv": (4096, 1024, False),
    "qwen3-0.6b o": (1024, 2048, False),
}
OTHERS = {  # of the rule
    f"{model} {name}": shape
    for model, e, qkv, o, mlp in (
        ("qwen3-1.7b", 2048, 4096, 2048, 6144), ("qwen3-4b", 2560, 6144, 4096, 9728),
        ("qwen2.5-7b", 3584, 4608, 3584, 18944), ("llama-3b", 3072, 5120, 3072, 8192),
        ("llama-8b of two ranks", 4096, 3072, 2048, 7168),
        ("qwen3-0.6b of two ranks", 1024, 2048, 1024, 1536),
        ("llama-70b of four ranks", 8192, 2560, 2048, 7168),
    )
    for name, shape in (("qkv", (qkv, e, False)), ("o", (e, o, False)),
                        ("gate_up", (mlp, e, True)), ("down", (e, mlp, False)))
}  # fmt: skip
WIDTHS = (8, 16, 32, 64)  # rows of a tile
ROWS = (2, 4, 8, 16, 32, 64)
CONTEXT = 300
MIN_IN_FLIGHT = 40e3  # bytes of a multiprocessor: fewer do not fill the memory's pipe
MULTIPROCESSORS = 132
META = torch.device("meta")


# -- plans ------------------------------------------------------------------------------------


def candidates(width, outputs, inputs, pair):
    """Return the plans that are tried, for tiles of so many rows of x."""
    found = [*_rings(width, outputs, inputs, pair)]
    if width <= 32:
        found += _registers(width, outputs, inputs, pair)
    return list(dict.fromkeys(found))


def _rings(width, outputs, inputs, pair):
    for band, warps in ((16, 1), (32, 2), (64, 4)):
        programs = outputs // band
        if not 60 <= programs <= 1000:
            continue
        for columns in (128, 256) if band == 64 else (256, 512):
            stage = 2 * columns * (width + band * (1 + pair))
            for most in (52e3, 75e3, 110e3, 220e3):
                stages = min(int(most // stage), inputs // columns, 12)
                if stages < 3:
                    continue
                held = stages * stage * min(programs / MULTIPROCESSORS, 227e3 // (stages * stage))
                if held < MIN_IN_FLIGHT:
                    continue
                plan = RingPlan(width, band, columns, stages, warps)
                if small_m_ring.fits(plan, outputs, inputs, pair):
                    yield GluonPlan("ring", tuple(plan))


def _registers(width, outputs, inputs, pair):
    for band in (16, 32):
        for deep in (4, 8, 16):
            programs = outputs // band
            if not 60 <= programs <= 1000:
                continue
            for ahead in (2, 4, 6, 7, 8, 12, 14, 16):
                registers = ahead * band // 2 * (1 + pair)
                if not 32 <= registers + ahead * width // 4 <= 160 or registers > 128:
                    continue
                plan = RegistersPlan(width, band, deep, ahead)
                if small_m_registers.fits(plan, outputs, inputs):
                    yield GluonPlan("registers", tuple(plan))


# -- compiling --------------------------------------------------------------------------------


def compile_all(names, others, processes):
    """Compile every plan of some products and those in use of others, into Triton's folder."""
    began, target = time.monotonic(), GpuTarget((9, 0), MULTIPROCESSORS)
    compilers = KernelCompilers(target, processes, launchers=torch.cuda.is_available())
    with on_meta_device(target), trace_kernels(compilers.add):
        for name in names:
            outputs, inputs, pair = SHAPES[name]
            for width in WIDTHS:
                problem = Problem(outputs, inputs, pair, META, 1)
                for plan in candidates(width, outputs, inputs, pair):
                    problem.launch(width, plan, 0)
                problem.launch_current(min(width, 8), 0)
        for shape in others:
            problem = Problem(*shape, META, 1)
            for rows in ROWS:
                problem.launch_current(min(rows, 8), 0)
                if plan := plan_of(rows, *shape):
                    problem.launch(rows, plan, 0)
    found = sum(1 for _ in compilers.results())
    show(part="compile", kernels=found, seconds=round(time.monotonic() - began, 1))


# -- products ---------------------------------------------------------------------------------


class Problem:
    """One product: copies of its weight, rows, and results."""

    def __init__(self, outputs, inputs, pair, device, copies=None):
        self.shape, self.device = (outputs, inputs, pair), device
        total = outputs * (1 + pair)
        self.bytes = 2 * total * inputs
        copies = copies or max(1, min(48, int(4e8 // self.bytes)))
        self.weights = [self._rand(total, inputs) * inputs**-0.5 for _ in range(copies)]
        self.x, self.z = self._rand(64, inputs), self._rand(64, total)
        self.a = self._rand(64, outputs)

    def _rand(self, *shape):
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def _act(self, rows):
        return FusedActivation("silu", self.a[:rows]) if self.shape[2] else None

    def launch(self, rows, plan, copy):
        weight = self.weights[copy]
        small_m_plans.launch(self.z[:rows], self.x[:rows], weight, None, self._act(rows), plan)

    def launch_current(self, rows, copy):
        """What is in use without plans."""
        if rows > small_m_linear.MAX_ROWS:
            self.launch_library(rows, copy)
            return
        weight = self.weights[copy]
        with mock.patch.object(small_m_plans, "find_plan", return_value=None):
            small_m_linear.launch(self.z[:rows], self.x[:rows], weight, act=self._act(rows))

    def launch_library(self, rows, copy):
        torch.mm(self.x[:rows], self.weights[copy].t(), out=self.z[:rows])
        if self.shape[2]:
            gpu_act_mul.launch(self.a[:rows], self.z[:rows], "silu")

    def us(self, launch, rows, *plan):
        calls = [functools.partial(launch, rows, *plan, copy) for copy in range(len(self.weights))]
        return graph_ms(calls * max(1, 8 // len(calls)), 8) * 1e3

    @functools.cached_property
    def wanted(self):
        z = self.x.float() @ self.weights[0].float().t()
        if not self.shape[2]:
            return z
        gate, up = z.bfloat16().float().chunk(2, 1)
        return torch.nn.functional.silu(gate) * up

    def fault(self, rows, plan):
        """Return what is wrong with a plan's results; nothing: ""."""
        out = self.a if self.shape[2] else self.z
        self.z.fill_(float("nan"))
        self.a.fill_(float("nan"))
        self.launch(rows, plan, 0)
        got, want = out[:rows].clone(), self.wanted[:rows]
        error = ((got.float() - want).norm() / want.norm()).item()
        if not error < 1e-2:
            return f"error {error}"
        if not out[rows:].isnan().all():
            return "writes other rows"
        keep, own = rows // 2, self.x.clone()
        self.x.normal_()
        self.x[keep] = own[keep]
        self.launch(rows, plan, 0)
        self.x.copy_(own)
        return "" if torch.equal(out[keep], got[keep]) else "a row depends on others"


def sweep(name, deadline, note):
    """Time each plan of a product."""
    outputs, inputs, pair = SHAPES[name]
    problem = Problem(outputs, inputs, pair, "cuda")
    floor = problem.bytes / PEAK
    for width in WIDTHS:
        rows_of_width = [rows for rows in ROWS if max(8, rows) == width]
        current = {rows: problem.us(problem.launch_current, rows) for rows in rows_of_width}
        library = {rows: problem.us(problem.launch_library, rows) for rows in rows_of_width}
        timed = []
        for plan in candidates(width, outputs, inputs, pair):
            if time.time() > deadline:
                note(part="sweep", shape=name, rows=width, stopped="no time left")
                break
            try:
                fault = problem.fault(width, plan)
                if not fault:
                    timed.append((problem.us(problem.launch, width, plan), plan))
            except Exception as error:  # noqa: BLE001 - of many kinds; the next plan may run
                fault = f"{type(error).__name__}: {error}"[:200]
            if fault:
                note(part="sweep", shape=name, rows=width, plan=list(plan), wrong=fault)
        timed.sort()
        for rows in rows_of_width:
            best = timed if rows == width else sorted(
                (problem.us(problem.launch, rows, plan), plan) for _, plan in timed[:4]
            )  # fmt: skip
            kinds = {}
            for us, plan in best:
                kinds.setdefault(plan.kernel, [round(us, 2), *plan.numbers])
            plan = plan_of(rows, outputs, inputs, pair)
            used = problem.us(problem.launch, rows, plan) if plan else current[rows]
            note(
                part="sweep", shape=name, rows=rows, floor=round(floor, 2), used=round(used, 2),
                current=round(current[rows], 2), library=round(library[rows], 2),
                best=[[round(us, 2), plan.kernel, *plan.numbers] for us, plan in best[:4]],
                best_of_each=kinds, tried=len(timed),
            )  # fmt: skip


def rule(name, deadline, note):
    """Time the plans in use of a product."""
    problem = Problem(*OTHERS[name], "cuda")
    for rows in ROWS:
        if time.time() > deadline:
            note(part="rule", shape=name, rows=rows, stopped="no time left")
            return
        plan = plan_of(rows, *OTHERS[name])
        if plan is None:
            continue
        if fault := problem.fault(max(rows, 2), plan):
            note(part="rule", shape=name, rows=rows, plan=[plan.kernel, *plan.numbers], wrong=fault)
            continue
        note(
            part="rule", shape=name, rows=rows, floor=round(problem.bytes / PEAK, 2),
            used=round(problem.us(problem.launch, rows, plan), 2),
            current=round(problem.us(problem.launch_current, rows), 2),
            library=round(problem.us(problem.launch_library, rows), 2),
            plan=[plan.kernel, *plan.numbers],
        )  # fmt: skip


# -- steps ------------------------------------------------------------------------------------


def verify_inputs(stack, drafts):
    """Inputs of a step of one sequence with so many drafts."""
    rows = 1 + drafts
    t = stack.inputs(rows, CONTEXT)
    last = torch.arange(CONTEXT - drafts, CONTEXT + 1, device="cuda", dtype=torch.int32)
    width = -(-CONTEXT // BLOCK)
    tables = torch.arange(width, device="cuda", dtype=torch.int32).view(1, width)
    t["positions"], t["slots"] = last - 1, (last - 1).long()
    t["attention"] |= {
        "tables": tables, "contexts": last, "drafts": True,
        "rows": torch.zeros(rows, device="cuda", dtype=torch.int32),
    }  # fmt: skip
    return t


def kernel_times(step):
    """Return [kernel, microseconds] of one layer: from the end of the kernel before to its own, as
    the profiler sees replays; its own share of the time where kernels overlap."""
    graph = torch.cuda.CUDAGraph()
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    ends = sorted((e.time_range.end, e.name) for e in events)
    ends = ends[len(ends) // 3 : 2 * len(ends) // 3]
    names = [name for _, name in ends]
    low, high = len(names) // 4, 3 * len(names) // 4
    period = next(
        p for p in range(3, 40) if all(names[i] == names[i + p] for i in range(low, high - p))
    )
    found, count = [[names[low + i], 0.0] for i in range(period)], (high - low) // period
    for i in range(count * period):
        at = low + i
        found[i % period][1] += (ends[at][0] - ends[at - 1][0]) / count
    return [[name[:60], round(us, 2)] for name, us in found]


def pieces(stack, t, rows):
    """Return microseconds a layer of the parts of a step, each in a graph of its own."""
    s = stack.s
    width = {"qkv": s["E"], "o": s["H"] * s["D"], "gate_up": s["E"], "down": s["F"]}
    x = {k: torch.randn(rows, n, device="cuda").bfloat16() for k, n in width.items()}

    def products(names):
        for layer in stack.layers:
            for name in names:
                y = linear(x[name], layer[name])
                if name == "gate_up":
                    act_mul(y, "silu")
        lazy_fusion.flush()

    def norms():
        y, res = x["qkv"], x["gate_up"][:, : s["E"]].contiguous()
        for _ in stack.layers:
            for _ in range(2):
                y, res = rms_norm(y, stack.norm, 1e-5, res)
        lazy_fusion.flush()

    calls = {name: functools.partial(products, (name,)) for name in width}
    calls |= {"products": functools.partial(products, tuple(width)), "norms": norms}
    found = {
        name: round(graph_ms([call], 6) * 1e3 / len(stack.layers), 2)
        for name, call in calls.items()
    }
    without = dict(t, attention=None)
    plain = graph_ms([functools.partial(stack.step, without)], 6)
    whole = graph_ms([functools.partial(stack.step, t)], 6)
    found["attention"] = round((whole - plain) * 1e3 / len(stack.layers), 2)
    return whole, found


def breakdown(model, deadline, note):
    """Show where the time of steps goes."""
    stack = Stack(model, lambda weight: weight)
    floor = stack.bytes() / PEAK / 1e3
    for rows in (1, 2, 4, 8, 16, 32, "verify 4"):
        if time.time() > deadline:
            note(part="breakdown", model=model, rows=rows, stopped="no time left")
            return
        count = rows if isinstance(rows, int) else 4
        t = stack.inputs(rows, CONTEXT) if count == rows else verify_inputs(stack, 3)
        step = functools.partial(stack.step, t)
        ms, found = pieces(stack, t, count)
        note(part="breakdown", model=model, rows=rows, ms=round(ms, 3), floor_ms=round(floor, 3),
             us_a_layer=found)  # fmt: skip
        try:
            kernels = kernel_times(step)
        except Exception as error:  # noqa: BLE001 - without a profiler the pieces remain
            kernels = f"{type(error).__name__}: {error}"[:200]
        note(part="kernels", model=model, rows=rows, us_a_layer=kernels)


def chain(model, note):
    """Time whole steps with plans and without."""
    stack = Stack(model, lambda weight: weight)
    floor = stack.bytes() / PEAK / 1e3
    for rows in (1, *ROWS, "verify 4"):
        t = stack.inputs(rows, CONTEXT) if isinstance(rows, int) else verify_inputs(stack, 3)
        step, found = functools.partial(stack.step, t), {}
        finders = {"before": lambda *args: None, "after": small_m_plans.find_plan}
        for kind, find in finders.items():
            with mock.patch.object(small_m_plans, "find_plan", find):
                found[kind] = round(graph_ms([step], 10), 3)
        note(part="chain", model=model, rows=rows, floor_ms=round(floor, 3), **found,
             ratio=round(found["after"] / found["before"], 3))  # fmt: skip


# -- all --------------------------------------------------------------------------------------


def show(**line):
    print(json.dumps(line), flush=True)


def in_process(seconds, path, body, *args):
    """Run a part in a process of its own, for so long at most; its lines go to a file too."""

    def note(**line):
        show(**line)
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
        note(part=body.__name__, of=str(args[0]), stopped=f"after {seconds:.0f} s")
    process.join()
    if process.exitcode:
        note(part=body.__name__, of=str(args[0]), stopped=f"exit status {process.exitcode}")


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def print_tables(lines):
    print(
        f"\n{'product':28}{'rows':>5}{'floor':>8}{'used':>8}{'before':>8}{'library':>8}{'best':>8}  plan"
    )
    for line in lines:
        if line["part"] in ("sweep", "rule") and "used" in line:
            us, *plan = line["best"][0] if line.get("best") else (line["used"], *line["plan"])
            print(
                f"{line['shape']:28}{line['rows']:5}{line['floor']:8.2f}{line['used']:8.2f}"
                f"{line['current']:8.2f}{line['library']:8.2f}{us:8.2f}  {' '.join(map(str, plan))}"
            )
    print(f"\n{'step':14}{'rows':>9}{'floor':>8}{'before':>8}{'after':>8}")
    for line in lines:
        if line["part"] == "chain" and "before" in line:
            print(f"{line['model']:14}{line['rows']!s:>9}{line['floor_ms']:8.3f}"
                  f"{line['before']:8.3f}{line['after']:8.3f}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--only", default="llama-8b,qwen3-0.6b")
    parser.add_argument("--json", type=Path, default=Path("/tmp/small_m_gpu.jsonl"))
    parser.add_argument("--parts", default="breakdown,sweep,chain,rule")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()
    args.json.unlink(missing_ok=True)
    parts, models, began = args.parts.split(","), args.only.split(","), time.time()
    names = [name for name in SHAPES if name.split()[0] in models] if "sweep" in parts else []
    others = OTHERS if "rule" in parts else {}
    compiling = multiprocessing.get_context("fork").Process(
        target=compile_all, args=(names, others.values(), args.processes)
    )
    compiling.start()
    for model in models if "breakdown" in parts else ():
        in_process(40, args.json, breakdown, model, time.time() + 25)
    compiling.join(max(1, 0.45 * args.seconds - (time.time() - began)))
    end = began + args.seconds - 15 * len(models) * ("chain" in parts)
    runs = [(sweep, name) for name in names] + [(rule, name) for name in others]
    for i, (body, name) in enumerate(runs):
        deadline = time.time() + max(3, (end - time.time()) / (len(runs) - i))
        in_process(deadline - time.time() + 15, args.json, body, name, deadline)
    if compiling.is_alive():
        compiling.kill()
    for model in models if "chain" in parts else ():
        in_process(40, args.json, chain, model)
    print_tables(lines_of(args.json))
    show(part="all", seconds=round(time.time() - began, 1))


if __name__ == "__main__":
    main()
