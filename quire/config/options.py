"""Options: every option of the engine, once.

The command line, YAML files, keywords of LLM() and EngineArgs, and the help text are all made from
these classes; a field's docstring is its help. Sections group what is resolved together; names are
unique over the whole tree, so users give them flat. An option may be None or "auto"; resolve.py
decides its value, with the reason. vLLM's options without a meaning here are in vllm_options.py.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from quire.config import vllm_options
from quire.config.values import coerce
from quire.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")

Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
LoadFormat = Literal["auto", "hf", "safetensors", "pt", "dummy"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


def option(
    default: T,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    parse: str | None = None,
    short: str | None = None,
    alias: str | None = None,
) -> T:
    """A field with a range. low, high: inclusive; above: exclusive. parse: "count" or "bytes"."""
    meta = {
        "low": low,
        "above": above,
        "high": high,
        "parse": parse,
        "short": short,
        "alias": alias,
    }
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, and how its numbers are kept."""

    model: str = "embedded"
    """Folder, Hugging Face name, or "embedded" for the small model that comes with quire."""
    tokenizer: str | None = None
    """Folder or name of the tokenizer. None: the model's."""
    tokenizer_mode: str = "auto"
    """auto, hf, slow."""
    skip_tokenizer_init: bool = False
    """Work with token ids only: no tokenizer is loaded, no text is made."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    quantization: Literal["fp8", "fp8_block"] | None = option(None, short="-q")
    """Make the weights smaller as they are loaded. fp8: 8-bit floats with a scale per output;
    fp8_block: with a scale per 128 x 128 block. None: as the checkpoint has them."""
    dtype: Dtype = "auto"
    """Of weights and activations. auto: the checkpoint's; float16 becomes bfloat16 on a CPU."""
    seed: int = 0
    """Seeds the requests that bring no seed of their own."""
    max_model_len: int | Literal["auto"] | None = option(None, low=-1, parse="count")
    """Longest prompt + output. None: the limit of the model; auto or -1: the longest that fits."""
    hf_config_path: str | None = None
    """Folder or name where config.json is, if not with the model."""
    revision: str | None = None
    """Branch, tag or commit of the model."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of the tokenizer. None: `revision`."""
    hf_token: str | bool | None = None
    """Hugging Face token; True: the one of `huggingface-cli login`."""
    hf_overrides: dict[str, Any] | Callable[..., Any] | None = None
    """Merged into config.json; in Python also a function from the config's dict to a dict."""
    generation_config: str = "auto"
    """Where sampling defaults come from. auto: the model; vllm or quire: none; or a folder."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """Merged over the generation config."""
    max_logprobs: int = option(20, low=-1)
    """Most logprobs a request may ask for. -1: no cap."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """What logprobs show: before (raw) or after penalties and temperature; or logits."""
    logits_processors: tuple[Any, ...] | None = None
    """Classes (or module:Class names) that change the logits of every request."""
    disable_sliding_window: bool = False
    """Attend to everything; the context is cut to the window."""
    served_model_name: tuple[str, ...] | None = None
    """Names the server answers to; the first is shown. None: the model's name."""
    chat_template: str | None = None
    """Jinja file or text. None: the tokenizer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Where weights come from."""

    load_format: LoadFormat = "auto"
    """auto, safetensors, pt (pytorch_model.bin), or dummy (random weights, nothing is read)."""
    download_dir: str | None = None
    """Where downloads are kept. None: the Hugging Face cache."""
    use_tqdm_on_load: bool = True
    """Show a bar while weights load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Memory for keys and values."""

    block_size: int | Literal["auto"] | None = option(None, low=1, high=1024)
    """Tokens per KV block. None or auto: 16."""
    gpu_memory_utilization: float | None = option(
        None, above=0, high=1, alias="device_memory_utilization"
    )
    """Share of the device's memory quire may fill, weights included. None: 0.92; on a CPU
    4 GiB of KV, or half of the available memory if that is less."""
    gpu_memory: int | None = option(None, low=1, parse="bytes")
    """Bytes of device memory quire may fill, weights included: "24GiB". With
    gpu_memory_utilization: that share of them. On a GPU quire takes less where others hold it."""
    kv_cache_memory_bytes: int | None = option(None, low=1, parse="bytes")
    """Bytes for the KV cache alone; overrides the two above."""
    cpu_kvcache_space: float | None = option(None, low=0)
    """GiB for the KV cache if the device is a CPU; kv_cache_memory_bytes overrides it. None or 0:
    by gpu_memory_utilization."""
    num_gpu_blocks_override: int | None = option(None, low=1)
    """Number of KV blocks; overrides all of the above."""
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3"] = "auto"
    """Of keys and values. auto: the model's dtype; fp8 (or fp8_e4m3): 8-bit floats, on a GPU."""
    enable_prefix_caching: bool | None = None
    """Keep the KV of prompts for requests that begin alike. None: on."""
    swap_space: float = option(4.0, low=0)
    """GiB of host memory for preempted requests; used only with preemption_mode swap."""
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    """What happens to the KV of a request that must give way."""
    disable_hybrid_kv_cache_manager: bool | None = None
    """Keep all blocks of window layers too, with one block table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Budgets of a step, limits of the queue, and preemption order."""

    max_num_batched_tokens: int | None = option(None, low=1, parse="count")
    """Tokens per step. None: 16384 offline and 8192 in the server on a GPU of 70 GiB or more,
    8192 and 2048 on smaller ones, 4096 and 2048 on a CPU."""
    max_num_seqs: int | None = option(None, low=1, parse="count")
    """Sequences per step. None: 1024 on a GPU of 70 GiB or more, else 256; in the server on a
    CPU 128."""
    enable_chunked_prefill: bool | None = None
    """Let a prompt be computed over several steps. None: on."""
    max_num_partial_prefills: int = option(0, low=0)
    """Most prompts that may be in parts at once. 0: no cap."""
    max_long_partial_prefills: int = option(0, low=0)
    """Of these, most that are longer than long_prefill_token_threshold. 0: no cap."""
    long_prefill_token_threshold: int = option(0, low=0, parse="count")
    """A longer prompt counts as long, and gets at most this many tokens of a step while others
    could use them. 0: off, but with max_long_partial_prefills 4 % of max_model_len."""
    inter_token_target_ms: float | None = option(None, low=0)
    """While others wait for their next token, prompts get as much of a step as lets it end in so
    many milliseconds. 0: no target. None: 40 in a server, none offline."""
    max_num_queued_reqs: int | None = option(None, low=0, parse="count")
    """Most requests in a server at once, running and waiting; more get 429 with Retry-After. 0: all
    may wait. None: 0 offline, in a server eight times max_num_seqs and at least 4096."""
    max_num_queued_tokens: int | None = option(None, low=0, parse="count")
    """Most tokens of prompts that wait to be computed in a server; more get 429, but one prompt may
    always wait. 0: any number. None: 0 offline, in a server 4 Mi, and at least 16 prompts of
    max_model_len."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """fcfs: first come first served; priority: the lowest `priority` value first."""
    async_scheduling: bool | None = None
    """Plan the next step while one runs. None: what the device prefers."""
    steps_in_flight: int | None = option(None, low=1, high=4)
    """Steps planned before the first result is in. None: from async_scheduling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Which device, and which kernels."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: what is there."""
    attention_backend: str | None = None
    """Name of the attention backend. None or auto: the best that can."""
    enforce_eager: bool = False
    """Run every step through Python: no decode step is recorded and replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Several devices. One for now."""

    tensor_parallel_size: int = option(1, low=1, short="-tp")
    """Devices that share each layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOptions:
    """Output that is bound to a schema, a pattern or a grammar."""

    structured_outputs_config: dict[str, Any] = field(default_factory=dict)
    """JSON: backend (auto, xgrammar, guidance, outlines, lm-format-enforcer),
    disable_any_whitespace, disable_additional_properties, enable_in_reasoning (what is thought is
    bound, too), reasoning_parser, reasoning_parser_plugin."""
    grammar_compile_seconds: float = option(10.0, above=0, high=3600)
    """Processor time that compiling one grammar may take; the request of one that takes more gets
    400. Others run meanwhile."""
    grammar_compile_memory: int = option(1 << 30, low=1 << 24, parse="bytes")
    """Memory that compiling one grammar may take, likewise."""
    grammar_cache_memory: int = option(1 << 26, low=0, parse="bytes")
    """Bytes of compiled grammars that are kept though no request uses them now."""
    grammar_cache_size: int = option(512, low=0, parse="count")
    """Most grammars that are kept so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """What happens when the engine's process dies, or an API process does."""

    max_engine_restarts: int = option(5, low=0)
    """Engine restarts within engine_restart_window; every request is continued. One more death
    ends the server. 0: the first death does. API processes are restarted as often."""
    engine_restart_window: float = option(600.0, above=0)
    """Seconds in which restarts are counted."""
    engine_standby: bool = False
    """Keep a process ready that has imported what an engine needs, so that a restart takes some
    seconds less. Takes 170 MB of memory."""
    engine_restart_wait: float = option(30.0, low=0)
    """Seconds that a new request waits for an engine that is being restarted; then it gets 503 with
    Retry-After."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthOptions:
    """Health checks of the engine, and what is recorded for when it fails."""

    watchdog_seconds: float = option(60.0, low=0)
    """Restart an engine that has work and makes no progress for so many seconds, beyond ten times
    the expected time of its step. Stacks are logged, and streams are continued. 0: never."""
    canary_interval: float = option(30.0, low=0)
    """Compute one token of no request after so many idle seconds, and as often, to test the
    device. 0: never."""
    flight_recorder: bool = True
    """Keep the last steps in memory, and write them to a file when the engine dies or hangs: for
    `quire replay`. Without prompts and answers."""
    flight_recorder_size: int = option(8 << 20, low=1 << 20, parse="bytes")
    """Bytes of memory for the flight recorder; 8 MiB hold some 40,000 steps of 32 requests."""
    flight_recorder_dir: str | None = None
    """Folder for recordings; the latest ten are kept. None: recordings, in QUIRE_CACHE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveOptions:
    """Logs, statistics and profiles."""

    disable_log_stats: bool = False
    """Log no statistics."""
    fail_on_environ_validation: bool = False
    """An unknown VLLM_* environment variable is an error, not a warning."""
    profile: str | None = None
    """Folder for a trace of some steps, by torch's profiler. None: no trace."""
    profile_skip: int = option(20, low=0)
    """Steps before the trace begins."""
    profile_steps: int = option(20, low=1)
    """Steps in the trace."""
    log_level: Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET"] | None = None
    """Of quire's own log. None: QUIRE_LOGGING_LEVEL or INFO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options. `Options.from_flat({...})` makes one from flat names."""

    model: ModelOptions = field(default_factory=ModelOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    device: DeviceOptions = field(default_factory=DeviceOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    structured: StructuredOptions = field(default_factory=StructuredOptions)
    recovery: RecoveryOptions = field(default_factory=RecoveryOptions)
    health: HealthOptions = field(default_factory=HealthOptions)
    observe: ObserveOptions = field(default_factory=ObserveOptions)

    @classmethod
    def from_flat(cls, flat: Mapping[str, object]) -> Options:
        """Make Options from flat names, also vLLM's. Raises ConfigError; ignores nothing."""
        sections: dict[str, dict[str, object]] = {}
        for name, value in vllm_options.translate(dict(flat)).items():
            spec = option_specs().get(name)
            if spec is not None:
                sections.setdefault(spec.section, {})[name] = spec.parse_value(value)
            elif not vllm_options.is_ignored(name, value):
                raise unknown_option_error(name)
        kinds = section_classes()
        return cls(**{name: kinds[name](**values) for name, values in sections.items()})

    def flat(self) -> dict[str, object]:
        """Return every option by its flat name."""
        return {name: getattr(getattr(self, s.section), name) for name, s in option_specs().items()}

    def non_default(self) -> dict[str, object]:
        """Return the options that differ from their defaults."""
        return {name: v for name, v in self.flat().items() if v != option_specs()[name].default}


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """One option: its section, type, range and default."""

    name: str
    section: str
    hint: Any
    default: object
    parse: str | None = None
    low: float | None = None
    above: float | None = None
    high: float | None = None
    short: str | None = None
    alias: str | None = None

    def parse_value(self, given: object) -> object:
        """Convert a value to this option's type and check the range. Raises ConfigError."""
        if given is None and self.default is not None:
            return self.default
        value = coerce(self.name, self.hint, _normalize_value(self.name, given), self.parse)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._check_range(value)
        return value

    def _check_range(self, value: float) -> None:
        low, above, high = self.low, self.above, self.high
        good = (low is None or value >= low) and (above is None or value > above)
        if not good or (high is not None and value > high):
            parts = [
                f">= {low:g}" if low is not None else "",
                f"> {above:g}" if above is not None else "",
            ]
            parts.append(f"<= {high:g}" if high is not None else "")
            allowed = " and ".join(part for part in parts if part)
            raise ConfigError(f"{self.name} must be {allowed}, got {value!r}")

    @property
    def is_flag(self) -> bool:
        """Whether it takes only True or False."""
        if get_origin(self.hint) in (Union, UnionType):
            return set(get_args(self.hint)) == {bool, type(None)}
        return self.hint is bool


def _normalize_value(name: str, given: object) -> object:
    """Convert values of another library's types."""
    if name == "dtype" and given is not None:
        return str(given).removeprefix("torch.")
    if name == "log_level" and isinstance(given, str):
        return {"TRACE": "DEBUG", "WARN": "WARNING"}.get(given.upper(), given.upper())
    if name == "served_model_name" and isinstance(given, str):
        return (given,)
    if (
        name == "logits_processors"
        and given is not None
        and not isinstance(given, (list, tuple, str))
    ):
        return (given,)
    return given


def section_classes() -> dict[str, type[Any]]:
    """Return section name -> class, in order."""
    return dict(get_type_hints(Options))


@functools.cache
def option_specs() -> dict[str, OptionSpec]:
    """Return flat name -> OptionSpec, in order. Names are unique over the tree."""
    found: dict[str, OptionSpec] = {}
    for section, kind in section_classes().items():
        hints = get_type_hints(kind)
        for f in fields(kind):
            assert f.name not in found, f"{f.name} is in {section} and {found[f.name].section}"
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            found[f.name] = OptionSpec(f.name, section, hints[f.name], default, **f.metadata)
    return found


def unknown_option_error(name: str) -> ConfigError:
    """Return the error for an unknown name."""
    known = [*option_specs(), *vllm_options.option_names()]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else "`quire serve --help` lists them all"
    return ConfigError(f"no option {name!r}; {hint}")


@functools.cache
def option_docs() -> dict[str, str]:
    """Return flat name -> help text: the docstrings under the fields, read from this file."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(Options) or dataclasses))
    classes = {kind.__name__ for kind in section_classes().values()}
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            found.update(_class_docs(node))
    return found


def _class_docs(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for target, text in zip(node.body, node.body[1:]):
        if isinstance(target, ast.AnnAssign) and isinstance(target.target, ast.Name):
            assert isinstance(text, ast.Expr), f"{target.target.id} has no docstring"
            assert isinstance(text.value, ast.Constant), f"{target.target.id} has no docstring"
            yield target.target.id, " ".join(str(text.value.value).split())
