"""Python APIs: LLM (offline.py) for scripts, LLMEngine (engine.py) to drive single steps, and
AsyncLLM (async_llm.py) for programs with an event loop, over an engine in its own process.

Names are imported when first used: AsyncLLM needs no torch in this process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from quire.platform import bytecode_cache

if TYPE_CHECKING:
    from quire.llm.async_llm import AsyncLLM, AsyncLLMEngine
    from quire.llm.engine import LLMEngine
    from quire.llm.offline import LLM

_PLACES = {
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "LLM": "offline",
    "LLMEngine": "engine",
}

__all__ = ["LLM", "AsyncLLM", "AsyncLLMEngine", "LLMEngine"]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'quire.llm' has no attribute {name!r}")
    with bytecode_cache.importing():
        return getattr(importlib.import_module(f"quire.llm.{_PLACES[name]}"), name)
