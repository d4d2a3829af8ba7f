"""Config resolution: computes the engine config from options and facts. Pure.

One function per section. Each value that was not given as an option is recorded with its reason as
a Decision, which `quire explain` prints. The config is frozen.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from quire.config.adapters import resolve_adapter_slots, resolve_adapters
from quire.config.decisions import DecisionLog
from quire.config.engine_config import (
    CacheSection,
    Decision,
    DeviceSection,
    EncoderSection,
    EngineConfig,
    HealthSection,
    LoadSection,
    ModelSection,
    ObserveSection,
    PoolingSection,
    RecoverySection,
    SamplingSection,
    SchedulerSection,
)
from quire.config.expert_balance import resolve_expert_balance
from quire.config.facts import DeviceFacts, ModelFacts
from quire.config.head_cuts import require_layer_cuts
from quire.config.kv_cache_dtype import resolve_cache_dtype
from quire.config.media import resolve_media
from quire.config.media_encoder import (
    resolve_encoder_rows,
    resolve_media_encoder,
    resolve_source_len,
)
from quire.config.memory.captured_steps import max_captured_tokens
from quire.config.memory.host_memory import with_host_tier
from quire.config.memory.kv_memory import (
    DEFAULT_MAX_LEN,
    fit_max_model_len,
    may_reduce_max_model_len,
)
from quire.config.memory.memory_plan import GIB, EngineShape, MemoryPlan, gib, require_memory
from quire.config.options import Options
from quire.config.parallel import (
    resolve_context_parallel_size,
    resolve_data_parallel_ranks,
    resolve_parallel,
    resolve_recorder,
    resolve_tensor_parallel_size,
)
from quire.config.pooling import ModelUse, choose_model_use, resolve_pooling
from quire.config.quant.read import reconcile_quantization
from quire.config.recurrent import check_recurrent, resolve_states
from quire.config.speculation import bound_drafts, resolve_speculation
from quire.config.stages import plan_tightest_stage, resolve_stage_layers
from quire.config.structured_outputs import resolve_structured
from quire.errors import ConfigError

log = logging.getLogger(__name__)

BLOCK_SIZE = 16
SERVER_INTER_TOKEN_S = 0.04
LONG_PREFILL_SHARE = 0.04
MAX_STAGED_TOKENS = 4096
"""Of a step over pipeline stages: more fill a GPU no better, and the stages later."""
QUEUED_REQUESTS = 4096
QUEUED_TOKENS = 4 << 20
POOLED_FACTOR = 16
"""Of both in a model that only pools: a request for embeddings or scores has thousands of texts."""
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Field of generation_config.json -> field of SamplingParams."""


class ResolvedConfig(NamedTuple):
    """A config, its memory plan, and the decisions with their reasons."""

    config: EngineConfig
    plan: MemoryPlan
    decisions: tuple[Decision, ...]


