"""Parallelism: resolves the options of several devices."""

from __future__ import annotations

from typing import Literal

from quire.config.decisions import DecisionLog
from quire.config.engine_config import ExpertPlacement, ParallelSection
from quire.config.expert_balance import resolve_expert_balance
from quire.config.facts import DeviceFacts, ModelFacts
from quire.config.memory.memory_plan import EngineShape
from quire.config.options import Options
from quire.errors import ConfigError


def resolve_tensor_parallel_size(options: Options, device: DeviceFacts) -> int:
    """Raises ConfigError if there are fewer devices than ranks."""
    section = options.parallel
    ranks = section.tensor_parallel_size * section.pipeline_parallel_size
    needed = ranks // section.nnodes
    placed = section.distributed_executor_backend == "ray"  # on nodes that are not known here
    if needed > device.count and not placed:
        sizes = f"tensor_parallel_size={section.tensor_parallel_size}"
        if section.pipeline_parallel_size > 1:
            sizes += f" x pipeline_parallel_size={section.pipeline_parallel_size}"
        each = " each" if section.nnodes > 1 else ""
        if each:
            sizes += f" on nnodes={section.nnodes}"
        message = f"{sizes} needs {needed} devices{each}; this engine can use"
        hint = "" if device.kind == "cpu" else " (CUDA_VISIBLE_DEVICES may hide others)"
        raise ConfigError(f"{message} {device.count}{hint}")
    return section.tensor_parallel_size


def resolve_data_parallel_ranks(options: Options, device: DeviceFacts) -> int:
    """Return the data-parallel ranks of one engine: they have requests of their own, and share
    experts. 1 without expert parallelism: data_parallel_size is then the number of engines.

    Raises ConfigError.
    """
    section = options.parallel
    if not section.enable_expert_parallel or section.data_parallel_size == 1:
        return 1
    both = f"data_parallel_size={section.data_parallel_size} with enable_expert_parallel"
    if section.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            f"{both} and distributed_executor_backend='external_launcher': one scheduler plans "
            "for all ranks, so it needs 'mp'"
        )
    if options.lora.enable_lora or options.lora.lora_modules:
        raise ConfigError(
            f"{both} serves no adapters; leave enable_lora out, or enable_expert_parallel"
        )
    each = section.tensor_parallel_size * section.pipeline_parallel_size
    ranks = each * section.data_parallel_size
    if ranks > device.count:
        raise ConfigError(
            f"{both} needs {ranks} devices, {each} each; this engine can use {device.count}"
        )
    return section.data_parallel_size


def resolve_context_parallel_size(options: Options, model: ModelFacts) -> int:
    """Return over how many ranks the tokens of every sequence are spread. Raises ConfigError."""
    section = options.parallel
    size, tensor = section.decode_context_parallel_size, section.tensor_parallel_size
    if size == 1:
        return 1
    name = f"decode_context_parallel_size={size}"
    if not model.layers:
        raise ConfigError(f"{name}: {model.model_type} has no KV cache; leave it out")
    if model.encoder is not None:
        raise ConfigError(f"{name}: models with cross attention are not supported; leave it out")
    if model.drafter is not None:
        raise ConfigError(f"{name}: drafters with weights are not supported; use ngram or suffix")
    if options.device.attention_backend not in (None, "auto", "paged", "mla"):
        backend = options.device.attention_backend
        raise ConfigError(f"{name} and attention_backend={backend!r}: leave the backend on 'auto'")
    if section.enable_expert_parallel and section.data_parallel_size > 1:
        raise ConfigError(
            f"{name} and data_parallel_size={section.data_parallel_size} with "
            "enable_expert_parallel: a data-parallel rank has all tokens of its sequences; leave "
            "one of the two out"
        )
    for layer in model.layers:
        copies = tensor // layer.kv_heads
        if tensor % layer.kv_heads or copies % size:
            fit = [str(n) for n in range(2, copies + 1) if not copies % n]
            advice = f"use {', '.join(fit)}" if fit else "leave it out"
            raise ConfigError(
                f"{name}: with tensor_parallel_size={tensor} each of {layer.kv_heads} KV heads is "
                f"on {max(copies, 1)} ranks, which it must divide; {advice}"
            )
        if layer.window is not None and layer.window % size:
            raise ConfigError(
                f"{name} must divide the sliding windows of this model ({layer.window} tokens)"
            )
    if model.heads % tensor:
        raise ConfigError(
            f"{name}: tensor_parallel_size={tensor} must divide the {model.heads} attention heads"
        )
    return size


