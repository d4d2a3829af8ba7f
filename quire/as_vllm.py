"""Makes `import vllm` mean quire, as PyMySQL does for MySQLdb.

    import quire
    quire.install_as_vllm()          # then: from vllm import LLM, SamplingParams

    python -m quire.as_vllm SCRIPT ...       a script that imports vllm, unchanged
    python -m quire.as_vllm -m MODULE ...

Nothing is copied: a finder answers for the module names below, and each name in them is fetched
from its place in quire when first used. A name that is not here raises ImportError and says what
there is.
"""

from __future__ import annotations

import argparse
import difflib
import dis
import gc
import importlib
import importlib.abc
import importlib.machinery
import logging
import runpy
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from quire import env
from quire.errors import ConfigError, EngineError

VERSION = "0.33.0"
"""The release whose names these are; scripts compare it."""

_PARAMS = (
    "BeamSearchParams GuidedDecodingParams RepetitionDetectionParams RequestOutputKind "
    "SamplingParams SamplingType StructuredOutputsParams"
)
_OUTPUTS = (
    "ClassificationOutput ClassificationRequestOutput CompletionOutput EmbeddingOutput "
    "EmbeddingRequestOutput PoolingOutput PoolingRequestOutput RequestOutput ScoringOutput "
    "ScoringRequestOutput"
)
_PROMPTS = "EmbedsPrompt PromptType TextPrompt TokensPrompt"
_ARGS = "AsyncEngineArgs EngineArgs"
_CHAT_MODELS = (
    "ChatCompletionLogProb ChatCompletionLogProbs ChatCompletionLogProbsContent "
    "ChatCompletionResponse ChatCompletionResponseChoice ChatCompletionResponseStreamChoice "
    "ChatCompletionStreamResponse ChatMessage"
)
_COMPLETION_MODELS = (
    "CompletionLogProbs CompletionResponse CompletionResponseChoice CompletionStreamResponse"
)
_METRICS = "Counter Gauge Histogram Metric Vector"
_SETTINGS = "AttentionConfig CompilationConfig KernelConfig ProfilerConfig"

PLACES: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "quire.llm": "LLM LLMEngine AsyncLLMEngine",
        "quire.core.params": "SamplingParams",
        "quire.core.pooling_params": "PoolingParams",
        "quire.config.engine_args": _ARGS,
        "quire.outputs": _OUTPUTS,
        "quire.llm.prompts": _PROMPTS,
    },
    "vllm.sampling_params": {"quire.core.params": _PARAMS},
    "vllm.pooling_params": {"quire.core.pooling_params": "PoolingParams"},
    "vllm.outputs": {"quire.outputs": _OUTPUTS, "quire.errors": "RequestError"},
    "vllm.logprobs": {
        "quire.outputs": "FlatLogprobs Logprob LogprobsOnePosition PromptLogprobs SampleLogprobs"
    },
    "vllm.exceptions": {
        "quire.errors": "VLLMValidationError=RequestError VLLMNotFoundError=UnknownModel"
    },
    "vllm.platforms": {"quire.as_vllm": "current_platform"},
    "vllm.sequence": {"quire.outputs": "Logprob PromptLogprobs SampleLogprobs"},
    "vllm.beam_search": {"quire.outputs": "BeamSearchOutput BeamSearchSequence"},
    "vllm.inputs": {"quire.llm.prompts": _PROMPTS},
    "vllm.inputs.data": {"quire.llm.prompts": _PROMPTS},
    "vllm.config": {
        "quire.as_vllm": _SETTINGS,
        "quire.config.engine_config": "VllmConfig=EngineConfig",
        "quire.config.pooler_config": "PoolerConfig",
    },
    "vllm.config.pooler": {"quire.config.pooler_config": "PoolerConfig"},
    "vllm.engine": {},
    "vllm.engine.arg_utils": {"quire.config.engine_args": _ARGS},
    "vllm.engine.llm_engine": {"quire.llm": "LLMEngine"},
    "vllm.engine.async_llm_engine": {"quire.llm": "AsyncLLMEngine"},
    "vllm.entrypoints": {},
    "vllm.entrypoints.llm": {"quire.llm": "LLM"},
    "vllm.entrypoints.utils": {"quire.as_vllm": "cli_env_setup"},
    "vllm.entrypoints.openai": {},
    "vllm.entrypoints.openai.chat_completion": {},
    "vllm.entrypoints.openai.chat_completion.protocol": {
        "quire.server.formats.chat_request": "ChatCompletionRequest",
        "quire.server.formats.openapi_models": _CHAT_MODELS,
    },
    "vllm.entrypoints.openai.completion": {},
    "vllm.entrypoints.openai.completion.protocol": {
        "quire.server.formats.completion_request": "CompletionRequest",
        "quire.server.formats.openapi_models": _COMPLETION_MODELS,
    },
    "vllm.entrypoints.openai.engine": {},
    "vllm.entrypoints.openai.engine.protocol": {
        "quire.server.formats.openapi_models": "ErrorInfo ErrorResponse UsageInfo"
    },
    "vllm.entrypoints.openai.api_server": {"quire.as_vllm": "run_server"},
    "vllm.entrypoints.openai.cli_args": {
        "quire.as_vllm": "make_arg_parser validate_parsed_serve_args"
    },
    "vllm.entrypoints.chat_utils": {"quire.text.templates.chat_template": "load_chat_template"},
    "vllm.lora": {},
    "vllm.model_executor": {},
    "vllm.model_executor.guided_decoding": {},
    "vllm.model_executor.guided_decoding.guided_fields": {
        "quire.llm.legacy_guided": "GuidedDecodingRequest LLMGuidedOptions"
    },
    "vllm.lora.request": {"quire.core.params": "LoRARequest"},
    "vllm.tokenizers": {"quire.as_vllm": "get_tokenizer"},
    "vllm.transformers_utils": {},
    "vllm.transformers_utils.tokenizer": {"quire.as_vllm": "get_tokenizer"},
    "vllm.utils": {
        "quire.config.command_line.option_parser": "FlexibleArgumentParser=OptionParser",
        "quire.as_vllm": "get_open_port random_uuid",
    },
    "vllm.utils.argparse_utils": {
        "quire.config.command_line.option_parser": "FlexibleArgumentParser=OptionParser"
    },
    "vllm.utils.network_utils": {"quire.as_vllm": "get_open_port"},
    "vllm.envs": {},
    "vllm.usage": {},
    "vllm.usage.usage_lib": {"quire.as_vllm": "UsageContext"},
    "vllm.logger": {"quire.as_vllm": "init_logger"},
    "vllm.distributed": {"quire.as_vllm": "cleanup_dist_env_and_memory"},
    "vllm.distributed.parallel_state": {
        "quire.as_vllm": "cleanup_dist_env_and_memory destroy_distributed_environment "
        "destroy_model_parallel"
    },
    "vllm.v1": {},
    "vllm.v1.engine": {},
    "vllm.v1.engine.llm_engine": {"quire.llm": "LLMEngine"},
    "vllm.v1.engine.async_llm": {"quire.llm": "AsyncLLM"},
    "vllm.v1.sample": {},
    "vllm.v1.sample.logits_processor": {
        "quire.sampling.processors": "AdapterLogitsProcessor BatchUpdate LogitsProcessor "
        "MoveDirectionality RequestLogitsProcessor"
    },
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.reader": {"quire.llm.metrics": _METRICS},
    "vllm.version": {},
}
"""Module of vllm -> place in quire -> the names it gives (`theirs=ours` where they differ)."""

