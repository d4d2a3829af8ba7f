"""Library pages: has the kernel read torch's large libraries before they are loaded.

A library is mapped, and read in small pieces where it is touched. On a disk that is fast only for
large reads, the first start of a machine waits for each of them. Pages in memory cost nothing here.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from quire.platform.bytecode_cache import torch_source

OF_RANKS = "nvidia/*/lib/libnccl.so*"
LIBRARIES = (
    "torch/lib/libtorch_python.so",
    "torch/lib/libtorch_cpu.so",
    "torch/lib/libtorch_cuda.so",
    OF_RANKS,
    "nvidia/*/lib/libcublas*.so*",
)
"""Libraries that an engine on GPUs uses, in the order of their use."""


def read_ahead(*, ranks: bool = False) -> None:
    """Read the libraries of this torch, if it is a build for CUDA: seconds, without the GIL.

    ranks: the engine has several.
    """
    source = torch_source()
    if source is None or not hasattr(os, "posix_fadvise"):
        return
    packages = Path(source).parent.parent
    if not (packages / "torch/lib/libtorch_cuda.so").exists():
        return
    for pattern in LIBRARIES:
        if pattern == OF_RANKS and not ranks:
            continue
        for path in sorted(packages.glob(pattern)):
            with suppress(OSError), path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
