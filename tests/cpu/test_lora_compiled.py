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
from quire.kernels.lora import lora_linear

META, found = torch.device("meta"), []

def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device=META)

def launch(rows, rank, parts, inputs):
    bank = LoraBank.allocate(8, rank, inputs, parts, torch.bfloat16, META, factors=True)
    y = lora_linear(empty(rows, sum(parts)), empty(rows, inputs), bank,
                    LoraRows.allocate(rows, 8, META))
    if len(parts) == 2:
        act_mul(y, "silu")
    lazy_fusion.flush()

with on_meta_device(GpuTarget((9, 0), 132)), trace_kernels(found.append):
    launch(1, 16, (4096, 1024, 1024), 4096)
    launch(4096, 16, (14336, 14336), 4096)
    launch(64, 256, (4096,), 14336)

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


@pytest.mark.long("starts a process that compiles six kernels")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_no_register_is_spilled_and_all_sums_use_one_instruction(tmp_path):
    """A row's bits must not depend on the number of rows, and wgmma adds otherwise than mma."""
    facts, _ = run(PROGRAM, tmp_path)
    names = [name for name, *_ in facts]
    assert sorted(names) == sorted(["_shrink"] * 3 + ["_expand"] * 2 + ["_expand_act"])
    for name, stack, has_wgmma, has_mma in facts:
        assert (stack, has_wgmma, has_mma) == (0, False, True), name
