"""Program: has Triton's front end translate every kernel that the cases of the ops launch.

The interpreter runs bodies as Python, and so takes what the compiler refuses. Triton compiles for a
GPU without having one; the process is its own, because the other tests run Triton's interpreter.
Prints one line of JSON for each kernel that is refused, then the number of kernels.

    python -m tests.cpu.gpu_kernels.compile_cases MOST [--whole]

MOST: of the kernels of one body. --whole: to machine code.
"""

import importlib
import json
import sys
from collections import Counter
from unittest import mock

import torch
from triton.backends.nvidia.compiler import CUDABackend

from quire.kernels.framework.meta_device import on_meta_device, trace_kernels
from quire.kernels.framework.op import OPS
from quire.kernels.gpu.runtime.target import GpuTarget
from tests.op_cases import ops_on_gpu

HOPPER = GpuTarget((9, 0), 132)


class _Translated(Exception):
    """Raised where the front end is done."""


def _stop(*_):
    raise _Translated


def find_kernels(note):
    """Call note with each kernel. No kernel runs, so what one would write is 0, a valid index."""
    zeros = {"empty": torch.zeros, "empty_like": torch.zeros_like}
    with (
        on_meta_device(HOPPER),
        mock.patch.multiple(torch, **zeros),
        mock.patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros),
        trace_kernels(note),
    ):
        for name in ops_on_gpu():
            for case in OPS[name].cases(torch.device("cpu")):
                outs = OPS[name].gpu.outputs(**case)
                if outs is not NotImplemented:
                    OPS[name].gpu.launch(outs, **case)


def main():
    found = []
    find_kernels(found.append)
    if "--whole" not in sys.argv:
        CUDABackend.add_stages = lambda self, stages, options, language: stages.update(
            ttir=_stop, ttgir=_stop
        )
    most, taken = int(sys.argv[1]), Counter()
    for kernel in found:
        taken[kernel.module, kernel.name] += 1
        if taken[kernel.module, kernel.name] > most:
            continue
        function = getattr(importlib.import_module(kernel.module), kernel.name)
        try:
            function.preload(kernel.specialization)
        except _Translated:
            pass
        except Exception as error:  # noqa: BLE001 - the compiler raises many kinds
            print(json.dumps({"kernel": f"{kernel.module}.{kernel.name}", "error": str(error)}))
    print(sum(min(count, most) for count in taken.values()))


if __name__ == "__main__":
    main()
