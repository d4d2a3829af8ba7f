"""Kernels of adapters, compiled for Hopper: their instructions and registers."""

import importlib.util

import pytest

from tests.cpu.test_kernel_trace import run

PROGRAM = """
import importlib, json, pathlib, re, subprocess, tempfile
import torch
from triton import knobs
from quire.kernels.act import act_mul
from quire.kernels.formats.lora_bank import LoraBank, LoraRows
from quire.kernels.framework import lazy_fusion
from quire.kernels.framework.meta_device import on_meta_device, trace_kernels
from quire.kernels.gpu.runtime.target import GpuTarget
from quire.kernels.linear import linear
from quire.kernels.lora import lora_linear
from quire.kernels.rms_norm import rms_norm

META, found = torch.device("meta"), []

def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device=META)

def launch(rows, rank, parts, inputs, product=False):
    bank = LoraBank.allocate(32, rank, inputs, parts, torch.bfloat16, META, factors=not product)
    x, y = empty(rows, inputs), empty(rows, sum(parts))
    if product:
        x, _ = rms_norm(x, empty(inputs), 1e-6, x)
        y = linear(x, empty(sum(parts), inputs))
    y = lora_linear(y, x, bank, LoraRows.allocate(rows, 32, META))
    if len(parts) == 2:
        act_mul(y, "silu")
    lazy_fusion.flush()

with on_meta_device(GpuTarget((9, 0), 132)), trace_kernels(found.append):
    launch(100, 16, (4096, 1024, 1024), 4096)
    launch(4096, 16, (14336, 14336), 4096)
    launch(100, 256, (4096,), 14336)
    launch(8, 16, (512,), 1000, product=True)
    for rows in (1, 8, 16, 32):
        launch(rows, 16, (4096, 1024, 1024), 4096, product=True)
        launch(rows, 16, (2048, 1024, 1024), 1024, product=True)
        launch(rows, 64 if rows in (1, 32) else 16, (14336, 14336), 4096, product=True)

facts = []
for one in found:
    compiled = getattr(importlib.import_module(one.module), one.name).preload(one.specialization)
    with tempfile.NamedTemporaryFile() as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = int(re.search(r"STACK:(\\d+)", usage)[1])
    ptx = compiled.asm["ptx"]
    facts.append([one.name, stack, "wgmma" in ptx, "mma.sync" in ptx])
print(json.dumps(facts))
"""


@pytest.mark.long("starts a process that compiles some fifteen kernels")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_no_register_is_spilled_and_all_sums_use_one_instruction(tmp_path):
    """A row's bits must not depend on the number of rows, and wgmma adds otherwise than mma."""
    facts, _ = run(PROGRAM, tmp_path)
    base = ("_rms_norm", "_small_m_gemm", "_small_m_bands", "_small_m_ring")
    facts = [one for one in facts if not (one[0].startswith(base) and "lora" not in one[0])]
    by_rows = {"_shrink_rows", "_expand_rows"}
    inside = {"_gemv_lora", "_small_m_lora", "_small_m_ring_lora"}
    by_tiles = {"_shrink", "_shrink_many", "_expand", "_expand_act"}
    assert {name for name, *_ in facts} == by_rows | inside | by_tiles
    for name, stack, has_wgmma, has_mma in facts:
        assert (stack, has_wgmma) == (0, False), name
        assert has_mma or name not in by_tiles