def resolve_recorder(options: Options, shape: EngineShape, why: DecisionLog) -> bool:
    """Return whether steps are recorded."""
    if options.health.flight_recorder and shape.data > 1:
        reason = "a recording does not contain the ranks of sequences"
        return bool(why.record("health.recorder", False, reason))
    return options.health.flight_recorder


def _resolve_expert_placement(
    options: Options, model: ModelFacts, ranks: int, why: DecisionLog
) -> ExpertPlacement | None:
    """Return which of the experts each rank has; None: slices of all. Raises ConfigError.

    ranks: those that share the experts.
    """
    section = options.parallel
    if not section.enable_expert_parallel:
        return None
    if not model.top_k:
        raise ConfigError(
            f"enable_expert_parallel: {model.model_type} has no experts to spread over ranks; "
            "leave it out"
        )
    if ranks > model.experts:
        raise ConfigError(
            f"enable_expert_parallel: {ranks} ranks share {model.experts} experts, so some would "
            f"have none; use at most {model.experts} ranks, or leave it out"
        )
    if ranks == 1:
        why.record("parallel.expert_placement", None, "one rank has all experts")
        return None
    return section.expert_placement_strategy


def resolve_parallel(
    options: Options, model: ModelFacts, shape: EngineShape, why: DecisionLog, *, server: bool
) -> ParallelSection:
    """Resolve how ranks run. Raises ConfigError."""
    experts = _resolve_expert_placement(options, model, shape.tensor * shape.data, why)
    section = options.parallel
    engines = section.num_engines
    backend = section.distributed_executor_backend
    if backend == "uni" and shape.ranks > 1:
        raise ConfigError(
            f"distributed_executor_backend='uni' is one rank, and "
            f"tensor_parallel_size={shape.tensor} x pipeline_parallel_size={shape.stages} x "
            f"data_parallel_size={shape.data}: use 'mp'"
        )
    if backend == "external_launcher" and shape.stages > 1:
        raise ConfigError(
            "distributed_executor_backend='external_launcher' and pipeline_parallel_size="
            f"{shape.stages}: programs that torchrun starts have no pipeline stages; use 'mp'"
        )
    if backend == "external_launcher" and engines > 1:
        raise ConfigError(
            f"data_parallel_size={engines} cannot be combined with "
            "distributed_executor_backend='external_launcher': use 'mp'"
        )
    if backend == "external_launcher" and server:
        raise ConfigError(
            "distributed_executor_backend='external_launcher' is for LLM() in programs that "
            "torchrun starts, where all ranks make the same calls; a server uses 'mp'"
        )
    _check_nodes(options, shape)
    kind: Literal["mp", "uni", "external_launcher"] = "mp" if shape.ranks > 1 else "uni"
    return ParallelSection(
        tensor=shape.tensor,
        context=shape.context,
        stage_layers=shape.stage_layers,
        data=shape.data,
        expert_placement=experts,
        expert_balance=resolve_expert_balance(options, model.experts),
        engines=engines,
        nodes=section.nnodes,
        backend="external_launcher" if backend == "external_launcher" else kind,
        step_limit_s=section.rank_timeout_seconds,
        custom_all_reduce=not section.disable_custom_all_reduce,
    )


def _check_nodes(options: Options, shape: EngineShape) -> None:
    """Raise ConfigError for options of several machines that do not fit together."""
    section = options.parallel
    nodes, node = section.nnodes, section.node_rank
    if nodes == 1:
        if node:
            raise ConfigError(f"node_rank={node} needs nnodes > {node}: the number of machines")
        return
    if node:
        raise ConfigError(
            f"node_rank={node}: only node 0 has an engine; on the others run `quire serve MODEL "
            f"--headless --nnodes {nodes} --node-rank {node} --master-addr ADDRESS`"
        )
    backend = section.distributed_executor_backend
    if backend not in (None, "mp"):
        raise ConfigError(
            f"nnodes={nodes} and distributed_executor_backend={backend!r}: machines that run the "
            "same command each are joined by 'mp'; leave one of the two out"
        )
    if section.data_parallel_size > 1:
        raise ConfigError(
            f"nnodes={nodes} and data_parallel_size={section.data_parallel_size}: ranks of several "
            "engines are not spread over machines; leave nnodes out, and give each machine engines "
            "of its own"
        )
    if shape.ranks % nodes:
        raise ConfigError(
            f"tensor_parallel_size={shape.tensor} x pipeline_parallel_size={shape.stages} is "
            f"{shape.ranks} ranks, which nnodes={nodes} machines cannot share evenly"
        )
