"""VLLM_* environment variables: maps them to options. Also sets up the log of a process.

    VARIABLE_TO_OPTION  sets an option; the option itself has priority
    READ                read in quire/env.py, under their own names or as QUIRE_*
    NO_EFFECT           accepted; one log line has the reason
    UNSUPPORTED         needs a feature that quire does not have: one warning

A name in none of these tables, and a QUIRE_* name that nothing reads, gets one warning, with a
similar name.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from quire import env
from quire import log as logs
from quire.config.options import Options, option_specs
from quire.errors import ConfigError

log = logging.getLogger(__name__)

LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")

VARIABLE_TO_OPTION: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "cpu_kvcache_space",
    "VLLM_ATTENTION_BACKEND": "attention_backend",
    "VLLM_PP_LAYER_PARTITION": "pipeline_layers",
    "VLLM_TARGET_DEVICE": "device",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "keep_alive_timeout",
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": "max_body_bytes",
    "VLLM_SERVER_DEV_MODE": "enable_dev_routes",
    "VLLM_ENABLE_RESPONSES_API_STORE": "enable_responses_store",
    "VLLM_SKIP_MODEL_NAME_VALIDATION": "skip_model_name_validation",
    "VLLM_LOG_STATS_INTERVAL": "log_stats_interval",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "allow_runtime_lora_updating",
    "VLLM_LORA_RESOLVER_CACHE_DIR": "lora_resolver_folder",
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": "lora_resolver_repos",
    "VLLM_REGEX_COMPILATION_TIMEOUT_S": "grammar_compile_seconds",
    "VLLM_RAY_BUNDLE_INDICES": "ray_bundle_indices",
    "VLLM_RAY_PER_WORKER_GPUS": "ray_gpus_per_rank",
    "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "ray_env_vars_to_copy",
}
RESOLVER_PLUGINS: Mapping[str, str] = {
    "VLLM_LORA_RESOLVER_CACHE_DIR": "lora_filesystem_resolver",
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": "lora_hf_hub_resolver",
}
"""Variable -> the plugin of vLLM that reads it: VLLM_PLUGINS may leave it out."""
_READ = """VLLM_API_KEY VLLM_HOST_IP VLLM_LOGGING_LEVEL VLLM_TRACE_FUNCTION VLLM_USE_MODELSCOPE
    VLLM_PLUGINS VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_PREFIX
    VLLM_LOGGING_STREAM"""

_NO_EFFECT = {
    "the processes of one server use sockets in a private folder": """VLLM_PORT VLLM_LOOPBACK_IP
        VLLM_RPC_BASE_PATH VLLM_RPC_TIMEOUT VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
        VLLM_ENABLE_V1_MULTIPROCESSING VLLM_WORKER_MULTIPROC_METHOD
        VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_USE_RUST_FRONTEND VLLM_USE_RUST_BENCH
        VLLM_RUST_FRONTEND_PATH VLLM_INSTANCE_ID""",
    "quire sends no usage statistics": """VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE
        VLLM_USAGE_STATS_SERVER""",
    "quire waits without a time limit, and logs its progress": """VLLM_ENGINE_READY_TIMEOUT_S
        VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
        VLLM_ENGINE_ITERATION_TIMEOUT_S""",
    "there is one engine and one runner": """VLLM_USE_V1 VLLM_USE_V2_MODEL_RUNNER
        VLLM_DISABLE_LOG_LOGO VLLM_LOGGING_COLOR VLLM_MODEL_REDIRECT_PATH""",
    "QUIRE_CACHE sets the folder": """VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_ASSETS_CACHE
        VLLM_TUNED_CONFIG_FOLDER VLLM_DISABLE_COMPILE_CACHE""",
    "quire runs no graph compiler": """VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH
        VLLM_ENABLE_STARTUP_PLAN VLLM_TORCH_COMPILE_LEVEL VLLM_COMPILE_CACHE_SAVE_FORMAT
        VLLM_USE_STANDALONE_COMPILE""",
    "it chooses among kernels quire does not have": """VLLM_USE_FLASHINFER_SAMPLER
        VLLM_USE_TRITON_FLASH_ATTN VLLM_FLASH_ATTN_VERSION VLLM_KV_CACHE_LAYOUT VLLM_MLA_DISABLE
        VLLM_USE_DEEP_GEMM VLLM_MOE_USE_DEEP_GEMM VLLM_DEEP_GEMM_WARMUP VLLM_MARLIN_USE_ATOMIC_ADD
        VLLM_DISABLED_KERNELS VLLM_FLASHINFER_FORCE_TENSOR_CORES VLLM_SKIP_WARMUP
        VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_USE_TRITON_AWQ
        VLLM_FUSED_MOE_CHUNK_SIZE VLLM_FLOAT32_MATMUL_PRECISION""",
    "quire measures what a step needs": "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
    "OMP_NUM_THREADS sets the number of threads": """VLLM_CPU_OMP_THREADS_BIND
        VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_MOE_PREPACK VLLM_CPU_SGL_KERNEL""",
    "quire starts ranks and adds over them in its own way": """VLLM_SKIP_P2P_CHECK
        VLLM_NCCL_SO_PATH VLLM_USE_NCCL_SYMM_MEM
        VLLM_DISABLE_PYNCCL VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_ALLREDUCE_USE_FLASHINFER
        VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_DP_MASTER_IP
        VLLM_DP_MASTER_PORT VLLM_USE_RAY_SPMD_WORKER VLLM_USE_RAY_COMPILED_DAG VLLM_LOCAL_RANK""",
    "--grammar-cache-memory limits the cache of all backends": """VLLM_XGRAMMAR_CACHE_MB
        VLLM_V1_USE_OUTLINES_CACHE""",
    "it belongs to a feature that is off": """VLLM_ENFORCE_STRICT_TOOL_CALLING
        VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY
        VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
        VLLM_SYSTEM_START_DATE VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_MEDIA_CACHE
        VLLM_MEDIA_CONNECTOR VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_URL_ALLOW_REDIRECTS
        VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MOONCAKE_BOOTSTRAP_PORT""",
    "the limits of requests are fixed": """VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS
        VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_CHAT_TEMPLATE_FUEL""",
    "it only changes what is logged or measured": """VLLM_DEBUG_LOG_API_SERVER_RESPONSE
        VLLM_REQUEST_BODY_LOG_LEVEL VLLM_GC_DEBUG VLLM_CUSTOM_SCOPES_FOR_PROFILING
        VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_DEBUG_DUMP_PATH VLLM_LOG_MODEL_INSPECTION
        VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RINGBUFFER_WARNING_INTERVAL""",
    "--enable-profiler-routes opens /start_profile, which writes to quire_profile/": """
        VLLM_TORCH_PROFILER_DIR""",
}
_UNSUPPORTED = {
    "set hf_overrides={\"max_position_embeddings\": N} and max_model_len":
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "results on a GPU may still depend on the batch": "VLLM_BATCH_INVARIANT",
    "Cohere's routes are not supported": "VLLM_ENABLE_COHERE_API",
    "the server ends when the engine does": "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
    "a request with non-finite logits ends with an error": "VLLM_RAISE_ON_LOGIT_NANS",
    "set VLLM_RAY_EXTRA_ENV_VARS_TO_COPY to PREFIX*, with commas":
        "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY",
}  # fmt: skip
_IGNORED_PREFIXES = (
    "VLLM_ROCM_ VLLM_TPU_ VLLM_XLA_ VLLM_XPU_ VLLM_HPU_ VLLM_NEURON_ VLLM_OPENVINO_ VLLM_RAY_ "
    "VLLM_NIXL_ VLLM_P2P_ VLLM_EC_ VLLM_MOONCAKE_ VLLM_MORI_ VLLM_DEEPEP_ VLLM_IMAGE_ VLLM_VIDEO_ "
    "VLLM_AUDIO_ VLLM_MAX_MEDIA_ VLLM_MAX_IMAGE_ VLLM_MAX_AUDIO_ VLLM_MAX_EMBED_ VLLM_FLASHINFER_ "
    "VLLM_GPT_OSS_ VLLM_USE_FLASHINFER_ VLLM_CUDART_ VLLM_CI_ VLLM_TEST_"
)

READ = frozenset(_READ.split())
NO_EFFECT = {name: why for why, names in _NO_EFFECT.items() for name in names.split()}
UNSUPPORTED = {name: why for why, names in _UNSUPPORTED.items() for name in names.split()}
IGNORED_PREFIXES = tuple(_IGNORED_PREFIXES.split())
"""Prefixes of names for other hardware and for features that are off."""
_OFF_VALUES = ("0", "false", "no", "off", "")


def start_process(
    environment: env.Env | None = None, *, level: str | None = None, style: logs.Style = "text"
) -> None:
    """Set up this process's log and, if configured, the trace of its calls. Raises ConfigError.

    level: of --log-level; None: from the environment. Each process calls this once, and again when
    its options are known.
    """
    current = environment or env.read()
    level = level or current.log_level
    if level not in LEVELS:
        raise ConfigError(f"the log level must be one of {', '.join(LEVELS)}, got {level!r}")
    given = env.vllm_variables()
    if given.get("VLLM_LOGGING_CONFIG_PATH"):
        _setup_log_from_file(given["VLLM_LOGGING_CONFIG_PATH"])
    elif given.get("VLLM_CONFIGURE_LOGGING", "1").lower() not in _OFF_VALUES:
        logs.setup(
            level,
            style=style,
            prefix=given.get("VLLM_LOGGING_PREFIX", ""),
            stream="stdout" if "stdout" in given.get("VLLM_LOGGING_STREAM", "") else "stderr",
        )
    if current.trace_function and not logs.is_tracing():
        path = logs.trace_functions()
        log.warning("every function call is written to %s: this makes quire very slow", path)


def _setup_log_from_file(path: str) -> None:
    try:
        logs.setup_from_file(Path(path))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def options_from_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the engine and server options that the variables set, as text."""
    plugins = _plugins(given)
    return {
        VARIABLE_TO_OPTION[name]: value
        for name, value in given.items()
        if name in VARIABLE_TO_OPTION
        and value
        and (plugins is None or RESOLVER_PLUGINS.get(name) in (None, *plugins))
    }


