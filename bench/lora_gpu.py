"""Adapters on the GPU: what they add to each linear layer, over the base product, in one run.

    python bench/lora_gpu.py [--forms late,early,before,beside,behind,tiles] [--rows 1,2,4,8,16,32,64,4096]
                             [--adapters 1,8,32] [--ranks 16,64] [--models llama-8b,...] [--max-rank 0] [--slots 32]
                             [--layers] [--seconds 0] [--set MODULE.NAME=NUMBER,...] [--json FILE]

A time is the median of graph replays over weights and banks that do not fit the cache together. A
line has a model's layer without and with the adapters of all its rows: its four products with the
norms and the activation among them. Forms: those of quire/kernels/gpu/lora/adapted_linear.py, and
`tiles`: sorted rows behind the product, as many rows have them. A form that a number of rows cannot
have is left out, and a product that cannot have it is `beside`; more rows than 64 have `tiles`
alone. A list of the fastest forms comes last.
--max-rank: the rank of the banks, if they are to be larger than the adapters. --layers: the base and
the rest of each product too. --seconds: begin no measurement after so many. --set few_rows.COLUMNS=64,...:
other constants of modules of quire/kernels/gpu/lora; may be given several times, each is measured.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import NamedTuple
from unittest import mock

import torch
from gpu_ops import graph_ms

from quire.kernels.act import act_mul
from quire.kernels.formats.lora_bank import LoraBank, LoraRows
from quire.kernels.framework import lazy_fusion
from quire.kernels.framework.kernel_precompile import KernelCompilers
from quire.kernels.framework.meta_device import on_meta_device, trace_kernels
from quire.kernels.gpu.linear import small_m_plans
from quire.kernels.gpu.lora import adapted_linear, few_rows
from quire.kernels.gpu.runtime.target import GpuTarget
from quire.kernels.linear import linear
from quire.kernels.lora import lora_linear, sort_rows
from quire.kernels.rms_norm import rms_norm

HOPPER = GpuTarget((9, 0), 132)
LAYERS = {  # parts, inputs
    "llama-8b": {"qkv": ((4096, 1024, 1024), 4096), "o": ((4096,), 4096),
                 "gate_up": ((14336, 14336), 4096), "down": ((4096,), 14336)},
    "qwen3-0.6b": {"qkv": ((2048, 1024, 1024), 1024), "o": ((1024,), 2048),
                   "gate_up": ((3072, 3072), 1024), "down": ((1024,), 3072)},
}  # fmt: skip
DEPTH = {"llama-8b": 32, "qwen3-0.6b": 28}
CUDA = torch.device("cuda", 0)
TILES = "tiles"
FORMS = "late", "early", "before", "beside", "behind"


def rand(device, *shape):
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def bank_of(device, slots, most, parts, inputs):
    bank = LoraBank.allocate(slots, most, inputs, parts, torch.bfloat16, device)
    bank.a.normal_(std=1 / 64)
    bank.b.normal_(std=1 / 64)
    return bank


def first(x, norm):
    return x if norm is None else rms_norm(x, norm, 1e-6)[0]


def base(x, norm, w, gated):
    finish(linear(first(x, norm), w), gated)


def adapted(x, norm, w, gated, bank, rows):
    x = first(x, norm)
    finish(lora_linear(linear(x, w), x, bank, rows), gated)


def forms_of(rows, wanted):
    """The forms that so many rows can have."""
    if rows > few_rows.MAX_ROWS:
        return [form for form in wanted if form == TILES]
    inside = rows <= small_m_plans.MAX_ROWS
    return [form for form in wanted if inside or form not in adapted_linear.INSIDE]


@contextmanager
def set_form(form):
    """Within, all numbers of rows have a form."""
    forms, most = {few_rows.MAX_ROWS: form}, few_rows.MAX_ROWS
    if form == TILES:
        forms, most = {}, 0
    with (
        mock.patch.object(adapted_linear, "FORMS", forms),
        mock.patch.object(few_rows, "MAX_ROWS", most),
    ):
        yield


def finish(y, gated):
    if gated:
        act_mul(y, "silu")
    lazy_fusion.flush()


@contextmanager
def set_constants(text):
    """Within, modules of kernels have other constants: `module.NAME=number,...`."""
    with ExitStack() as stack:
        for one in filter(None, text.split(",")):
            name, value = one.split("=")
            module, constant = name.split(".")
            found = import_module(f"quire.kernels.gpu.lora.{module}")
            stack.enter_context(mock.patch.object(found, constant, int(value)))
        yield


class Mix(NamedTuple):
    rank: int
    rows: int
    adapters: int
    form: str
    constants: str


def mixes(args):
    for rank, t, some in itertools.product(args.ranks, args.rows, args.adapters):
        for form, constants in itertools.product(forms_of(t, args.forms), ["", *args.set]):
            if some <= t:
                yield Mix(rank, t, some, form, constants)


def measure(args, model, device, time_of):
    """(mix, {product: (time of the base, time with adapters)}) of a model's layer."""
    for rank, of_rank in itertools.groupby(mixes(args), lambda mix: mix.rank):
        products = {}
        for name, (parts, inputs) in LAYERS[model].items():
            copies = max(2, min(8, int(2e8 // (sum(parts) * inputs)) + 1))
            norm = rand(device, inputs) if name in ("qkv", "gate_up") else None
            banks = [
                bank_of(device, args.slots, max(rank, args.max_rank), parts, inputs)
                for _ in range(copies)
            ]
            for bank in banks:
                bank.ranks.fill_(rank)
            weights = [rand(device, sum(parts), inputs) / inputs**0.5 for _ in range(copies)]
            products[name] = norm, weights, banks
        for (t, some), of_rows in itertools.groupby(of_rank, lambda mix: (mix.rows, mix.adapters)):
            rows = LoraRows.allocate(t, args.slots, device)
            rows.slots.copy_(torch.arange(t, device=device) * some // t)
            sort_rows(rows)
            plain = {}
            for mix in of_rows:
                both = {}
                for name, (norm, weights, banks) in products.items():
                    x, gated = rand(device, t, weights[0].shape[1]), name == "gate_up"
                    if name not in plain:
                        plain[name] = time_of([partial(base, x, norm, w, gated) for w in weights])
                    with set_form(mix.form), set_constants(mix.constants):
                        calls = [
                            partial(adapted, x, norm, w, gated, bank, rows)
                            for w, bank in zip(weights, banks)
                        ]
                        both[name] = plain[name], time_of(calls)
                yield mix, both
        del products


def compile_ahead(args):
    """Compile the kernels in as many processes as there are cores. In a process of its own."""
    compilers = KernelCompilers(HOPPER, os.cpu_count(), launchers=True)
    with on_meta_device(HOPPER), trace_kernels(compilers.add):
        for model in args.models:
            for _ in measure(args, model, torch.device("meta"), lambda calls: calls[0]()):
                pass
    return len(list(compilers.results()))


def lines(args, model):
    end = time.perf_counter() + args.seconds if args.seconds else math.inf
    for mix, both in measure(args, model, CUDA, graph_ms):
        before, after = (sum(times) for times in zip(*both.values()))
        line = {"model": model, **mix._asdict(), "slots": args.slots,
                "base us of a layer": before * 1e3, "more us of a layer": (after - before) * 1e3,
                "more ms of a step": (after - before) * DEPTH[model],
                "ratio": before / after}  # fmt: skip
        if args.layers:
            line |= {
                name: [round(one * 1e3, 1), round((two - one) * 1e3, 1)]
                for name, (one, two) in both.items()
            }
        yield line
        if time.perf_counter() > end:
            return


def fastest(found):
    """For each number of rows, adapters and rank, the forms by time."""
    by_mix = {}
    for line in found:
        key = line["model"], line["rank"], line["rows"], line["adapters"]
        label = f"{line['form']} {line['constants']}".strip()
        by_mix.setdefault(key, []).append((line["more us of a layer"], line["ratio"], label))
    for (model, rank, rows, adapters), some in by_mix.items():
        text = ", ".join(f"{form} {more:.1f} ({ratio:.3f})" for more, ratio, form in sorted(some))
        yield f"{model} rank {rank}: {rows} rows of {adapters}: {text}"


def numbers(text):
    return [int(n) for n in text.split(",")]


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 4096])
    parse.add_argument("--adapters", type=numbers, default=[1, 8, 32])
    parse.add_argument("--ranks", type=numbers, default=[16, 64])
    parse.add_argument("--models", type=lambda text: text.split(","), default=["llama-8b"])
    parse.add_argument("--forms", type=lambda text: text.split(","), default=[*FORMS, TILES])
    parse.add_argument("--max-rank", type=int, default=0)
    parse.add_argument("--slots", type=int, default=32)
    parse.add_argument("--set", action="append", default=[])
    parse.add_argument("--layers", action="store_true")
    parse.add_argument("--seconds", type=float, default=0)
    parse.add_argument("--json")
    parse.add_argument("--compile", action="store_true", help="only compile the kernels")
    args = parse.parse_args()
    if args.compile:
        print(compile_ahead(args), "kernels", flush=True)
        return
    subprocess.run([sys.executable, *sys.argv, "--compile"], check=True)
    found = []
    for model in args.models:
        for line in lines(args, model):
            found.append(line)
            print(json.dumps(line), flush=True)
    for text in fastest(found):
        print(text)
    if args.json:
        with open(args.json, "a", encoding="utf-8") as out:
            out.writelines(json.dumps(line) + "\n" for line in found)


if __name__ == "__main__":
    main()
