"""Where a step's time goes: named ranges for NVTX and torch's profiler, off unless asked for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING: AbstractContextManager[object] = nullcontext()
_on = False


def trace(on: bool) -> None:
    """Mark ranges from now on, or no longer."""
    global _on
    _on = on


def span(name: str) -> AbstractContextManager[object]:
    """A range of the host's time; costs a function call unless trace(True) was said."""
    return torch.autograd.profiler.record_function(name) if _on else _NOTHING
