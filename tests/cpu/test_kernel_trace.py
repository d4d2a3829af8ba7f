"""A traced step launches nothing, and every kernel that it would have launched is recorded.

Triton compiles for a GPU without having one; only its driver is a fake here. In a process of its
own, because the other tests run Triton in its interpreter.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

KERNELS = """
import triton
import triton.language as tl
from quire.kernels.gpu.runtime.fast_launch import kernel

@kernel("n")
def triple(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(x_ptr + i, x * 3, mask=i < n)

@triton.jit(do_not_specialize=["n"])
def double(x_ptr, n, BLOCK: tl.constexpr, HALF: tl.constexpr = tl.float32):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(HALF)
    tl.store(x_ptr + i, (x * 2).to(x_ptr.dtype.element_ty), mask=i < n)
"""

PROGRAM = """
import json, pathlib, sys
import torch, triton
import triton.language as tl
sys.path.insert(0, sys.argv[1])
import made_up
from quire.kernels.framework import kernel_precompile, meta_device
from quire.kernels.gpu.runtime.target import GpuTarget
from quire.platform import kernel_store
from triton import knobs

home = pathlib.Path(sys.argv[1]) / "cache"
target = GpuTarget((9, 0), 132)
kernel_precompile.set_cache_dir(kernel_store.kernel_folder(home, triton.__version__, (9, 0)))
meta_device.set_triton_target(target)
x = torch.ones(64)

def step():
    made_up.triple((1, 1, 1), (x,), (64,), (32,))
    return [
        made_up.double[(1,)](x, n, BLOCK=block, HALF=half)
        for n in (1, 16, 33) for block in (32, 64) for half in (tl.float32, tl.float16)
    ]

found = []
before = knobs.runtime.jit_cache_hook
with meta_device.trace_kernels(found.append):
    results = step()
absent = kernel_precompile.load_cached(found)
compilers = kernel_precompile.KernelCompilers(target, 2, launchers=False)
for one in found:
    compilers.add(one)
compiled = list(compilers.results())
print(json.dumps({
    "results": results, "found": [f"{one.module}.{one.name}" for one in found],
    "absent": len(absent), "compiled": sorted(found.index(one) for one in compiled),
    "kept": kernel_store.store_info(home)[0].kernels, "untouched": bool((x == 1).all()),
    "hook_left": knobs.runtime.jit_cache_hook is not before,
}))
"""

LATE = """
import json, pathlib, sys
import torch, triton
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Launcher:
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    def __init__(self, src, metadata): self.launch = self
    def __call__(self, *args): pass

class Driver:
    launcher_cls = Launcher
    utils = SimpleNamespace(
        load_binary=lambda name, *_: (name, name, 1, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 1 << 17},
    )
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Driver())
sys.path.insert(0, sys.argv[1])
import made_up
from quire.kernels.framework import kernel_precompile, late_work, meta_device
from quire.kernels.gpu.runtime.fast_launch import TritonKernel

kernel_precompile.set_cache_dir(pathlib.Path(sys.argv[1]) / "cache")
x = torch.ones(64)
compiled = []

def count(kernel, block):
    kernel((1, 1, 1), (x,), (64,), (block,))
    compiled.append(late_work.counts().kernel_compilations)

def again():  # as in the next process: nothing of it is in memory
    return TritonKernel(made_up.triple._jit.fn, ["n"], triton.jit)

count(made_up.triple, 32)  # before ready
missing, loaded, read = [], again(), again()
with meta_device.trace_kernels(missing.append):
    loaded((1, 1, 1), (x,), (64,), (32,))
    read((1, 1, 1), (x,), (64,), (32,))
(wanted,) = missing
loaded.preload(wanted.specialization).run  # on the device
read.preload(wanted.specialization)  # in memory of the host
late_work.set_ready(True)
count(loaded, 32)
count(read, 32)
count(made_up.triple, 64)  # compiled
count(again(), 64)  # read from disk
print(json.dumps(compiled))
"""


def run(program, tmp_path, *arguments):
    """Run a program that can import KERNELS in a process of its own. Returns what it prints."""
    (tmp_path / "made_up.py").write_text(KERNELS)
    (tmp_path / "program.py").write_text(program)
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path), *arguments],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.long("starts a process that compiles two kernels")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_kernel_that_is_not_on_the_device_when_the_engine_is_ready_is_late(tmp_path):
    compiled, logged = run(LATE, tmp_path)
    assert compiled == [0, 0, 1, 2, 3]
    assert logged.count("kernel made_up.triple(64,) with 4 warps was compiled or loaded") == 2


@pytest.mark.slow("starts a process that compiles five kernels")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_trace_reports_each_kernel_once_and_they_compile_in_parallel(tmp_path):
    said, _ = run(PROGRAM, tmp_path)
    # two block sizes, two dtypes; counts are alike
    assert said["found"] == ["made_up.triple"] + ["made_up.double"] * 4
    assert said["results"] == [None] * 12
    assert said["absent"] == 5
    assert said["compiled"] == [0, 1, 2, 3, 4]
    assert said["untouched"]
    assert said["kept"] == 5
    assert not said["hook_left"]


KEYS = """
import importlib, json, os
import torch, triton
names = ["sampling.sample:_sample_candidates_kernel", "sampling.penalties:_apply_penalties_kernel",
         "attention.paged_attention_fused:fused_decode_kernel"]

def keys_of(names):
    keys = {}
    for name in names:
        module, kernel = name.split(":")
        kernel = getattr(importlib.import_module(f"quire.kernels.gpu.{module}"), kernel)
        keys[name] = kernel._jit.cache_key
    return keys

reader, writer = os.pipe()
if not os.fork():  # a process that has imported none of them
    os.write(writer, json.dumps(keys_of(reversed(names))).encode())
    os._exit(0)
os.close(writer)
with os.fdopen(reader) as other:
    print(json.dumps([keys_of(names), json.load(other)]))
"""


@pytest.mark.long("starts a process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_kernel_s_key_does_not_depend_on_the_kernels_before_it(tmp_path):
    """Else one process does not find what another has compiled."""
    (forwards, backwards), _ = run(KEYS, tmp_path)
    assert forwards == backwards