def resolve(
    options: Options, model: ModelFacts, device: DeviceFacts, *, server: bool = False
) -> ResolvedConfig:
    """Resolve everything. `server`: many small requests are expected rather than one big batch.

    Raises ConfigError for invalid options, NoRoom if memory does not suffice.
    """
    why = DecisionLog([])
    plan = resolve_memory_plan(options, model, device, server=server, why=why)
    require_memory(plan)
    if plan.max_fitting_len < plan.shape.max_model_len:
        log.warning(
            "num_gpu_blocks_override=%d holds sequences of %d tokens; longer ones will be refused",
            plan.num_blocks,
            plan.max_fitting_len,
        )
    generates, pooling = resolve_pooling(
        options.pooling,
        model.pooling,
        name=options.model.model,
        hidden=model.hidden,
        vocab=model.vocab,
        max_model_len=plan.shape.max_model_len,
        why=why,
    )
    config = EngineConfig(
        model=resolve_model(options, model, plan),
        cache=resolve_cache(options, plan, why, pooling=None if generates else pooling),
        scheduler=resolve_scheduler(
            options, plan.shape, device, why, server=server, generates=generates
        ),
        load=LoadSection(
            format=options.load.load_format,
            download_dir=options.load.download_dir,
            hf_token=options.model.hf_token,
            progress=options.load.use_tqdm_on_load,
        ),
        device=DeviceSection(
            kind=device.kind,
            attention_backend=options.device.attention_backend or "auto",
            threads=device.threads,
            enforce_eager=options.device.enforce_eager,
            captured_tokens=max_captured_tokens(model, plan.shape.tensor),
            capability=device.capability,
        ),
        parallel=resolve_parallel(options, model, plan.shape, why, server=server),
        adapters=resolve_adapters(
            options.lora,
            plan.shape,
            why,
            served_names=options.model.served_model_name or (options.model.model,),
        ),
        encoder=resolve_encoder(model, plan.shape),
        media_encoder=resolve_media_encoder(options, model, plan.shape),
        media=resolve_media(options.media, model.media),
        generates=generates,
        pooling=pooling,
        sampling=resolve_sampling(options, model, why),
        structured=resolve_structured(options, why),
        speculation=resolve_speculation(
            options.speculation, model, plan.shape, why, generates=generates
        ),
        recovery=RecoverySection(wait_s=options.recovery.engine_restart_wait),
        health=HealthSection(
            canary_s=options.health.canary_interval,
            recorder=resolve_recorder(options, plan.shape, why),
            recorder_bytes=options.health.flight_recorder_size,
        ),
        observe=ObserveSection(
            log_stats=not options.observe.disable_log_stats,
            log_level=options.observe.log_level,
            profile=options.observe.profile,
            profile_skip=options.observe.profile_skip,
            profile_steps=options.observe.profile_steps,
        ),
    )
    return ResolvedConfig(config, plan, tuple(why.decisions))


def resolve_memory_plan(
    options: Options, model: ModelFacts, device: DeviceFacts, *, server: bool, why: DecisionLog
) -> MemoryPlan:
    """Resolve what memory depends on, and plan the memory. Raises ConfigError.

    It does not raise NoRoom: the caller calls require_memory().
    """
    check_recurrent(options, model)
    model = _without_windows(options, model, why)
    require_layer_cuts(model.heads, model.layers, options.parallel.tensor_parallel_size)
    if options.model.logits_processors and _model_use(options, model).runner == "pooling":
        raise ConfigError("logits_processors: this model pools, so it has no logits to change")
    dtype = resolve_dtype(options, model, device, why)
    asked_len = resolve_max_len(options, model, why)
    balance = resolve_expert_balance(options, model.experts)
    context = resolve_context_parallel_size(options, model)
    shape = EngineShape(
        dtype=dtype,
        cache_dtype=resolve_cache_dtype(options, model, device, dtype, why),
        block_size=context * resolve_block_size(options, why),
        max_model_len=asked_len or model.max_len or DEFAULT_MAX_LEN,
        max_num_batched_tokens=1,
        max_num_seqs=resolve_max_num_seqs(options, device, server, why),
        tensor=resolve_tensor_parallel_size(options, device),
        context=context,
        whole_experts=options.parallel.enable_expert_parallel and model.experts > 0,
        redundant_experts=None if balance is None else balance.redundant,
        data=resolve_data_parallel_ranks(options, device),
        hybrid=not options.cache.disable_hybrid_kv_cache_manager,
        device=device.kind,
        quantization=resolve_quantization(options, model, why),
        chunked_prefill=bool(model.layers or model.states)
        and options.scheduler.enable_chunked_prefill is not False,
        max_encoder_len=resolve_source_len(options, model, why),
        has_logits=_model_use(options, model).has_logits,
        has_fp8=device.has_fp8,
        max_drafts=bound_drafts(options.speculation),
    )
    shape = resolve_adapter_slots(options.lora, model, shape, device, why)
    shape = replace(
        shape,
        max_num_batched_tokens=resolve_max_num_batched_tokens(options, device, shape, server, why),
    )
    shape = replace(shape, stage_layers=resolve_stage_layers(options, model, shape))
    shape = resolve_states(options, model, shape, device, why)
    shape = resolve_encoder_rows(options, model, shape, why)
    plan, stage_block_bytes = plan_tightest_stage(options, model, device, shape, why)
    if asked_len is None or may_reduce_max_model_len(options, device, plan):
        plan = fit_max_model_len(plan, model, why)
    return with_host_tier(options.cache, plan, stage_block_bytes, device, why)


