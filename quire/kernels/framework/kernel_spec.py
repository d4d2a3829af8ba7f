"""Kernel spec: names a compiled GPU kernel. Imports neither torch nor Triton."""

from __future__ import annotations

import msgspec


class KernelSpec(msgspec.Struct, frozen=True, array_like=True):
    """A kernel's module and name, and what it is compiled for: Triton's own JSON."""

    module: str
    name: str
    specialization: str

    @property
    def label(self) -> str:
        return f"{self.module.removeprefix('quire.kernels.gpu.')}.{self.name}"
