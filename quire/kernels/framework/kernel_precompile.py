"""Many GPU kernels compiled at once, by rehearsing the steps that need them.

Not here: kernels, which steps (quire.engine.startup.warmup), what the folder of compiled kernels
looks like
(quire.platform.kernel_store). The one idea: Triton asks a hook before it compiles, and a hook may
say no; so a step run with such a hook tells all the kernels it needs without waiting for any, and
they are then compiled side by side, in processes.
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
    """A kernel that a rehearsal would have compiled."""

    name: str
    function: Any  # triton.runtime.JITFunction
    specialization: str

    def load_or_compile(self) -> None:
        """Compile it (or read it from the folder) for the current device."""
        self.function.preload(self.specialization)


def set_cache_dir(cache_dir: Path) -> None:
    """Make Triton keep what it compiles in the folder. Before the first kernel."""
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
    """Where Triton keeps what it compiles."""
    from triton import knobs

    return Path(knobs.cache.dir)


def compute_compiler_key() -> None:
    """Let Triton make the part of its keys that names the compiler: it reads 400 MB for that."""
    from triton.runtime import cache

    key = getattr(cache, "triton_key", None)
    if key is not None:
        key()


_trace_depth = 0


def is_tracing() -> bool:
    """Whether launches are skipped now: an op may then go through kernels of other steps too."""
    return _trace_depth > 0


@contextmanager
def trace_missing_kernels(note: Callable[[MissingKernel], None]) -> Iterator[None]:
    """Within, kernels not compiled yet are noted, once each, and their launches are skipped."""
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
    """A kernel is not in the folder."""


def load_cached(wanted: Sequence[MissingKernel]) -> list[MissingKernel]:
    """Load what the folder holds; the others, which have to be compiled."""
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
            except Exception:  # it fails again, and tells, where it is used
                log.debug("%s cannot be made ready", one.name, exc_info=True)
                missing.append(one)
    finally:
        knobs.cache.manager_class = before
    return missing