def resolve_quantization(options: Options, model: ModelFacts, why: DecisionLog) -> str | None:
    """Resolve the quantization of linear layers: as requested, or as in the checkpoint."""
    found = reconcile_quantization(
        model.quantization, options.model.quantization, len(model.layers)
    )
    if found is None:
        return None
    reason = "the checkpoint's" if found.is_stored else "requested"
    return str(why.record("model.quantization", found.quant_method, reason))


def _without_windows(options: Options, model: ModelFacts, why: DecisionLog) -> ModelFacts:
    """If requested, return facts without windows, the context cut to the smallest window."""
    if options.model.disable_sliding_window and model.pooling.bidirectional:
        raise ConfigError("disable_sliding_window is not supported for encoders: leave it out")
    windows = [layer.window for layer in model.layers if layer.window is not None]
    if not options.model.disable_sliding_window or not windows:
        return model
    length = min([*windows, model.max_len or min(windows)])
    why.record("scheduler.max_model_len", length, "disable_sliding_window cuts it to the window")
    layers = tuple(replace(one, window=None) for one in model.layers)
    return replace(model, layers=layers, max_len=length)


def resolve_dtype(
    options: Options, model: ModelFacts, device: DeviceFacts, why: DecisionLog
) -> str:
    """Resolve the dtype of weights and activations."""
    requested = DTYPE_ALIASES.get(options.model.dtype, options.model.dtype)
    if requested == "float16" and not model.fits_float16:
        raise ConfigError(
            f"dtype float16: activations of {model.model_type} models overflow in it; use bfloat16 "
            "or float32 (auto chooses)"
        )
    if requested != "auto":
        slow = requested == "float16" and device.kind == "cpu"
        reason = "requested" + ("; bfloat16 is much faster on a CPU" if slow else "")
        return str(why.record("model.dtype", requested, reason))
    found = model.dtype or "float32"
    if found == "float16" and device.kind == "cpu":
        return str(
            why.record("model.dtype", "bfloat16", "float16 checkpoint; CPUs are fast in bfloat16")
        )
    if found == "float16" and not model.fits_float16:
        reason = f"float16 checkpoint; activations of {model.model_type} models overflow in float16"
        return str(why.record("model.dtype", "bfloat16", reason))
    if found == "float32" and device.kind != "cpu":
        return str(why.record("model.dtype", "bfloat16", "float32 checkpoint on a GPU"))
    if found not in ("float16", "bfloat16", "float32"):
        return str(
            why.record("model.dtype", "bfloat16", f"the checkpoint's {found} is for storage")
        )
    reason = "the checkpoint's" if model.dtype else "config.json states no dtype"
    return str(why.record("model.dtype", found, reason))


def resolve_max_len(options: Options, model: ModelFacts, why: DecisionLog) -> int | None:
    """Resolve the longest sequence; None: the longest that fits."""
    requested = options.model.max_model_len
    if requested in ("auto", -1):
        return None
    if requested is None:
        if model.max_len is None:
            reason = "the model states no length"
            return int(why.record("scheduler.max_model_len", DEFAULT_MAX_LEN, reason))
        stated = _stated_input_len(options, model)
        if stated is not None and stated < model.max_len:
            reason = "max_seq_length in the files of sentence-transformers"
            return int(why.record("scheduler.max_model_len", stated, reason))
        return int(why.record("scheduler.max_model_len", model.max_len, "the model's"))
    assert isinstance(requested, int), requested
    if requested < 1:
        raise ConfigError(f'max_model_len must be >= 1, "auto" or None, got {requested}')
    if model.max_len is not None and requested > model.max_len:
        raise ConfigError(
            f"max_model_len={requested} exceeds the limit of {model.name} ({model.max_len}); to "
            f'raise the limit, set hf_overrides={{"max_position_embeddings": {requested}}}'
        )
    return int(why.record("scheduler.max_model_len", requested, "requested"))


def _stated_input_len(options: Options, model: ModelFacts) -> int | None:
    """Return the length to which sentence-transformers cuts inputs; None: not stated."""
    files = model.pooling.modules
    if files is None or _model_use(options, model).runner == "generate":
        return None
    return files.max_seq_length