def _plugins(given: Mapping[str, str]) -> list[str] | None:
    """The plugins that VLLM_PLUGINS names; None: all are meant."""
    text = given.get("VLLM_PLUGINS")
    return None if text is None else [one.strip() for one in text.split(",") if one.strip()]


def apply_environment(options: Options) -> Options:
    """Return the options, with values of the environment in place of defaults."""
    flat = options.flat()
    given = {
        name: value
        for name, value in options_from_environment(env.vllm_variables()).items()
        if name in flat and flat[name] == option_specs()[name].default
    }
    return (
        Options.from_flat(options.non_default() | Options.from_flat(given).non_default())
        if given
        else options
    )


def describe_variables(given: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Yield the log lines about the variables: (level, line)."""
    unknown = []
    for name, value in sorted(given.items()):
        if name in UNSUPPORTED and value.lower() not in _OFF_VALUES:
            yield logging.WARNING, f"{name} has no effect: {UNSUPPORTED[name]}"
        elif name in NO_EFFECT:
            yield logging.INFO, f"{name} has no effect: {NO_EFFECT[name]}"
        elif name == "VLLM_PLUGINS":
            others = [one for one in _plugins(given) or () if one not in RESOLVER_PLUGINS.values()]
            if others:
                yield logging.WARNING, f"plugins of vLLM are not loaded: {', '.join(others)}"
        elif not is_known(name):
            unknown.append(_with_nearest(name))
    if unknown:
        yield logging.WARNING, f"unknown environment variables: {', '.join(unknown)}"


def is_known(name: str) -> bool:
    tables = (VARIABLE_TO_OPTION, READ, NO_EFFECT, UNSUPPORTED)
    return any(name in table for table in tables) or name.startswith(IGNORED_PREFIXES)


def _with_nearest(name: str) -> str:
    known = [*env.QUIRE_VARIABLES, *VARIABLE_TO_OPTION, *READ, *NO_EFFECT, *UNSUPPORTED]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"{name} (did you mean {near[0]}?)" if near else name


def log_notes(*, strict: bool = False) -> None:
    """Log the notes. strict: an unknown name is a ConfigError."""
    for level, line in describe_variables(
        {**env.vllm_variables(), **env.unknown_quire_variables()}
    ):
        if strict and line.startswith("unknown"):
            raise ConfigError(line)
        log.log(level, "%s", line)