COMMANDS = {
    "vllm": (),
    "vllm.entrypoints.cli.main": (),
    "vllm.entrypoints.openai.api_server": ("serve",),
    "vllm.entrypoints.api_server": ("serve",),
    "vllm.entrypoints.openai.run_batch": ("run-batch",),
    "vllm.collect_env": ("collect-env",),
}
"""Modules that are run rather than imported -> the words of quire's command line they mean."""


def install() -> None:
    """Answer for `vllm` from now on, in this process. Calling it twice is harmless."""
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    if "vllm" in sys.modules:
        message = "vllm is imported already; call quire.install_as_vllm() before that"
        raise ConfigError(message)
    sys.meta_path.insert(0, Finder())


def uninstall() -> None:
    """Undo install(). Names that were imported meanwhile stay as they are."""
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, Finder)]
    for name in [name for name, one in sys.modules.items() if isinstance(one, Alias)]:
        del sys.modules[name]


class Alias(ModuleType):
    """A module of vllm: names, and where quire keeps what they mean."""

    def __getattr__(self, name: str) -> object:
        module = self.__name__
        if name == "__version__" and module in ("vllm", "vllm.version"):
            return VERSION
        if module == "vllm.envs" and name.startswith("VLLM_"):
            return env.vllm_variables().get(name)
        place = _names(module).get(name)
        if place is not None:
            found = getattr(importlib.import_module(place[0]), place[1])
            setattr(self, name, found)
            return found
        if f"{module}.{name}" in PLACES:
            return importlib.import_module(f"{module}.{name}")
        message = _missing(module, name)
        raise ImportError(message) if _is_from_import() else AttributeError(message)

    def __dir__(self) -> list[str]:
        return sorted({*_names(self.__name__), *super().__dir__()})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the modules of PLACES."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "vllm" and not fullname.startswith("vllm."):
            return None
        if fullname not in PLACES:
            parent, _, name = fullname.rpartition(".")
            raise ModuleNotFoundError(_missing(parent, name), name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Alias(spec.name, f"quire under the name of {spec.name}.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are fetched when used."""


def _names(module: str) -> dict[str, tuple[str, str]]:
    """Name -> (module of quire, name there)."""
    found = {}
    for place, names in PLACES[module].items():
        for name in names.split():
            theirs, _, ours = name.partition("=")
            found[theirs] = (place, ours or theirs)
    return found


def _missing(module: str, name: str) -> str:
    """Return the error text for a missing name: the nearest name, or all names."""
    names = _names(module) if module in PLACES else {}
    below = [one.removeprefix(f"{module}.") for one in PLACES if one.startswith(f"{module}.")]
    near = difflib.get_close_matches(name, [*names, *below], n=3)
    message = f"quire has no {module}.{name}"
    if near:
        return f"{message}; did you mean {' or '.join(near)}?"
    offered = [*sorted(names), *(one for one in below if "." not in one)]
    return f"{message}; {module} has {', '.join(offered)}" if offered else message


def _is_from_import() -> bool:
    """Whether the name is wanted by `from module import name`, so that ImportError is due.

    Anything else (hasattr, getattr with a default) must see an AttributeError.
    """
    frame = sys._getframe(2)
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]


class AttentionConfig(dict[str, object]):
    """Settings of another engine's internals: kept, and without effect (config/vllm_options.py)."""


class CompilationConfig(AttentionConfig): ...


class KernelConfig(AttentionConfig): ...


class ProfilerConfig(AttentionConfig): ...


class CurrentPlatform:
    """The device that an engine would use by default, as scripts ask for it."""

    @property
    def device_type(self) -> str:
        """Return "cuda" or "cpu"."""
        from quire.platform import cuda

        return "cuda" if cuda.available() else "cpu"

    device_name = device_type

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    is_cuda_alike = is_cuda

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_rocm(self) -> bool:
        return False

    is_tpu = is_xpu = is_rocm

    def get_device_name(self, device_id: int = 0) -> str:
        """Return the name of a GPU, or "cpu"."""
        import torch

        return torch.cuda.get_device_name(device_id) if self.is_cuda() else "cpu"


current_platform = CurrentPlatform()


def get_tokenizer(
    tokenizer_name: str, *, trust_remote_code: bool = False, **named: object
) -> object:
    """The tokenizer of a folder or hub name."""
    from quire.text.tokenizing.tokenizer import load_tokenizer
    from quire.weights.files import resolve_model_folder

    if named:
        raise ConfigError(f"get_tokenizer: quire knows no {', '.join(named)} here")
    folder = resolve_model_folder(tokenizer_name, want="tokenizer")
    return load_tokenizer(folder, trust_remote_code=trust_remote_code)


class UsageContext(Enum):
    """The usage context. quire reports no usage."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def make_arg_parser(parser: Any) -> Any:
    """Add the flags of `quire serve` to a FlexibleArgumentParser."""
    from quire.cli.serve_flags import add_serve_flags

    return add_serve_flags(parser)


def validate_parsed_serve_args(args: argparse.Namespace) -> None:
    """Raise ConfigError if a parsed command line of the server asks for what is not there."""
    from quire.cli.serve_flags import options_from_namespace

    options_from_namespace(args)


async def run_server(args: argparse.Namespace, **uvicorn_kwargs: object) -> None:
    """Serve until SIGINT or SIGTERM. Nothing else runs in this event loop meanwhile."""
    from quire.cli.serve import serve
    from quire.cli.serve_flags import options_from_namespace

    if uvicorn_kwargs:
        raise ConfigError(f"run_server: say {', '.join(uvicorn_kwargs)} as flags of the server")
    status = serve(*options_from_namespace(args))
    if status:
        raise EngineError(f"the server ended with status {status}")


def cli_env_setup() -> None:
    """Nothing to set up: a process of quire reads the environment when it starts."""


def random_uuid() -> str:
    return uuid.uuid4().hex


def get_open_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free what was dropped. quire keeps nothing else alive."""
    gc.collect()


def destroy_model_parallel() -> None:
    """Nothing to destroy: ranks end with their engine."""


def destroy_distributed_environment() -> None:
    """Nothing to destroy: ranks end with their engine."""


def main(argv: Sequence[str] | None = None) -> int:
    """python -m quire.as_vllm SCRIPT args... | -m MODULE args..."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)  # noqa: T201  the help of a command
        return 0 if words else 2
    if words[0] == "-m" and len(words) == 1:
        print("quire.as_vllm: -m needs the name of a module", file=sys.stderr)  # noqa: T201
        return 2
    if words[0] != "-m" and not Path(words[0]).exists():
        print(f"quire.as_vllm: there is no script {words[0]!r}", file=sys.stderr)  # noqa: T201
        return 2
    install()
    if words[0] == "-m":
        return _run_module(words[1], words[2:])
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")
    return 0


def _run_module(name: str, args: list[str]) -> int:
    if name in COMMANDS:
        from quire.cli import main as command

        return command([*COMMANDS[name], *args])
    sys.argv[:] = [name, *args]
    sys.path[0] = ""
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    from quire import as_vllm  # the module itself, which scripts import too, not this copy

    raise SystemExit(as_vllm.main())