def _model_use(options: Options, model: ModelFacts) -> ModelUse:
    return choose_model_use(options.pooling, model.pooling, options.model.model)


def resolve_block_size(options: Options, why: DecisionLog) -> int:
    requested = options.cache.block_size
    if isinstance(requested, int):
        return int(why.record("cache.block_size", requested, "requested"))
    return int(why.record("cache.block_size", BLOCK_SIZE, "the default"))


def resolve_max_num_seqs(
    options: Options, device: DeviceFacts, server: bool, why: DecisionLog
) -> int:
    """Resolve the sequences per step."""
    requested = options.scheduler.max_num_seqs
    if requested is not None:
        return int(why.record("scheduler.max_num_seqs", requested, "requested"))
    if device.kind == "cpu":
        max_num_seqs, reason = (128, "a server on a CPU") if server else (256, "offline on a CPU")
    elif device.total_bytes >= 70 * GIB:
        max_num_seqs, reason = 1024, f"a device of {gib(device.total_bytes)}"
    else:
        max_num_seqs, reason = 256, f"a device of {gib(device.total_bytes)}"
    return int(why.record("scheduler.max_num_seqs", max_num_seqs, reason))


def resolve_max_num_batched_tokens(
    options: Options, device: DeviceFacts, shape: EngineShape, server: bool, why: DecisionLog
) -> int:
    """Resolve the tokens per step."""
    requested = options.scheduler.max_num_batched_tokens
    whole = not shape.chunked_prefill
    if requested is not None:
        if whole and requested < shape.max_model_len:
            raise ConfigError(
                f"without chunked prefill (a model without KV has none) a prompt is one step: "
                f"max_num_batched_tokens must be >= max_model_len ({shape.max_model_len}), "
                f"got {requested}"
            )
        return int(why.record("scheduler.max_num_batched_tokens", requested, "requested"))
    tokens, reason = _default_max_num_batched_tokens(device, server)
    if options.parallel.pipeline_parallel_size > 1 and tokens > MAX_STAGED_TOKENS:
        tokens, reason = MAX_STAGED_TOKENS, "each stage waits for the one before at the first step"
    if whole and tokens < shape.max_model_len:
        tokens, reason = shape.max_model_len, "no chunked prefill: the longest prompt in one step"
    most = shape.max_num_seqs * shape.max_model_len
    if tokens > most:
        tokens, reason = most, "max_num_seqs * max_model_len"
    return int(why.record("scheduler.max_num_batched_tokens", tokens, reason))


def _default_max_num_batched_tokens(device: DeviceFacts, server: bool) -> tuple[int, str]:
    place = "server" if server else "offline"
    if device.kind == "cpu":
        return (2048 if server else 4096), f"{place} on a CPU"
    reason = f"{place}, a device of {gib(device.total_bytes)}"
    if device.total_bytes >= 160 * GIB:
        return 16384, reason
    if device.total_bytes >= 70 * GIB:
        return (8192 if server else 16384), reason
    return (2048 if server else 8192), reason


def resolve_cache(
    options: Options, plan: MemoryPlan, why: DecisionLog, *, pooling: PoolingSection | None
) -> CacheSection:
    """pooling: of a model that does nothing else."""
    requested = options.cache.enable_prefix_caching
    prefix = True if requested is None else requested
    reason = "the default" if requested is None else "requested"
    if plan.states and not plan.shape.chunked_prefill:
        prefix, reason = False, "states are saved between the steps of a prompt, which has one"
    elif not plan.groups and not plan.states:
        prefix, reason = False, "the model has no KV"
        _log_options_without_effect(options)
    elif pooling is not None and all(map(pooling.reads_whole_prompt, pooling.tasks)):
        prefix, reason = False, "the results need the states of all tokens"
    if requested and not prefix:
        log.info("enable_prefix_caching has no effect: %s", reason)
    why.record("cache.prefix_caching", prefix, reason)
    return CacheSection(
        block_size=plan.shape.block_size,
        num_blocks=plan.num_blocks,
        num_host_blocks=plan.num_host_blocks,
        prefix_caching=prefix,
        dtype=plan.shape.cache_dtype,
        layers=plan.layers,
        groups=plan.groups,
        block_bytes=plan.block_bytes,
        states=plan.states,
        kinds=plan.kinds,
        state_checkpoints=plan.shape.state_checkpoints,
        draft_states=plan.shape.draft_states,
        state_checkpoint_tokens=options.cache.state_checkpoint_tokens,
    )


