"""vLLM options: handles vLLM's option names that are not options of quire.

    RENAMED      another name for an option, or another form of it
    NO_EFFECT    results stay the same: accepted, with one log line
    UNSUPPORTED  would change results: refused, unless it is off

No name is ignored silently. The names of a new feature move from here to options.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping

from quire.config.values import coerce
from quire.errors import ConfigError

log = logging.getLogger(__name__)

RENAMED = {
    "token": "hf_token",
    "model_tag": "model",
    "policy": "scheduling_policy",
    "cpu_swap_space": "swap_space",
    "device_memory_utilization": "gpu_memory_utilization",
    "max_seq_len_to_capture": "max_cudagraph_capture_size",
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "override_pooler_config": "pooler_config",
    "mm_cache_preprocessor": "mm_processor_cache_gb",
    "cuda_graph_sizes": "cudagraph_capture_sizes",
}
"""Old or short name -> current name."""
STRUCTURED_KEYS = {
    "guided_decoding_backend": "backend",
    "guided_decoding_disable_fallback": "disable_fallback",
    "guided_decoding_disable_any_whitespace": "disable_any_whitespace",
    "guided_decoding_disable_additional_properties": "disable_additional_properties",
}
"""Old name -> key of structured_outputs_config."""
SPECULATIVE_KEYS = {
    "speculative_model": "model",
    "speculative_mode": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_max_model_len": "max_model_len",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_model_quantization": "quantization",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_disable_mqa_scorer": "disable_mqa_scorer",
    "spec_decoding_acceptance_method": "rejection_sample_method",
    "typical_acceptance_sampler_posterior_threshold": "posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha": "posterior_alpha",
    "disable_logprobs_during_spec_decoding": "disable_logprobs",
}
"""Old name -> key of speculative_config."""
MERGED_KEYS = {
    "structured_outputs_config": STRUCTURED_KEYS,
    "speculative_config": SPECULATIVE_KEYS,
}
"""Option -> old names of its keys."""
SILENT_ALIASES = ("model_tag", "tp", "pp")
"""Those of them that are accepted without a log line."""

_NO_EFFECT = {
    "quire captures a fixed set of graphs at start": """cudagraph_capture_sizes
        max_cudagraph_capture_size max_context_len_to_capture""",
    "quire runs no graph compiler": """compilation_config optimization_level
        cudagraph_metrics performance_mode jit_monitor_mode jit_monitor_verbose kernel_config
        ir_op_priority enable_flashinfer_autotune monokernel""",
    "it chooses among kernels quire does not have": """attention_config moe_backend linear_backend
        sparse_indexer_topk_backend gdn_prefill_backend kda_prefill_backend kda_decode_backend
        mamba_backend mamba_ssu_algorithm use_fp64_gumbel disable_cascade_attn all2all_backend
        dcp_comm_backend dcp_q_replicate disable_nccl_for_dp_synchronization use_tqdm_on_download
        enable_flash_late_interaction swa_bounded_replay""",
    "quire starts, watches and synchronises ranks in its own way": """ray_workers_use_nsight
        data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
        dp_supervisor_probe_failure_threshold max_parallel_loading_workers
        distributed_timeout_seconds cpu_distributed_timeout_seconds
        dp_sync_interval enable_batch_sharded_sampling enable_shm_tensor_arena
        enable_nccl_comm_suspend fault_tolerance_config enable_hc_sp""",
    "distributed_executor_backend='ray' places ranks by Ray": "worker_use_ray",
    "the group of the Ray actor is used, or that of ray_placement_group": "placement_group",
    "it belongs to an option that is refused": """dbo_decode_token_threshold
        dbo_prefill_token_threshold""",
    "tokens are spread over ranks one by one": """dcp_kv_cache_interleave_size
        cp_kv_cache_interleave_size""",
    "quire does this in its own way": """enable_ep_weight_filter
        use_v2_block_manager num_scheduler_steps
        multi_step_stream_outputs num_lookahead_slots delay_factor scheduler_delay_factor
        disable_async_output_proc scheduler_reserve_full_isl prefill_schedule_interval
        renderer_num_workers safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size pt_load_map_location
        sleep_mode_backend sleep_mode_offload_cudagraph
        enable_cumem_allocator numa_bind numa_bind_nodes numa_bind_cpus
        long_prefill_token_threshold_adaptive disable_chunked_mm_input engine_use_ray
        disable_frontend_multiprocessing use_async_output_proc max_num_scheduled_tokens
        ignore_patterns watermark prefix_cache_retention_interval shutdown_timeout
        stream_interval enable_sleep_mode code_revision
        prefix_caching_hash_algo kv_offloading_backend tokenizer_pool_size tokenizer_pool_type
        tokenizer_pool_extra_config full_cuda_graph override_neuron_config""",
    "it only changes what is logged or measured": """show_hidden_metrics_for_version
        kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets enable_mfu_metrics
        enable_layerwise_nvtx_tracing enable_logging_iteration_details collect_detailed_traces
        otlp_traces_endpoint aggregate_engine_logging
        disable_log_requests enable_log_requests
        watchdog_config usage_context exclude_log_deltas""",
    "--enable-per-request-metrics shows the figures of drafts too": """
        per_request_spec_decode_metrics""",
    "set --log-level, --log-format or VLLM_LOGGING_CONFIG_PATH instead": """logging_config
        log_config_file""",
    "--enable-profiler-routes opens /start_profile, which writes to quire_profile/": """
        profiler_config""",
    "reasoning_parser enables it": "enable_reasoning",
    "a server has it, and LLM.chat takes reasoning_parser and tool_parser": """reasoning_parser
        reasoning_parser_plugin reasoning_config tool_call_parser tool_parser_plugin
        enable_auto_tool_choice""",
    "adapters are cut and grouped in quire's own way": """fully_sharded_loras
        specialize_active_lora enable_mixed_moe_lora_format""",
    "it belongs to a feature that is off": """lora_extra_vocab_size long_lora_scaling_factors
        enable_moe_shared_loras max_lora_cls_labels enable_tower_connector_lora
        mm_processor_cache_type
        mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
        skip_mm_profiling mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
        mm_device_do_normalize video_pruning_method
        io_processor_plugin
        mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode
        mamba_cache_philox_rounds enable_mamba_cache_stochastic_rounding
        enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm
        prefix_match_unit offload_backend cpu_offload_params
        offload_num_in_group offload_prefetch_step offload_params allow_deprecated_quantization
        ubatch_size
        logits_processor_pattern dbo sleep_preserve_parameter_names
        ec_manager_config engram_config aux_output_config elastic_ep_max_dp_size
        disable_mm_preprocessor_cache max_prompt_adapters
        enable_multimodal_encoder_data_parallel max_prompt_adapter_token enable_lora_bias
        cohere_is_reasoning_model cohere_format""",
}

_UNSUPPORTED = {
    "these quantization settings": """quantization_config quantization_param_path
        model_loader_extra_config kv_cache_dtype_skip_layers""",
    "LoRA adapters by option": "qlora_adapter_name_or_path",
    "prompt adapters": "enable_prompt_adapter prompt_adapters",
    "more than one device": """data_parallel_multi_port_external_lb
        prefill_context_parallel_size device_ids enable_dbo enable_elastic_ep
        enable_fault_tolerance""",
    "balancing of experts by single options": """num_redundant_experts eplb_window_size
        eplb_step_interval eplb_log_balancedness""",
    "encoders alone, and dropping tokens of video": "mm_encoder_only video_pruning_rate",
    "running tools in the server": "tool_server",
    "changing how strictly calls follow their schemas (set `strict` in each function)": (
        "tool_strict_level"
    ),
    "an effort in place of disabled thinking": "anthropic_disabled_thinking_effort",
    "KV transfer and offload": """kv_transfer_config kv_events_config ec_transfer_config
        kv_sharing_fast_prefill""",
    "weight offload": "cpu_offload_gb offload_group_size weight_transfer_config",
    "plug-in classes of another engine": """scheduler_cls worker_cls worker_extension_cls
        model_class_overrides additional_config""",
    "returning the chosen experts": "enable_return_routed_experts",
    "returning the sampling mask": "return_sampling_mask",
    "trace replay": "enable_trace_replay",
    "watermarks": "watermark_config",
    "diffusion models": "diffusion_config",
    "a separate cap of active sequences": "max_num_active_seqs",
    "rope settings as options": "rope_scaling rope_theta",
    "a separate attention dtype": "override_attention_dtype",
    "a server without HTTP, or with only some of its routes": """grpc grpc_port tokens_only
        enable_scale_out""",
}

NO_EFFECT = {name: why for why, names in _NO_EFFECT.items() for name in names.split()}
UNSUPPORTED = {name: what for what, names in _UNSUPPORTED.items() for name in names.split()}

ADVICE = {
    "rope_scaling": 'use hf_overrides={"rope_scaling": {...}}',
    "rope_theta": 'use hf_overrides={"rope_theta": N}',
    "tokens_only": "prompts of token ids and return_token_ids work on every server",
    "quantization_config": 'use quantization="fp8"',
    "num_redundant_experts": 'use eplb_config={"num_redundant_experts": N}',
    "eplb_window_size": 'use eplb_config={"window_size": N}',
    "eplb_step_interval": 'use eplb_config={"step_interval": N}',
    "eplb_log_balancedness": 'use eplb_config={"log_balancedness": true}',
    "cpu_offload_gb": "choose a smaller model or dtype",
    "max_num_active_seqs": "max_num_seqs caps the running sequences",
}
ONE_IS_OFF = ("prefill_context_parallel_size",)
OFF_VALUES = ("", "auto", "none", "null", "false", "0", "mp", "uni", "hf", "{}", "[]")
QUANTIZATION_LOADERS = ("bitsandbytes",)
"""Values of load_format that are those of `quantization`, for files of any format."""
SUPPORTED_CHOICES = {
    "prefix_caching_hash_algo": ("sha256", "sha256_cbor"),
    "kv_offloading_backend": ("native",),
}
"""Accepted values of options without effect."""
_EIGHT_BITS = "int8_per_token_head or fp8_per_token_head"
UNSUPPORTED_KV_CACHES = (
    (("fp8_inc",), "is a format of Gaudi devices", "fp8"),
    (("fp8_ds_mla", "nvfp4_ds_mla"), "is of sparse attention over latents", "auto"),
    (("int4_", "nvfp4", "turboquant_", "octave_", "ultraquant_"),
     "has fewer than 8 bits", _EIGHT_BITS),
)  # fmt: skip
"""Beginnings of values of kv_cache_dtype of another engine, what they are, and what to use."""
_ATTENTION_BACKENDS = """FLASH_ATTN FLASH_ATTN_VLLM_V1 FLASHINFER FLASHINFER_VLLM_V1 TRITON_ATTN
XFORMERS
    TRITON_ATTN_VLLM_V1 TORCH_SDPA SDPA CPU_ATTN ROCM_FLASH ROCM_ATTN ROCM_AITER_FA FLASHMLA
    CUTLASS_MLA TRITON_MLA TRITON_MLA_VLLM_V1 FLASHINFER_MLA FLASH_ATTN_MLA FLASHMLA_SPARSE
    FLEX_ATTENTION TREE_ATTN PALLAS DUAL_CHUNK_FLASH_ATTN IPEX"""
ATTENTION_BACKENDS = frozenset(_ATTENTION_BACKENDS.split())
"""Attention backends of another engine: quire chooses among its own."""
_BOOLEAN_OPTIONS = """
    use_v2_block_manager worker_use_ray
    disable_log_requests
    enable_log_requests enable_return_routed_experts return_sampling_mask enable_trace_replay
    disable_cascade_attn multi_step_stream_outputs ray_workers_use_nsight numa_bind
    mm_encoder_only skip_mm_profiling kv_cache_metrics
    cudagraph_metrics enable_mfu_metrics enable_layerwise_nvtx_tracing enable_dbo
    enable_logging_iteration_details aggregate_engine_logging
    use_fp64_gumbel enable_cumem_allocator monokernel enable_elastic_ep
    fully_sharded_loras scheduler_reserve_full_isl disable_chunked_mm_input
    kv_sharing_fast_prefill allow_deprecated_quantization enable_fault_tolerance enable_reasoning
    engine_use_ray disable_async_output_proc jit_monitor_verbose disable_frontend_multiprocessing
    long_prefill_token_threshold_adaptive
    swa_bounded_replay enable_flashinfer_autotune
    enable_auto_tool_choice enable_sleep_mode enable_batch_sharded_sampling enable_ep_weight_filter
    sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_mamba_cache_stochastic_rounding
    dcp_q_replicate data_parallel_multi_port_external_lb enable_hc_sp enable_shm_tensor_arena
    disable_nccl_for_dp_synchronization enable_mamba_shared_prefix_checkpoint use_replayssm
    mm_device_do_normalize enable_tower_connector_lora specialize_active_lora
    enable_mixed_moe_lora_format enable_moe_shared_loras
    cohere_is_reasoning_model tokens_only enable_scale_out enable_flash_late_interaction
    grpc enable_prompt_adapter enable_lora_bias disable_mm_preprocessor_cache full_cuda_graph
    enable_multimodal_encoder_data_parallel disable_logprobs_during_spec_decoding
    eplb_log_balancedness speculative_disable_mqa_scorer guided_decoding_disable_fallback
    guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties
    exclude_log_deltas"""
BOOLEAN_OPTIONS = frozenset(_BOOLEAN_OPTIONS.split())
"""Options that take no value on a command line."""


_SHORT_FLAGS = """prefill_context_parallel_size:-pcp data_parallel_multi_port_external_lb:-dpm
    diffusion_config:-dc compilation_config:-cc
    attention_config:-ac"""
_LIST_OPTIONS = """cudagraph_capture_sizes cuda_graph_sizes prompt_adapters device_ids
    numa_bind_nodes numa_bind_cpus ignore_patterns
    collect_detailed_traces kv_cache_dtype_skip_layers sleep_preserve_parameter_names
    cpu_offload_params offload_params"""
LIST_OPTIONS = frozenset(_LIST_OPTIONS.split())
"""Options that take several values on a command line."""
SHORT_FLAGS = dict(pair.split(":") for pair in _SHORT_FLAGS.split())
"""Name -> short flag."""


def option_names() -> Iterable[str]:
    """Yield every name of these tables."""
    merged = (name for names in MERGED_KEYS.values() for name in names)
    return sorted({*RENAMED, *merged, *NO_EFFECT, *UNSUPPORTED})


def describe_effect(name: str) -> str:
    """Describe the effect of a name in one sentence."""
    if name in RENAMED:
        return f"Another name of {RENAMED[name]}."
    for option, names in MERGED_KEYS.items():
        if name in names:
            return f"Another name of {names[name]} in {option}."
    if name in NO_EFFECT:
        return f"Accepted, no effect: {NO_EFFECT[name]}."
    advice = f"; {ADVICE[name]}" if name in ADVICE else ""
    return f"Accepted only if it is off: quire does not support {UNSUPPORTED[name]} yet{advice}."


def translate(flat: dict[str, object]) -> dict[str, object]:
    """Translate old names to current ones. Raises ConfigError if both are given and differ."""
    out: dict[str, object] = {}
    for given, value in flat.items():
        name = RENAMED.get(given, given)
        if name != given and value is None:
            continue
        if name != given and given not in SILENT_ALIASES:
            log.info("%s is now called %s", given, name)
        if name != given and flat.get(name) not in (None, value):
            raise ConfigError(f"{given} is another name of {name}; they differ: give one")
        if value is not None or name not in out:
            out[name] = value
    for option, names in MERGED_KEYS.items():
        _merge_keys(out, option, names)
    if _swap_has_no_effect(out):
        log.info("swap_space has no effect without preemption_mode='swap'")
    out.update(_translate_values(out))
    return out


def _merge_keys(given: dict[str, object], option: str, names: Mapping[str, str]) -> None:
    """Move older names into the option's object. Raises ConfigError if values differ."""
    older = {name: given.pop(name) for name in names if name in given}
    older = {
        name: value if names[name] == "model" else _number(value)
        for name, value in older.items()
        if value is not None
    }
    if not older:
        return
    whole = given.get(option) or {}
    if isinstance(whole, str):
        whole = coerce(option, dict, whole)
    if not isinstance(whole, Mapping):
        raise ConfigError(f"{option} must be a JSON object, got {whole!r}")
    found = dict(whole)
    for name, value in older.items():
        if found.setdefault(names[name], value) != value:
            raise ConfigError(f"{name} and {names[name]} in {option} differ: give one of them")
    new = {names[name]: found[names[name]] for name in older}
    log.info("%s: use %s=%s instead", ", ".join(older), option, json.dumps(new))
    given[option] = found


