"""The second launch of a kernel, which is not Triton's: a compiled one in place of the GPU's."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from quire.kernels.framework import late_work
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.target import GpuTarget, describe_target


class Compiled:
    """What Triton's own launch returns; `launches` has the arguments of the later ones."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launches = []
        self.run = lambda *args: self.launches.append(args)
        self.run.global_scratch_size = 1


@pytest.fixture(autouse=True)
def before_ready(monkeypatch):
    """Another test's engine may be ready in this process: then a compilation is noted as late."""
    monkeypatch.setattr(late_work, "is_ready", lambda: False)


@pytest.mark.parametrize("missing", [(), (0,), (1,), (0, 1), (1, 2)])
def test_a_kernel_is_launched_again_on_the_device_of_a_tensor_that_is_given(monkeypatch, missing):
    @kernel("n")
    def body(x_ptr, y_ptr, z_ptr, n):
        pass

    compiled, devices = Compiled(), []

    def current_stream(device):
        devices.append(device)
        return "stream"

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current_stream, raising=False)
    monkeypatch.setattr(body, "interpreted", False)
    monkeypatch.setattr(body, "_jit", {(1, 1, 1): lambda *args, **options: compiled})
    given = [None if i in missing else torch.zeros(4) for i in range(3)]
    for n in (7, 8):
        body((1, 1, 1), tuple(given), (n,), ())
    pointers = [0 if one is None else one.data_ptr() for one in given]
    middle = ("function", "metadata", None, None, None)
    assert compiled.launches == [(1, 1, 1, "stream", *middle, *pointers, 8)]
    assert devices == [-1]  # of tensors on a CPU


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_kernels_overlap_where_the_device_can(monkeypatch, capability):
    @kernel()
    def body(x_ptr):
        pass

    asked = []

    def compile_and_launch(*args, launch_pdl, **options):
        asked.append(launch_pdl)

    monkeypatch.setattr(body, "interpreted", False)
    monkeypatch.setattr(body, "_jit", {(1, 1, 1): compile_and_launch})
    describe_target(GpuTarget(capability, 1))
    try:
        for wanted in (False, True):
            body((1, 1, 1), (torch.zeros(4),), (), (), pdl=wanted)
    finally:
        describe_target(None)
    assert asked == [False, capability >= (9, 0)]
