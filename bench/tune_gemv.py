"""Finds the fastest tiling of the one-row product by shape, for quire/kernels/tuned/gemv.json.

    python bench/tune_gemv.py [--only l.qkv,...] [--kind bf16,e4m3,int8] [--seconds 60]

Each candidate multiplies distinct weights in turn inside one graph, so that caches are cold. Prints
one line a shape: the floor at 4.4 TB/s, the tiling in use, the best ones. Copy those that are
faster by more than noise (3 %) into the table.
"""

import argparse
import functools
import time

import torch
import triton
from gpu_ops import graph_ms

from quire.kernels.formats.fp8_weight import quantize_channels
from quire.kernels.formats.int8_weight import quantize_outputs
from quire.kernels.gpu.linear import gemv, gemv_bytes
from quire.kernels.gpu.linear.gemv import FusedActivation, FusedNorm, GemvPlan

SHAPES = {  # outputs, inputs, norm before, activation after
    "llama-8b qkv": (6144, 4096, 1, 0),
    "llama-8b o": (4096, 4096, 0, 0),
    "llama-8b gate_up": (14336, 4096, 1, 1),
    "llama-8b down": (4096, 14336, 0, 0),
    "llama-8b head": (128256, 4096, 0, 0),
    "llama-8b/2 qkv": (3072, 4096, 0, 0),  # of two ranks, whose norms are in their sums
    "llama-8b/2 o": (4096, 2048, 0, 0),
    "llama-8b/2 gate_up": (7168, 4096, 0, 1),
    "llama-8b/2 down": (4096, 7168, 0, 0),
    "llama-8b/2 head": (64128, 4096, 0, 0),
    "qwen3-0.6b qkv": (4096, 1024, 1, 0),
    "qwen3-0.6b o": (1024, 2048, 0, 0),
    "qwen3-0.6b gate_up": (3072, 1024, 1, 1),
    "qwen3-0.6b down": (1024, 3072, 0, 0),
    "qwen3-0.6b head": (151936, 1024, 0, 0),
    "llama-1b qkv": (3072, 2048, 1, 0),
    "llama-1b gate_up": (8192, 2048, 1, 1),
    "llama-1b down": (2048, 8192, 0, 0),
    "qwen3-4b qkv": (6144, 2560, 1, 0),
    "qwen3-4b gate_up": (9728, 2560, 1, 1),
    "qwen3-4b down": (2560, 9728, 0, 0),
    "qwen2-7b qkv": (4608, 3584, 1, 0),
    "qwen2-7b gate_up": (18944, 3584, 1, 1),
    "qwen2-7b down": (3584, 18944, 0, 0),
    "qwen3-14b qkv": (7168, 5120, 1, 0),
    "qwen3-14b gate_up": (17408, 5120, 1, 1),
    "qwen3-14b down": (5120, 17408, 0, 0),
    "llama-70b qkv": (10240, 8192, 1, 0),
    "llama-70b gate_up": (28672, 8192, 1, 1),
    "qwen3-30b-a3b qkv": (5120, 2048, 1, 0),
    "qwen3-30b-a3b o": (2048, 4096, 0, 0),
    "qwen3-30b-a3b head": (151936, 2048, 0, 0),
}


def candidates(outputs, inputs, pair, kind):
    """Return tilings whose loads are 16 bytes and whose tiles fit the registers."""
    per = 8 if kind == "bf16" else 16
    for warps in (2, 4, 8):
        for columns in (32 * warps * per, 64 * warps * per):
            width = triton.cdiv(inputs, columns) * columns
            if columns > triton.next_power_of_2(inputs) or width > 1.35 * inputs:
                continue
            for rows in (1, 2, 4, 8, 16):
                if rows * columns < 32 * warps * per:
                    continue
                numbers = rows * width * (1 + pair) // (32 * warps)
                if not 16 <= numbers <= 16 * per:
                    continue
                for times in (1, 2, 4) if kind == "bf16" else (1, 2, 4, 8, 16):
                    if 256 <= outputs // (rows * times) <= 5000:
                        for ahead in {False, times == 1 and inputs <= 2048}:
                            yield GemvPlan(rows, columns, times, warps, ahead)