def _log_options_without_effect(options: Options) -> None:
    """Of a model without KV."""
    cache = options.cache
    given = {
        "enable_chunked_prefill": options.scheduler.enable_chunked_prefill or None,
        "block_size": cache.block_size,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
        "cpu_kvcache_space": cache.cpu_kvcache_space or None,
    }
    for name, value in given.items():
        if value is not None:
            log.info("%s=%s has no effect: the model has no KV", name, value)


def resolve_scheduler(
    options: Options,
    shape: EngineShape,
    device: DeviceFacts,
    why: DecisionLog,
    *,
    server: bool,
    generates: bool,
) -> SchedulerSection:
    requested = options.scheduler
    factor = shape.data * (1 if generates else POOLED_FACTOR)
    return SchedulerSection(
        max_num_batched_tokens=shape.max_num_batched_tokens,
        max_num_seqs=shape.max_num_seqs,
        max_model_len=shape.max_model_len,
        chunked_prefill=shape.chunked_prefill,
        max_num_partial_prefills=requested.max_num_partial_prefills,
        max_long_partial_prefills=requested.max_long_partial_prefills,
        long_prefill_token_threshold=_resolve_long_prefill_threshold(options, shape, why),
        inter_token_target_s=_resolve_inter_token_target(options, shape, server, why),
        max_num_queued_reqs=_resolve_max_queued_requests(
            options, shape, why, server=server, factor=factor
        ),
        max_num_queued_tokens=_resolve_max_queued_tokens(
            options, shape, why, server=server, factor=factor
        ),
        policy=requested.scheduling_policy,
        steps_in_flight=_resolve_steps_in_flight(options, shape, device, why),
    )


def _resolve_max_queued_requests(
    options: Options, shape: EngineShape, why: DecisionLog, *, server: bool, factor: int
) -> int | None:
    """Resolve the maximum of requests at once; None: unlimited."""
    requested, name = options.scheduler.max_num_queued_reqs, "scheduler.max_num_queued_reqs"
    if requested is not None or not server:
        return requested or None
    most = max(8 * shape.max_num_seqs, QUEUED_REQUESTS) * factor
    return int(why.record(name, most, "a server: an unlimited queue only adds waiting"))


def _resolve_max_queued_tokens(
    options: Options, shape: EngineShape, why: DecisionLog, *, server: bool, factor: int
) -> int | None:
    """Resolve the maximum of queued prompt tokens; None: unlimited."""
    requested, name = options.scheduler.max_num_queued_tokens, "scheduler.max_num_queued_tokens"
    if requested is not None or not server:
        return requested or None
    most = max(16 * shape.max_model_len, QUEUED_TOKENS) * factor
    return int(why.record(name, most, "a server: an unlimited queue only adds waiting"))


def _resolve_long_prefill_threshold(options: Options, shape: EngineShape, why: DecisionLog) -> int:
    """Resolve the length of a long prompt. max_long_partial_prefills has no effect without it."""
    requested = options.scheduler
    if requested.long_prefill_token_threshold or not requested.max_long_partial_prefills:
        return requested.long_prefill_token_threshold
    tokens = max(1, int(shape.max_model_len * LONG_PREFILL_SHARE))
    reason = f"max_long_partial_prefills needs one: {LONG_PREFILL_SHARE:.0%} of max_model_len"
    return int(why.record("scheduler.long_prefill_token_threshold", tokens, reason))


def _resolve_inter_token_target(
    options: Options, shape: EngineShape, server: bool, why: DecisionLog
) -> float:
    """Resolve the time limit in seconds of a step with decoding rows; 0: none."""
    requested, name = options.scheduler.inter_token_target_ms, "scheduler.inter_token_target_s"
    if not shape.chunked_prefill:
        if requested:
            raise ConfigError(
                "inter_token_target_ms splits prompts over steps; enable_chunked_prefill=False "
                f"forbids; got {requested:g}: leave one of them out"
            )
        return 0.0
    if requested is not None:
        return float(why.record(name, requested / 1e3, "requested"))
    if server:
        return float(
            why.record(name, SERVER_INTER_TOKEN_S, "a server: streams wait for their next tokens")
        )
    return 0.0


