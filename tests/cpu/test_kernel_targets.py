"""Kernels are compiled for GPUs that this process does not have, older ones too."""

import importlib.util

import pytest

from tests.cpu.test_kernel_trace import run

PROGRAM = """
import importlib, json
import torch
from quire.kernels import act, grouped_linear, quantize_int8, rms_norm
from quire.kernels.formats.tiled_weight import pack_tiles
from quire.kernels.framework.meta_device import on_meta_device, trace_kernels
from quire.kernels.framework.op import OPS
from quire.kernels.gpu.linear import gemv
from quire.kernels.gpu.linear import grouped_linear as gpu_grouped_linear
from quire.kernels.gpu.moe.moe_sort import sort_by_expert
from quire.kernels.gpu.runtime.target import GpuTarget

META = torch.device("meta")

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=META)

def launch_one(op):
    for case in OPS[op].cases(META):
        out = OPS[op].gpu.outputs(**case)
        if out is not NotImplemented:
            return OPS[op].gpu.launch(out, **case)

def launch_some():
    for op in ("rms_norm", "act_mul", "quantize_int8", "grouped_linear"):
        launch_one(op)
    for codes in grouped_linear.random_codes(128, 256, 8, 128, META):
        weight = pack_tiles(codes, torch.bfloat16)  # the last are e4m3 floats
    for rows in (1, 33):
        gpu_grouped_linear.launch(empty(rows, 128), empty(rows, 256), weight)
    sort_by_expert(empty(4, 2, dtype=torch.int32), 8)
    plan = gemv.plan_gemv(4096, 4096, False)._replace(prefetch=True)
    gemv.launch(empty(1, 4096), empty(1, 4096), empty(4096, 4096), cut=plan)

of_targets = []
for capability in ((8, 0), (9, 0)):
    found, ptx = [], {}
    with on_meta_device(GpuTarget(capability, 108)), trace_kernels(found.append):
        launch_some()
    for one in found:  # Triton's target is still that
        kernel = getattr(importlib.import_module(one.module), one.name)
        ptx[one.name] = kernel.preload(one.specialization).asm["ptx"]
        kernel._jit.device_caches.clear()  # they have the target of the first launch
    words = ("griddepcontrol.wait", "griddepcontrol.launch", "prefetch.L2")
    of_targets.append({name: [word in text for word in words] for name, text in ptx.items()})
print(json.dumps(of_targets))
"""


@pytest.mark.long("starts a process that compiles seven kernels for two GPUs")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_wait_for_others_where_they_may_overlap(tmp_path):
    """Assemblers of GPUs before Hopper refuse the instructions."""
    of_targets, _ = run(PROGRAM, tmp_path)
    for hopper, found in enumerate(of_targets):
        assert found.keys() == {
            "_rms_norm",
            "_act_mul",
            "_rows",
            "_grouped_small_m",
            "_grouped_gemm",
            "_sort",
            "_gemv",
        }
        for name, (waits, launches, prefetches) in found.items():
            assert waits == launches == bool(hopper), name
            assert prefetches == (hopper and name == "_gemv"), name