BODIES = {"bf16": gemv, "e4m3": gemv_bytes, "int8": gemv_bytes}
PLANS = {"bf16": gemv.plan_gemv} | {
    kind: functools.partial(gemv_bytes.plan_gemv_bytes, kind) for kind in ("e4m3", "int8")
}
QUANTIZE = {"e4m3": quantize_channels, "int8": quantize_outputs}


class Problem:
    """One shape's weights, vectors and answers."""

    def __init__(self, shape, kind, copies=None):
        self.outputs, self.inputs, self.normed, self.pair = shape
        self.kind = kind
        rows = self.outputs * (1 + self.pair)
        self.bytes = rows * self.inputs * (2 if kind == "bf16" else 1)
        copies = copies or max(2, min(48, int(8e8 // self.bytes)))
        self.weights = [self._weight(rows) for _ in range(copies)]
        x, res, y, r = (self._rand(1, self.inputs) for _ in range(4))
        self.x, self.z, self.a = x, self._rand(1, rows), self._rand(1, self.outputs)
        scale = 1 + 0.02 * self._rand(self.inputs)
        self.norm = FusedNorm(x, scale, 1e-5, res, 0.0, y, r) if self.normed else None
        self.act = FusedActivation("silu", self.a) if self.pair else None

    def _rand(self, *shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def _weight(self, rows):
        weight = self._rand(rows, self.inputs) * self.inputs**-0.5
        return QUANTIZE[self.kind](weight) if self.kind in QUANTIZE else weight

    def run(self, weight, cut):
        BODIES[self.kind].launch(self.z, self.x, weight, None, self.norm, self.act, cut=cut)

    def want(self):
        x = self.x[0].float()
        if self.norm is not None:
            r = (x + self.norm.residual[0].float()).bfloat16().float()
            x = r * torch.rsqrt(r.square().mean() + 1e-5) * self.norm.weight.float()
            x = x.bfloat16().float()
        weight = self.weights[0]
        if self.kind == "e4m3":
            size = x.abs().max() / 448
            x = (x / size).to(torch.float8_e4m3fn).float() * size
            z = (weight.data.float() @ x) * weight.scale
        elif self.kind == "int8":
            size = x.abs().max() / 127
            z = (weight.data.float() @ ((x / size).round() * size)) * weight.scale
        else:
            z = weight.float() @ x
        if not self.pair:
            return z
        gate, up = z.bfloat16().float().chunk(2)
        return torch.nn.functional.silu(gate) * up

    def error(self, cut):
        self.z.fill_(float("nan"))
        self.a.fill_(float("nan"))
        self.run(self.weights[0], cut)
        got, want = (self.a if self.pair else self.z)[0].float(), self.want()
        return ((got - want).norm() / want.norm()).item()

    def us(self, cut):
        calls = [lambda w=w: self.run(w, cut) for w in self.weights]
        return graph_ms(calls, 9) * 1e3


def show(cut):
    return ",".join(str(int(v)) for v in cut)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="shapes whose names hold one of these")
    parser.add_argument("--kind", default="bf16,e4m3")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--part", default="0/1", help="compile only this part of the candidates")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    began, count = time.monotonic(), 0
    for kind in args.kind.split(","):
        for name, shape in SHAPES.items():
            if args.only and not any(word in name for word in args.only.split(",")):
                continue
            if kind != "bf16" and name.endswith("head"):
                continue  # heads stay as they are
            own = PLANS[kind](shape[0], shape[1], bool(shape[3]))
            cuts = sorted({own, *candidates(shape[0], shape[1], shape[3], kind)})
            if parts > 1:
                count += 1
                problem = Problem(shape, kind, 1)
                for cut in cuts[(part + count) % parts :: parts]:
                    if not problem.error(cut) < 2e-2:
                        print("WRONG", name, kind, show(cut), problem.error(cut), flush=True)
                continue
            if time.monotonic() - began > args.seconds:
                print("no time left at", name)
                return
            problem = Problem(shape, kind)
            timed = sorted((problem.us(cut), cut) for cut in cuts if problem.error(cut) < 2e-2)
            mine = next(us for us, cut in timed if cut == own)
            best = "  ".join(f"{us:.2f}({show(cut)})" for us, cut in timed[:5])
            floor = problem.bytes / 4.4e6
            print(f"{kind} {name:20} floor {floor:6.2f} us, own {show(own):14} {mine:6.2f} | {best}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    with torch.inference_mode():
        main()