def _number(value: object) -> object:
    """Return the number that a word of a command line is; other values as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _swap_has_no_effect(given: Mapping[str, object]) -> bool:
    """Whether swap_space is given although preempted requests are recomputed."""
    return given.get("swap_space") is not None and given.get("preemption_mode") != "swap"


def _translate_values(given: dict[str, object]) -> dict[str, object]:
    """Translate option values that other releases spell differently."""
    fixed: dict[str, object] = {}
    if given.get("max_model_len") in (-1, "-1"):
        fixed["max_model_len"] = "auto"
    fixed.update(_translate_quantization(given.get("quantization"), given.get("load_format")))
    for name, known in SUPPORTED_CHOICES.items():
        if fixed.get(name, given.get(name)) not in (None, *known):
            raise ConfigError(
                f"{name}={given[name]!r} is not supported yet; allowed: {', '.join(known)}"
            )
    backend = given.get("attention_backend")
    if isinstance(backend, str) and backend.upper() in ATTENTION_BACKENDS and not backend.islower():
        log.info("attention_backend=%r has no effect: quire chooses among its own", backend)
        fixed["attention_backend"] = None
    cache_dtype = given.get("kv_cache_dtype")
    for names, reason, advice in UNSUPPORTED_KV_CACHES:
        if isinstance(cache_dtype, str) and cache_dtype.startswith(names):
            raise ConfigError(
                f"kv_cache_dtype={cache_dtype!r} {reason}, which quire does not support; "
                f"use {advice}"
            )
    return fixed


def _translate_quantization(method: object, load_format: object) -> dict[str, object]:
    """Return `quantization` and `load_format` where they have another spelling.

    Raises ConfigError if a load_format that is a quantization differs from it.
    """
    fixed: dict[str, object] = {}
    if isinstance(method, str):
        prefix, colon, rest = method.partition(":")
        method = fixed["quantization"] = prefix.lower() + colon + rest
        if method in ("", "none", "null"):
            method = fixed["quantization"] = None
    if load_format in QUANTIZATION_LOADERS:
        if method not in (None, load_format):
            raise ConfigError(
                f"load_format={load_format!r} and quantization={method!r} differ: leave one out"
            )
        fixed |= {"quantization": load_format, "load_format": "auto"}
    return fixed


def is_ignored(name: str, value: object) -> bool:
    """Whether the name is known and has no effect. Raises ConfigError if the value would matter."""
    if name in NO_EFFECT:
        if not is_neutral(name, value):
            log.info("%s=%r has no effect: %s", name, value, NO_EFFECT[name])
        return True
    if name not in UNSUPPORTED:
        return False
    if is_neutral(name, value):
        return True
    advice = ADVICE.get(name, "leave it out")
    raise ConfigError(f"{name}={value!r}: quire does not support {UNSUPPORTED[name]} yet; {advice}")


def is_neutral(name: str, value: object) -> bool:
    """Whether the value means "off" or "the default"."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return not value
    if isinstance(value, str):
        return value.lower() in OFF_VALUES or (value == "1" and name in ONE_IS_OFF)
    if value is None or value is False:
        return True
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value == 0 or (value == 1 and name in ONE_IS_OFF)
    return False
