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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quire.config import vllm_options
from quire.config.media import MediaOptions, parse_counts
from quire.config.option_field import option
from quire.config.pooler_config import PoolerConfig
from quire.config.ray_options import RayOptions
from quire.config.speculation_options import SpeculationOptions
from quire.config.values import coerce
from quire.errors import ConfigError

Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
LoadFormat = Literal["auto", "hf", "safetensors", "pt", "mistral", "gguf", "dummy"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, and the format of its numbers."""

    model: str = "embedded"
    """Folder, Hugging Face name, or "embedded" for the small model that comes with quire."""
    tokenizer: str | None = None
    """Folder or name of the tokenizer. None: the model's."""
    tokenizer_mode: str = "auto"
    """Tokenizer implementation. auto: tokenizer.json, else tekken.json, else by transformers; hf:
    without tekken.json; mistral: tekken.json; slow: by transformers, in Python."""
    skip_tokenizer_init: bool = False
    """Work with token ids only: no tokenizer is loaded, and outputs have no text."""
    trust_remote_code: bool = False
    """Run Python code in the model's folder, of its class or its tokenizer."""
    model_impl: Literal["auto", "quire", "transformers"] = "auto"
    """Implementation of the model. quire: native (vllm means the same); transformers: the
    class of transformers on quire's attention and linear layers; auto: quire's own if there is
    one."""
    quantization: str | None = option(None, short="-q")
    """Quantize a plain checkpoint while it loads. fp8: 8-bit floats, a scale per output; fp8_block:
    per 128 x 128; int8, int4: integers, a scale per 128 inputs; int4_asym: also a zero;
    int8_per_channel_weight_only: a scale per output; experts_int8: only experts; mxfp4: 4-bit
    floats; nf4 (or bitsandbytes): 4-bit codes as QLoRA has them; gguf:NAME: the types of GGUF
    files, such as gguf:Q4_K_M. With +lm_head behind it (int8+lm_head) the output head, and an
    embedding that it shares, are quantized too. The name of the checkpoint's own format is allowed
    and changes nothing. None: as stored."""
    dtype: Dtype = "auto"
    """Dtype of weights and activations. auto: the checkpoint's; float16 becomes bfloat16 on a
    CPU."""
    seed: int = 0
    """Seed of requests that have none of their own."""
    max_model_len: int | Literal["auto"] | None = option(None, low=-1, parse="count")
    """Maximum of prompt plus output tokens. None: the model's limit; auto or -1: the longest that
    fits."""
    config_format: Literal["auto", "hf", "mistral"] = "auto"
    """hf: config.json; mistral: params.json; auto: config.json if there is one."""
    hf_config_path: str | None = None
    """Folder or name with config.json, if it is not with the model."""
    revision: str | None = None
    """Branch, tag or commit of the model."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of the tokenizer. None: `revision`."""
    hf_token: str | bool | None = None
    """Hugging Face token; True: the one of `huggingface-cli login`."""
    hf_overrides: dict[str, Any] | Callable[..., Any] | None = None
    """JSON merged into config.json; in Python also a function from the config's dict to a dict."""
    generation_config: str = "auto"
    """Source of sampling defaults. auto: the model; vllm or quire: none; or a folder."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """JSON merged into the generation config."""
    max_logprobs: int = option(20, low=-1)
    """Maximum of logprobs per token that a request may set. -1: no maximum."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """What logprobs are computed from: raw_* before, processed_* after penalties and
    temperature."""
    logits_processors: tuple[Any, ...] | None = None
    """Classes (or module:Class names) that change the logits of every request."""
    disable_sliding_window: bool = False
    """Use full attention in place of sliding windows; max_model_len is cut to the window."""
    enable_prompt_embeds: bool = False
    """Accept prompts as embeddings (`prompt_embeds`): vectors of no token are possible."""
    served_model_name: tuple[str, ...] | None = None
    """Model names that the server accepts; the first is the one shown. None: the model's name."""
    chat_template: str | None = None
    """Chat template: a Jinja file or text. None: the tokenizer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOptions:
    """What a model does: generate text, or make embeddings and scores."""

    runner: Literal["auto", "generate", "pooling", "draft"] = "auto"
    """generate: text; pooling: embeddings, classes and scores. auto: by the model's files and its
    class. draft is not supported."""
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    """Head of a model that pools. embed: none, hidden states become embeddings; classify: one that
    gives logits of labels; none: only the model's own. auto: by its class."""
    task: (
        Literal["auto", "generate", "embed", "embedding", "classify", "score", "reward"] | None
    ) = None
    """Older form of runner and convert."""
    pooler_config: dict[str, Any] | None = None
    """JSON: task, pooling_type (CLS, LAST, MEAN, MAX, MEAN_SQRT_LEN, WEIGHTED_MEAN, ALL, STEP),
    seq_pooling_type, tok_pooling_type, use_activation, dimensions, enable_chunked_processing,
    max_embed_len, logit_mean, logit_sigma, step_tag_id, returned_token_ids. What is not set is as
    the model's files state."""
    default_prompt_name: str | None = None
    """Prompt that is put before texts of embedding requests that name none. None: as the model's
    files state; none: no prompt."""

    @property
    def wants_text(self) -> bool:
        """Whether the user wants a model that generates, whatever its files state."""
        return self.runner == "generate" or self.task == "generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Where and how weights are read."""

    load_format: LoadFormat = "auto"
    """auto, safetensors, pt (pytorch_model.bin), mistral (consolidated*.safetensors), gguf, or
    dummy (random weights; no file is read). bitsandbytes means quantization=bitsandbytes."""
    download_dir: str | None = None
    """Folder for downloads. None: the Hugging Face cache."""
    use_tqdm_on_load: bool = True
    """Show a progress bar while weights load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Memory of the KV cache."""

    block_size: int | Literal["auto"] | None = option(None, low=1, high=1024)
    """Tokens per KV block. None or auto: 16."""
    gpu_memory_utilization: float | None = option(
        None, above=0, high=1, alias="device_memory_utilization"
    )
    """Fraction of the device's memory that quire may use, weights included. None: 0.92; on a CPU
    4 GiB of KV cache, or half of the available memory if that is less."""
    gpu_memory: int | None = option(None, low=1, parse="bytes")
    """Bytes of device memory that quire may use, weights included: "24GiB". With
    gpu_memory_utilization: that fraction of them. At most what is free."""
    kv_cache_memory_bytes: int | None = option(None, low=1, parse="bytes")
    """Bytes of the KV cache alone; overrides gpu_memory_utilization and gpu_memory."""
    cpu_kvcache_space: float | None = option(None, low=0)
    """GiB of the KV cache if the device is a CPU; kv_cache_memory_bytes overrides it. None or 0:
    set by gpu_memory_utilization."""
    num_gpu_blocks_override: int | None = option(None, low=1)
    """Number of KV blocks; overrides every other option of the cache's size."""
    kv_cache_dtype: Literal[
        "auto",
        "bfloat16",
        "float16",
        "float32",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "int8_per_token_head",
        "fp8_per_token_head",
    ] = "auto"
    """How keys and values are stored. auto: as the checkpoint states, or in the model's dtype. fp8
    (or fp8_e4m3), fp8_e5m2: 8-bit floats, with the scales of the checkpoint, else 1.
    int8_per_token_head, fp8_per_token_head: 8 bits with a scale for each token and head."""
    calculate_kv_scales: bool = False
    """With kv_cache_dtype fp8: measure the scales, for each token and head (fp8_per_token_head)."""
    enable_prefix_caching: bool | None = None
    """Reuse the KV of earlier prompts with the same beginning. None: on."""
    kv_offloading_size: float | None = option(None, low=0)
    """GiB of host memory for KV that leaves the device; later prompts and preempted requests find
    it there. None or 0: none. Needs prefix caching."""
    swap_space: float | None = option(None, low=0)
    """Another name of kv_offloading_size, used only with preemption_mode swap. None: 4."""
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    """swap: use swap_space GiB of host memory for KV. recompute: only kv_offloading_size."""
    mm_encoder_cache_gb: float | None = option(None, above=0)
    """GiB of device memory for encoded images, video and audio, which prompts with the same item
    find there. None: for as many tokens as a step computes, and for the largest item."""
    state_checkpoints: int | None = option(None, low=0, parse="count")
    """Copies of recurrent states, from which prompts with the same beginning continue. None: four
    for each sequence of max_num_seqs, at most an eighth of the memory that weights leave."""
    state_checkpoint_tokens: int = option(1024, low=64, parse="count")
    """Tokens between two of a sequence."""
    disable_hybrid_kv_cache_manager: bool | None = None
    """Keep all blocks of layers with a window, in one block table for all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Token budgets of a step, limits of the queue, and preemption order."""

    max_num_batched_tokens: int | None = option(None, low=1, parse="count")
    """Maximum of tokens per step. None: 16384 offline and 8192 in the server on a GPU of 70 GiB or
    more, 8192 and 2048 on smaller ones, 4096 and 2048 on a CPU; 4096 at most over stages."""
    max_num_seqs: int | None = option(None, low=1, parse="count")
    """Maximum of sequences per step. None: 1024 on a GPU of 70 GiB or more, else 256; in the server
    on a CPU 128."""
    enable_chunked_prefill: bool | None = None
    """Compute a prompt over several steps where it does not fit in one. None: on."""
    max_num_partial_prefills: int = option(0, low=0)
    """Maximum of prompts that are partly computed at once. 0: no maximum."""
    max_long_partial_prefills: int = option(0, low=0)
    """Maximum of these that are longer than long_prefill_token_threshold. 0: no maximum."""
    long_prefill_token_threshold: int = option(0, low=0, parse="count")
    """Prompts of more tokens are long, and get at most this many tokens of a step while other
    requests could use the rest. 0: off, but with max_long_partial_prefills 4 % of max_model_len."""
    inter_token_target_ms: float | None = option(None, low=0)
    """Target in milliseconds for a step that has decoding requests: prompts get only as many tokens
    of the step as keep it. 0: no target. None: 40 in a server, none offline."""
    max_num_queued_reqs: int | None = option(None, low=0, parse="count")
    """Maximum of requests in a server, running and waiting; further ones get 429 with Retry-After.
    0: no maximum. None: 0 offline, in a server eight times max_num_seqs and at least 4096; 16 times
    that for a model that only pools, where each text is a request."""
    max_num_queued_tokens: int | None = option(None, low=0, parse="count")
    """Maximum of prompt tokens that wait in a server; further requests get 429, but one prompt may
    always wait. 0: no maximum. None: 0 offline, in a server 4 Mi, and at least 16 prompts of
    max_model_len; 16 times that for a model that only pools."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """fcfs: first come, first served; priority: the lowest `priority` value first."""
    async_scheduling: bool | None = None
    """Plan the next step while one runs. None: on where it is faster (on a GPU)."""
    steps_in_flight: int | None = option(None, low=1, high=4)
    """Steps planned before the first result has arrived. None: set by async_scheduling; with
    pipeline stages one more than there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Device and attention backend."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device: auto uses a GPU if there is one."""
    attention_backend: str | None = None
    """Name of the attention backend. None or auto: the fastest that supports the model."""
    enforce_eager: bool = False
    """Run every step eagerly: no decode step is captured and replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Several devices."""

    tensor_parallel_size: int = option(1, low=1, short="-tp")
    """Number of devices over which each layer is sharded."""
    decode_context_parallel_size: int = option(1, low=1, short="-dcp")
    """Number of those devices, of which all have the same KV heads, over which the tokens of every
    sequence are spread, so that the KV cache has room for as many times more."""
    pipeline_parallel_size: int = option(1, low=1, short="-pp")
    """Number of pipeline stages: each has a part of the layers, on tensor_parallel_size devices of
    its own."""
    pipeline_layers: str | None = None
    """Number of layers of each pipeline stage, such as 20,20,21,19. None: stages with weights of
    nearly the same size, embedding and output head included."""
    enable_expert_parallel: bool = option(False, short="-ep")
    """Ranks have some experts each, whole, in place of a slice of every expert."""
    expert_placement_strategy: Literal["linear", "round_robin"] = "linear"
    """Which experts a rank has with enable_expert_parallel. linear: neighbours. round_robin: every
    n-th of n ranks, which is more even where a token's experts are chosen from groups of
    neighbours."""
    enable_eplb: bool = False
    """Move experts between ranks from time to time, so that ranks compute about the same number of
    tokens. Results do not change. It needs enable_expert_parallel."""
    eplb_config: dict[str, Any] = field(default_factory=dict)
    """JSON: num_redundant_experts (copies of the busiest experts in each layer, 0), step_interval
    (steps after which experts are moved, 3000), window_size (last steps whose tokens count, 1000),
    log_balancedness (write how even the load was, false)."""
    distributed_executor_backend: Literal["mp", "uni", "external_launcher", "ray"] | None = None
    """How the ranks of a model run. mp: rank 0 in the engine's process, each other in a process of
    its own. uni: one rank. external_launcher: torchrun starts this program once for each rank, and
    all make the same calls. ray: as mp, with ranks on the nodes of a Ray cluster. None: mp for
    several ranks, else uni."""
    disable_custom_all_reduce: bool = False
    """Sums over GPUs run through NCCL, also where quire's kernels could read the memory of other
    GPUs."""
    rank_timeout_seconds: float = option(10.0, above=0)
    """A rank that has not finished a step after so many seconds, and 20 times the expected time of
    the step, counts as hanging: the engine is restarted. Time in which a rank compiles a kernel or
    captures a graph does not count."""
    data_parallel_size: int = option(1, low=1, high=1024, short="-dp")
    """Number of engines of a server: each has the whole model, on devices of its own, and requests
    are spread over them. With enable_expert_parallel: number of ranks of one engine that have
    requests and a KV cache of their own, and share the experts."""
    data_parallel_size_local: int | None = option(None, low=1, short="-dpl")
    """Number of these engines on this node; the others join from nodes that are started with
    headless. None: all, or with headless all from data_parallel_start_rank on."""
    data_parallel_start_rank: int | None = option(None, low=0, short="-dpr")
    """Rank of the first engine of this node. Without headless, as data_parallel_hybrid_lb."""
    data_parallel_address: str | None = option(None, short="-dpa")
    """Address of the head: the node with the API server. Other nodes connect to it, and it listens
    there. None: 127.0.0.1."""
    data_parallel_rpc_port: int = option(29550, low=1, high=65535, short="-dpp")
    """Port of the head for other nodes."""
    data_parallel_backend: Literal["mp", "ray"] = option("mp", short="-dpb")
    """How the engines of other nodes are started. mp: by a command on each. ray: not supported."""
    data_parallel_rank: int | None = option(None, low=0, short="-dpn")
    """This server is one of data_parallel_size, with the engine of this rank alone; a load
    balancer of yours is before them."""
    data_parallel_external_lb: bool = option(False, short="-dpe")
    """The same, with data_parallel_start_rank or data_parallel_rank."""
    data_parallel_hybrid_lb: bool = option(False, short="-dph")
    """This server has the data_parallel_size_local engines from data_parallel_start_rank on, and a
    load balancer of yours is before the servers of all nodes."""
    nnodes: int = option(1, low=1, high=1024, short="-n")
    """Number of machines over which the ranks of one engine are spread: tensor_parallel_size x
    pipeline_parallel_size is a multiple of it. Each machine runs the same command with its
    node_rank; the others than the first with headless."""
    node_rank: int = option(0, low=0, short="-r")
    """Number of this machine. 0 is the head: it has the scheduler, and answers requests."""
    master_addr: str = "127.0.0.1"
    """Address of the head, at which it listens and where the others reach it."""
    master_port: int = option(29501, low=1, high=65535)
    """Port of the head at which other machines join. Further ports are chosen by the system."""
    headless: bool = False
    """This machine answers no requests. With nnodes > 1 it has ranks of an engine whose head is at
    master_addr, else engines that join the head at data_parallel_address."""
    cluster_secret_file: str | None = None
    """File with the secret that the machines of one deployment share, at least 16 bytes. Without a
    secret nothing listens on an address that is not loopback. None: QUIRE_CLUSTER_SECRET."""

    @property
    def num_engines(self) -> int:
        """Engines of a server."""
        return 1 if self.enable_expert_parallel else self.data_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAOptions:
    """LoRA adapters: weights that some requests add to the model's."""

    enable_lora: bool = False
    """Serve LoRA adapters beside the model."""
    max_loras: int = option(1, low=1, high=4096)
    """Maximum of distinct adapters in one step. The device has memory for so many of
    max_lora_rank."""
    max_lora_rank: int = option(16, low=1, high=4096)
    """Maximum rank of an adapter."""
    max_cpu_loras: int | None = option(None, low=1)
    """Maximum of adapters in host memory; others are read again when a request needs them. None:
    max_loras."""
    lora_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Dtype of adapters. auto: the model's; no other is supported."""
    lora_modules: tuple[Any, ...] | None = None
    """Adapters to load at the start: NAME=FOLDER, or JSON with name, path and base_model_name, or a
    JSON list of those. Enables adapters."""
    default_mm_loras: dict[str, Any] = field(default_factory=dict)
    """JSON: the adapter of prompts with media of a kind that name no adapter, {"audio": FOLDER},
    loaded at the start as a module of that name. Prompts of several such kinds have none."""
    lora_target_modules: tuple[str, ...] | None = None
    """Last components of the names of modules that adapters may change, as q_proj, experts, or
    all-linear; memory is reserved for these alone, and an adapter that changes others is refused.
    None: all, and experts if their slots take at most a tenth of the device's memory."""
    lora_modules_to_save_memory: int = option(0, low=0, parse="bytes")
    """Bytes of each device, for all slots, of rows of embeddings and output heads that an adapter
    has instead of the model's (modules_to_save, trainable_token_indices). One with more is
    refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOptions:
    """Output that must match a JSON schema, a pattern or a grammar."""

    structured_outputs_config: dict[str, Any] = field(default_factory=dict)
    """JSON: backend (auto, xgrammar, guidance, outlines, lm-format-enforcer),
    disable_any_whitespace, disable_additional_properties, enable_in_reasoning (the reasoning must
    match too), reasoning_parser, reasoning_parser_plugin."""
    grammar_compile_seconds: float = option(10.0, above=0, high=3600)
    """Seconds of processor time for compiling one grammar; a request that needs more gets 400.
    Other requests run meanwhile. The head of a stream waits for it, up to 1.5 times as long."""
    grammar_compile_memory: int = option(1 << 30, low=1 << 24, parse="bytes")
    """Bytes of memory for compiling one grammar; a request that needs more gets 400."""
    grammar_cache_memory: int = option(1 << 26, low=0, parse="bytes")
    """Bytes of compiled grammars that stay cached while no request uses them."""
    grammar_cache_size: int = option(512, low=0, parse="count")
    """Maximum of grammars that stay cached so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """What happens when the engine process or an API process dies."""

    max_engine_restarts: int = option(5, low=0)
    """Engine restarts within engine_restart_window; every request is continued. One more death
    ends the server. 0: the first death ends it. The same number holds for each API process."""
    engine_restart_window: float = option(600.0, above=0)
    """Seconds in which restarts are counted."""
    engine_standby: bool = False
    """Keep a process ready that has imported the engine's modules, so that a restart takes some
    seconds less. It needs 170 MB of memory."""
    engine_restart_wait: float = option(30.0, low=0)
    """Seconds that a new request waits for an engine that is being restarted, before it gets 503
    with Retry-After."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthOptions:
    """Health checks of the engine, and recordings for when it fails."""

    watchdog_seconds: float = option(60.0, low=0)
    """Restart an engine that has work and finishes no step for so many seconds, beyond ten times
    the expected time of its step. Stacks are logged, and streams are continued. 0: never."""
    canary_interval: float = option(30.0, low=0)
    """Run a one-token test step on the device after so many idle seconds, and at that interval
    while idle. 0: never."""
    flight_recorder: bool = True
    """Record the last steps in memory, and write them to a file when the engine dies or hangs, for
    `quire replay`. Prompts and answers are not recorded."""
    flight_recorder_size: int = option(8 << 20, low=1 << 20, parse="bytes")
    """Bytes of memory for the flight recorder; 8 MiB hold about 40,000 steps of 32 requests."""
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
    """Folder for a trace of some steps by torch's profiler. None: no trace."""
    profile_skip: int = option(20, low=0)
    """Steps before the trace begins."""
    profile_steps: int = option(20, low=1)
    """Steps in the trace."""
    log_level: Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET"] | None = None
    """Level of quire's own log. None: QUIRE_LOGGING_LEVEL or INFO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options. `Options.from_flat({...})` makes one from flat names."""

    model: ModelOptions = field(default_factory=ModelOptions)
    pooling: PoolingOptions = field(default_factory=PoolingOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    device: DeviceOptions = field(default_factory=DeviceOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    ray: RayOptions = field(default_factory=RayOptions)
    lora: LoRAOptions = field(default_factory=LoRAOptions)
    media: MediaOptions = field(default_factory=MediaOptions)
    structured: StructuredOptions = field(default_factory=StructuredOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
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
    if name == "model_impl" and given in ("vllm", "terratorch"):
        return "quire"
    if name == "limit_mm_per_prompt" and isinstance(given, str) and "=" in given:
        with suppress(ValueError):
            return parse_counts(given)
    if name == "pooler_config" and given is not None:
        return PoolerConfig.parse(given).non_default()
    if name in ("served_model_name", "lora_modules") and isinstance(given, str):
        return (given,)
    if (
        name in ("logits_processors", "lora_modules")
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
    """Return flat name -> help text: the docstrings under the fields, read from their files."""
    classes = {kind.__name__: inspect.getmodule(kind) for kind in section_classes().values()}
    found: dict[str, str] = {}
    for module in dict.fromkeys(classes.values()):
        for node in ast.parse(inspect.getsource(module or dataclasses)).body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                found.update(_class_docs(node))
    return found


def _class_docs(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for target, text in zip(node.body, node.body[1:]):
        if isinstance(target, ast.AnnAssign) and isinstance(target.target, ast.Name):
            assert isinstance(text, ast.Expr), f"{target.target.id} has no docstring"
            assert isinstance(text.value, ast.Constant), f"{target.target.id} has no docstring"
            yield target.target.id, " ".join(str(text.value.value).split())
