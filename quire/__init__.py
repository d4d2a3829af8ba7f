"""quire: a high-throughput inference and serving engine for large language models.

Public names are imported when first used, so that `import quire` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.as_vllm import install as install_as_vllm
    from quire.config.engine_args import AsyncEngineArgs, EngineArgs
    from quire.core.params import (
        BeamSearchParams,
        LoRARequest,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from quire.core.pooling_params import PoolingParams
    from quire.errors import (
        ConfigError,
        EngineDead,
        EngineError,
        NoRoom,
        Overloaded,
        QuireError,
        RequestError,
        TooLong,
        UnknownModel,
        Unsupported,
        WeightError,
    )
    from quire.llm import LLM, AsyncLLM, AsyncLLMEngine, LLMEngine
    from quire.outputs import CompletionOutput, Logprob, RequestOutput
    from quire.text.templates.chat_template import load_chat_template

_PLACES = {
    "quire.as_vllm": ("install_as_vllm:install",),
    "quire.config.engine_args": ("AsyncEngineArgs", "EngineArgs"),
    "quire.core.params": (
        "BeamSearchParams",
        "LoRARequest",
        "RequestOutputKind",
        "SamplingParams",
        "StructuredOutputsParams",
    ),
    "quire.core.pooling_params": ("PoolingParams",),
    "quire.errors": (
        "ConfigError",
        "EngineDead",
        "EngineError",
        "NoRoom",
        "Overloaded",
        "QuireError",
        "RequestError",
        "TooLong",
        "UnknownModel",
        "Unsupported",
        "WeightError",
    ),
    "quire.llm": ("LLM", "AsyncLLM", "AsyncLLMEngine", "LLMEngine"),
    "quire.outputs": ("CompletionOutput", "Logprob", "RequestOutput"),
    "quire.text.templates.chat_template": ("load_chat_template",),
}
_FOUND = {
    name.partition(":")[0]: (module, name.rpartition(":")[2])
    for module, names in _PLACES.items()
    for name in names
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigError",
    "EngineArgs",
    "EngineDead",
    "EngineError",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "NoRoom",
    "Overloaded",
    "PoolingParams",
    "QuireError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TooLong",
    "UnknownModel",
    "Unsupported",
    "WeightError",
    "__version__",
    "install_as_vllm",
    "load_chat_template",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in _FOUND:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    module, attribute = _FOUND[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("quire-llm")
    except PackageNotFoundError:
        return "0+unknown"
