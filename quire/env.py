"""Every environment variable quire reads, typed, in one place. No other file reads os.environ.

They are for debugging and for what must be known before options exist. Anything that changes
results or speed in production is an option, not a variable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Env:
    """What the environment says. Field docstrings are the help of `quire env`."""

    check: bool
    """QUIRE_CHECK=1: prove the pool's and the cache's invariants after every step."""
    log_level: str
    """QUIRE_LOGGING_LEVEL (or VLLM_LOGGING_LEVEL): DEBUG, INFO, WARNING, ERROR."""
    use_modelscope: bool
    """QUIRE_USE_MODELSCOPE (or VLLM_USE_MODELSCOPE): fetch models from ModelScope."""
    cache_dir: Path
    """QUIRE_CACHE: where compiled kernels are kept. Default ~/.cache/quire."""
    triton_cache: Path | None
    """TRITON_CACHE_DIR: Triton's own; if set, compiled GPU kernels are kept there instead."""
    native: bool
    """QUIRE_NATIVE=0: never use the compiled CPU kernels."""
    num_threads: int | None
    """OMP_NUM_THREADS: CPU threads of the kernels. Unset: every core this process may run on."""


def _flag(*names: str, default: bool = False) -> bool:
    for name in names:
        if name in os.environ:
            return os.environ[name].strip().lower() in ("1", "true", "yes", "on")
    return default


def read() -> Env:
    """Read the environment now. Called by main() and LLM(), never at import."""
    level = os.environ.get("QUIRE_LOGGING_LEVEL") or os.environ.get("VLLM_LOGGING_LEVEL") or "INFO"
    cache = os.environ.get("QUIRE_CACHE") or str(Path.home() / ".cache" / "quire")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    triton = os.environ.get("TRITON_CACHE_DIR")
    return Env(
        check=_flag("QUIRE_CHECK"),
        log_level=level.upper(),
        use_modelscope=_flag("QUIRE_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE"),
        cache_dir=Path(cache),
        triton_cache=Path(triton) if triton else None,
        native=_flag("QUIRE_NATIVE", default=True),
        num_threads=int(threads) if threads.isdigit() else None,
    )


def describe() -> list[tuple[str, str]]:
    """(field, current value) of every variable, for `quire env`."""
    now = read()
    return [(f.name, str(getattr(now, f.name))) for f in fields(Env)]


def child(**changes: str) -> dict[str, str]:
    """The environment of a child process: this one's, with changes."""
    return {**os.environ, **changes}