def _resolve_steps_in_flight(
    options: Options, shape: EngineShape, device: DeviceFacts, why: DecisionLog
) -> int:
    """Resolve the number of steps planned before the first result is applied."""
    requested = options.scheduler
    name = "scheduler.steps_in_flight"
    if requested.steps_in_flight is not None:
        if requested.async_scheduling is False and requested.steps_in_flight > 1:
            message = "async_scheduling=False means steps_in_flight=1"
            raise ConfigError(f"{message}, got {requested.steps_in_flight}: give one of them")
        return int(why.record(name, requested.steps_in_flight, "requested"))
    if shape.stages > 1 and requested.async_scheduling is not False:
        return int(why.record(name, shape.stages + 1, "pipeline stages, and one that waits"))
    if requested.async_scheduling is not None:
        return int(why.record(name, 2 if requested.async_scheduling else 1, "async_scheduling"))
    if device.kind == "cpu":
        return int(why.record(name, 1, "a CPU has nothing to overlap with"))
    return int(why.record(name, 2, "the next step is planned while the GPU runs one"))


def resolve_model(options: Options, model: ModelFacts, plan: MemoryPlan) -> ModelSection:
    section, shape = options.model, plan.shape
    return ModelSection(
        name=section.model,
        model_type=model.model_type,
        tokenizer=section.tokenizer or section.model,
        tokenizer_mode=section.tokenizer_mode,
        skip_tokenizer_init=section.skip_tokenizer_init,
        trust_remote_code=section.trust_remote_code,
        dtype=shape.dtype,
        quantization=shape.quantization,
        weight_bits=round(plan.weight_bits, 2),
        seed=section.seed,
        vocab=model.vocab,
        revision=section.revision,
        tokenizer_revision=section.tokenizer_revision or section.revision,
        served_names=tuple(filter(None, section.served_model_name or ())) or (section.model,),
        chat_template=section.chat_template,
        max_logprobs=section.max_logprobs,
        logprobs_mode=section.logprobs_mode,
        logits_processors=section.logits_processors or (),
        disable_sliding_window=section.disable_sliding_window,
        prompt_embeds_width=model.embedding if section.enable_prompt_embeds else None,
    )


def resolve_encoder(model: ModelFacts, shape: EngineShape) -> EncoderSection | None:
    """Resolve the encoder's limits. A source is encoded in one step, so a step has space for it."""
    found = model.encoder
    if found is None:
        return None
    for token in (found.start_id or 0, found.forced_first or 0, *found.forced_last):
        if not 0 <= token < model.vocab:
            raise ConfigError(
                f"config.json, or generation_config.json: decoder_start_token_id, "
                f"forced_bos_token_id and forced_eos_token_id must be in [0, {model.vocab}), "
                f"got {token}"
            )
    return EncoderSection(
        max_len=shape.max_encoder_len,
        max_batched_tokens=shape.max_pass_tokens,
        speech=found.speech,
        start_id=found.start_id,
        forced_first=found.forced_first,
        forced_last=found.forced_last,
        banned=found.banned,
        banned_first=found.banned_first,
    )


def resolve_sampling(options: Options, model: ModelFacts, why: DecisionLog) -> SamplingSection:
    """Resolve sampling defaults: fields of generation_config.json that SamplingParams has."""
    known = [*SAMPLING_KEYS, "eos_token_id"]
    for key in options.model.override_generation_config:
        if key not in known:
            names = ", ".join(known)
            log.warning("override_generation_config: %r has no effect; allowed are %s", key, names)
    given = model.generation
    defaults = {
        SAMPLING_KEYS[key]: given[key] for key in SAMPLING_KEYS if given.get(key) is not None
    }
    if defaults:
        why.record("sampling.defaults", defaults, "the generation config")
    return SamplingSection(defaults=defaults, eos_ids=model.eos_ids)
