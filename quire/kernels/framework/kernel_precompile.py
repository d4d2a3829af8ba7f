"""Kernel precompilation: finds the GPU kernels that a step lacks, to compile them side by side.

Triton calls a hook before it compiles, and the hook may skip the launch. So a traced step reports
all the kernels it needs without waiting for any. quire.engine.startup.warmup chooses the steps;
quire.platform.kernel_store lays out the folder of compiled kernels.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MissingKernel:
    """A kernel that a traced step would have compiled."""

    name: str
    function: Any  # triton.runtime.JITFunction
    specialization: str

    def load_or_compile(self) -> None:
        """Compile the kernel, or read it from the folder, for the current device."""
        self.function.preload(self.specialization)


def set_cache_dir(cache_dir: Path) -> None:
    """Make Triton keep compiled kernels in the folder. Call before the first kernel."""
    from triton import knobs

    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning(
            "compiled kernels cannot be kept in %s (%s): every start compiles", cache_dir, error
        )
        cache_dir = Path(tempfile.mkdtemp(prefix="quire-kernels-"))
    knobs.cache.dir = str(cache_dir)


def cache_dir() -> Path:
    """The folder in which Triton keeps compiled kernels."""
    from triton import knobs

    return Path(knobs.cache.dir)


def compute_compiler_key() -> None:
    """Compute the part of Triton's cache keys that identifies the compiler: it reads 400 MB."""
    from triton.runtime import cache

    key = getattr(cache, "triton_key", None)
    if key is not None:
        key()


_trace_depth = 0


def is_tracing() -> bool:
    """Whether launches are skipped now: an op may then also call kernels of other steps."""
    return _trace_depth > 0


@contextmanager
def trace_missing_kernels(note: Callable[[MissingKernel], None]) -> Iterator[None]:
    """Within, `note` is called once with each uncompiled kernel, whose launches are skipped."""
    from triton import knobs

    seen: set[tuple[str, str]] = set()

    def skip(*, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **_: Any) -> bool:
        if is_manual_warmup:
            return False  # the compilation itself, in another thread
        name = f"{fn.module}.{fn.name}"
        data = str(compile["specialization_data"])
        if (name, data) not in seen:
            seen.add((name, data))
            note(MissingKernel(name, fn.jit_function, data))
        return True

    global _trace_depth
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = skip
    _trace_depth += 1
    try:
        yield
    finally:
        _trace_depth -= 1
        knobs.runtime.jit_cache_hook = before


class _NotCached(Exception):
    """Raised where a kernel is not in the folder."""


def load_cached(wanted: Sequence[MissingKernel]) -> list[MissingKernel]:
    """Load the kernels that the folder holds. Returns: the others, which have to be compiled."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    class CachedKernelsOnly(FileCacheManager):
        def get_group(self, filename: str) -> Any:
            found = super().get_group(filename)
            if not found:
                raise _NotCached
            return found

    before, missing = knobs.cache.manager_class, []
    knobs.cache.manager_class = CachedKernelsOnly
    try:
        for one in wanted:
            try:
                one.load_or_compile()
            except _NotCached:
                missing.append(one)
            except Exception:  # it fails again, and is reported, at its launch
                log.debug("kernel %s cannot be loaded", one.name, exc_info=True)
                missing.append(one)
    finally:
        knobs.cache.manager_class = before
    return missing
