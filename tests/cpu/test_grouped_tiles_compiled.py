"""The kernel of tiles of 4 bits, compiled for Hopper: products that overlap with decoding."""

import importlib.util

import pytest

from tests.cpu.test_kernel_trace import run

PROGRAM = """
import json, re, subprocess, tempfile
from dataclasses import replace
import torch
from triton import knobs
from quire.kernels.formats.tiled_weight import pack_tiles
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.framework.meta_device import on_meta_device, trace_kernels
from quire.kernels.gpu.linear import grouped_gemm_tiles as tiles
from quire.kernels.gpu.runtime.target import GpuTarget

META, found = torch.device("meta"), []
q, zero = (torch.zeros(256, n, dtype=torch.uint8) for n in (1024, 8))
codes = WeightCodes(q=q, bits=4, group=128, scale=GroupFactors(torch.ones(256, 8).half()), zero=zero)
weight = pack_tiles(codes, torch.bfloat16)
scale = weight.scale._replace(values=weight.scale.values.to(META))
weight = replace(weight, low=weight.low.to(META), scale=scale, zero=weight.zero.to(META),
                 counters=weight.counters.to(META))
with on_meta_device(GpuTarget((9, 0), 132)), trace_kernels(found.append):
    for plan in ((128, 1, False, 5), (256, 1, False, 3)):
        x, y = (torch.empty(256, n, dtype=torch.bfloat16, device=META) for n in (1024, 256))
        tiles.launch(y, x, weight, None, tiles.GroupedTilesPlan(*plan))
facts = []
for one in found:
    compiled = tiles._grouped_gemm_tiles.preload(one.specialization)
    with tempfile.NamedTemporaryFile() as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = lambda what: subprocess.run(
            [knobs.nvidia.cuobjdump.path, what, file.name], capture_output=True, text=True, check=True
        ).stdout
        sass, usage = dump("-sass"), dump("-res-usage")
    facts.append([sass.count("HGMMA."), sass.count("WARPGROUP.DEPBAR"),
                  int(re.search(r"STACK:(\\d+)", usage)[1])])
print(json.dumps(facts))
"""


@pytest.mark.long("starts a process that compiles two kernels")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_block_s_products_are_waited_for_together(tmp_path):
    """The assembler waits for each one where it sees no registers for more."""
    facts, _ = run(PROGRAM, tmp_path)
    assert facts == [[16, 2, 0]] * 2, "(products, waits, bytes of spilled registers) of two groups"
