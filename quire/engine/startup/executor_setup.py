"""Executor set-up: builds KV tensors, attention backend, sampler and worker around a model.

quire.engine.build decides on the device and on the memory, and a rank process on its rank.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quire.attention import context_parallel
from quire.attention.base import Backend
from quire.attention.select import BackendRequirements, backend_registry, select_backend
from quire.config.engine_config import EngineConfig, StartupAdapter
from quire.config.memory.kv_format import KV_FORMATS
from quire.config.memory.kv_layout import place_layers
from quire.config.stages import stage_cache, stage_layers
from quire.distributed.collectives import Collectives, ProcessGroupCollectives
from quire.distributed.mesh import Mesh
from quire.distributed.stage_link import StageLink
from quire.distributed.stage_tokens import StageTokens
from quire.engine.core.adapter_store import AdapterStore
from quire.engine.startup.drafter_setup import LoadedDrafter, build_drafter, drafts_with_weights
from quire.errors import ConfigError, RequestError
from quire.executors.base import Executor
from quire.executors.inline import Executor as Inline
from quire.kernels.formats.kv_cache import split_memory
from quire.models._adapter_targets import (
    adapted_layers,
    check_deltas,
    layers_of_stage,
    restrict_targets,
)
from quire.models.base import LanguageModel, ModelConfig
from quire.models.build import build_model, describe_adaptable
from quire.pooling.pooler import Pooler
from quire.runner import long_contexts
from quire.runner.adapters.adapted_layer import SlotSizes
from quire.runner.adapters.banks import AdapterBanks
from quire.runner.cpu.tape_cache import tape_rows
from quire.runner.device_worker import DeviceWorker
from quire.runner.expert_steps import ExpertSteps
from quire.runner.kv_tensors import allocate_kv_tensors
from quire.runner.long_contexts import attach_long_contexts
from quire.runner.media.media_rows import attach_media_rows
from quire.runner.model_input import ModelInputBuilder
from quire.runner.model_runner import ModelRunner
from quire.runner.parts.alignment import attach_alignment
from quire.runner.shared_prefixes import LEAST_ROWS, attach_shared_prefixes
from quire.runner.slots import TableShape
from quire.runner.state_tensors import StateTensors, attach_states
from quire.sampling.constrained_sequence import GrammarLookup
from quire.sampling.processors import LogitsProcessor
from quire.sampling.sampler import Sampler
from quire.weights.adapters.adapter import Adapter, AdapterLimits
from quire.weights.adapters.modules import AdapterModules
from quire.weights.adapters.packed import pack_adapter, pinned_bytes
from quire.weights.adapters.read import read_adapter

log = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_model(
    model_type: str,
    model_config: ModelConfig,
    folder: Path,
    config: EngineConfig,
    device: torch.device,
    mesh: Mesh = Mesh(),  # noqa: B008 - an immutable value
    comm: Collectives | None = None,
) -> LanguageModel:
    """Load the model of a folder, or one rank's share of it, with banks for adapters."""
    balance = config.parallel.expert_balance
    model = build_model(
        model_type,
        replace(model_config, max_len=config.scheduler.max_model_len),
        folder=folder,
        load_format=config.load.format,
        dtype=DTYPES[config.model.dtype],
        device=device,
        mesh=mesh,
        comm=comm,
        experts=config.parallel.expert_placement,
        redundant_experts=None if balance is None else balance.redundant,
        quant=config.model.quantization,
        stage=stage_layers(config.parallel, mesh.pp_rank),
        groups=stage_cache(config.cache, config.parallel, mesh.pp_rank).groups,
        progress=config.load.progress and not mesh.rank,
        seed=config.model.seed,
    )
    attach_model_states(model, config, device, mesh.pp_rank)
    if config.media_encoder is not None:
        attach_media_rows(
            model, config.media_encoder.cache_rows, DTYPES[config.model.dtype], device
        )
    shape = table_shape(config)
    if shape.shares_prefixes:
        group = max(model_config.heads // model_config.kv_heads, 1)
        attach_shared_prefixes(model, shape.max_seqs, shape.block_size, group, device)
    if shape.divides_keys:
        attach_long_contexts(model)
    if config.aligns_sources and config.encoder is not None and config.encoder.speech is not None:
        speech = config.encoder.speech
        attach_alignment(model, speech.alignment_heads, speech.alignment_width)
    if config.adapters is not None:
        scheduler, section = config.scheduler, config.adapters
        assert isinstance(model, nn.Module)
        names = adapted_layers(find_adapter_modules(model_type, model_config, folder, config))
        AdapterBanks(
            model,
            names if mesh.pp == 1 else layers_of_stage(model, names, first=not mesh.pp_rank),
            sizes=SlotSizes(
                section.max_adapters,
                section.max_rank,
                section.max_replaced_tokens,
                DTYPES[config.model.dtype],
                device,
            ),
            max_tokens=max(
                scheduler.max_num_batched_tokens,
                tape_rows(
                    scheduler.max_num_seqs,
                    config.speculation.max_drafts,
                    scheduler.max_num_batched_tokens,
                ),
                0 if config.encoder is None else config.encoder.max_batched_tokens,
            ),
            max_seqs=scheduler.max_num_seqs,
        )
    return model


def attach_model_states(
    model: LanguageModel, config: EngineConfig, device: torch.device, stage: int = 0
) -> None:
    """Allocate the states of a pipeline stage's recurrent layers, if the model has any."""
    cache, slots = config.cache, config.scheduler.max_num_seqs
    if cache.states:
        dtype, own = DTYPES[config.model.dtype], stage_cache(cache, config.parallel, stage)
        checkpoints = cache.state_checkpoints + cache.draft_states
        made = StateTensors(own.states, slots, checkpoints, dtype, device)
        attach_states(model, made)


def find_adapter_modules(
    model_type: str, model_config: ModelConfig, folder: Path, config: EngineConfig
) -> AdapterModules:
    """Return what adapters can change in the engine's model. Raises ConfigError."""
    assert config.adapters is not None
    _, found = describe_adaptable(model_type, model_config, folder, config.load.format)
    return restrict_targets(found, config.adapters.target_modules, config.adapters.experts)


def build_adapter_store(
    model_type: str, model_config: ModelConfig, folder: Path, config: EngineConfig
) -> AdapterStore | None:
    """Build what holds adapters in host memory; None: adapters are off. folder: the model's."""
    if config.adapters is None:
        return None
    section = config.adapters
    modules = find_adapter_modules(model_type, model_config, folder, config)
    dtype, limits = DTYPES[config.model.dtype], AdapterLimits(max_rank=section.max_rank)

    allocate = pinned_bytes if _packs(config) else None

    def read(folder: Path) -> Adapter:
        adapter = read_adapter(folder, modules, dtype, limits, allocate)
        check_deltas(adapter, modules, section, dtype.itemsize, config.parallel.tensor)
        more = _differences(adapter, folder, config.model.name)
        return replace(adapter, warnings=(*adapter.warnings, *more))

    return AdapterStore(read, section.max_host)


def _differences(adapter: Adapter, folder: Path, model: str) -> Iterator[str]:
    """Yield what may make an adapter's answers differ from those of its training."""
    base = adapter.base_model
    if base and Path(base).name.lower() != Path(model).name.lower():
        yield f"its config names the model {base!r:.200}, and this one is {model!r}"
    if (folder / "added_tokens.json").is_file():
        yield "its added_tokens.json has no effect: the tokenizer is the model's"


def pack_for(config: EngineConfig, adapter: Adapter) -> Adapter:
    """Return an adapter that was scaled as loads of slots read it."""
    return pack_adapter(adapter, pinned_bytes) if _packs(config) else adapter


def _packs(config: EngineConfig) -> bool:
    """Whether loads of slots read an adapter from pinned memory: by a GPU of this process."""
    return config.device.kind == "cuda" and config.parallel.ranks == 1


def register_modules(store: AdapterStore, modules: Sequence[StartupAdapter]) -> None:
    """Load the adapters of the start. Raises ConfigError, which names the adapter."""
    for one in modules:
        try:
            store.register(one.name, one.path, one.base_model_name)
        except RequestError as error:
            raise ConfigError(f"lora_modules: {one.name}: {error}") from error


def link_stages(
    model_config: ModelConfig,
    config: EngineConfig,
    device: torch.device,
    mesh: Mesh,
    comm: Collectives | None,
) -> StageLink:
    """Return a rank's connection to other pipeline stages."""
    return StageLink(mesh, comm, model_config.hidden, DTYPES[config.model.dtype], device)


def load_pooler(
    model: LanguageModel,
    folder: Path | None,
    config: EngineConfig,
    device: torch.device,
    link: StageLink | None = None,
) -> Pooler | None:
    """Load what pools a model's hidden states; None: the rank pools nothing.

    folder: of Dense layers. Raises ConfigError, WeightError.
    """
    if config.pooling is None or (link is not None and not link.is_last):
        return None
    return Pooler(
        config.pooling,
        model,
        None if config.load.format == "dummy" else folder,
        dtype=DTYPES[config.model.dtype],
        device=device,
        max_seqs=config.scheduler.max_num_seqs,
        seed=config.model.seed,
    )


def build_executor(
    model: LanguageModel,
    config: EngineConfig,
    processors: Sequence[LogitsProcessor] = (),
    grammars: GrammarLookup | None = None,
    pooler: Pooler | None = None,
    device: torch.device | None = None,
    drafter: LoadedDrafter | None = None,
) -> Executor:
    """Build an executor of one rank in this process. device: see build_runner()."""
    runner = build_runner(model, config, processors, grammars, pooler, device, drafter)
    return build_inline_executor(config, runner, ModelInputBuilder(table_shape(config)))


def build_inline_executor(
    config: EngineConfig, runner: ModelRunner, inputs: ModelInputBuilder
) -> Inline:
    """Build the executor of a runner in this process."""
    threaded = config.device.kind == "cpu" and config.scheduler.steps_in_flight > 1
    return Inline(inputs, runner, threaded=threaded)


def table_shape(config: EngineConfig) -> TableShape:
    """Return the sizes of the block tables of this engine's ranks."""
    cache, scheduler = config.cache, config.scheduler
    longest = scheduler.max_model_len
    if config.encoder is not None:
        longest = max(longest, config.encoder.max_len)
    return TableShape(
        scheduler.max_num_seqs,
        -(-longest // cache.block_size),
        len([group for group in cache.groups if not group.cross]),
        cache.block_size,
        has_cross=config.encoder is not None,
        has_rotary=config.media_encoder is not None,
        drafts=config.speculation.max_drafts if drafts_with_weights(config.speculation) else 0,
        synthetic=config.speculation.synthetic_rates,
        shares_prefixes=_shares_prefixes(config),
        divides_keys=_divides_keys(config),
    )


def _shares_prefixes(config: EngineConfig) -> bool:
    """Whether leading blocks of several rows are read once: on GPUs, by the backend `paged`, of
    models whose layers all see the whole context."""
    return (
        _attends_by_pages(config)
        and config.scheduler.max_num_seqs >= LEAST_ROWS
        and len(config.cache.groups) == 1
        and not any(one.window for one in config.cache.layers)
    )


def _divides_keys(config: EngineConfig) -> bool:
    """Whether keys of long contexts are divided evenly: not in float32, where a result must not
    depend on other rows."""
    return (
        _attends_by_pages(config)
        and config.model.dtype != "float32"
        and config.scheduler.max_model_len >= long_contexts.LONG_CONTEXT
    )


def _attends_by_pages(config: EngineConfig) -> bool:
    """Whether a step's attention is that of the backend `paged` on a GPU, which has variants."""
    layers, wanted = config.cache.layers, config.device.attention_backend
    return (
        config.device.kind == "cuda"
        and config.generates
        and config.parallel.data == config.parallel.context == 1
        and wanted in ("auto", "paged")
        and bool(config.cache.groups)
        and not any(one.latent or one.cross for one in layers)
    )


def build_runner(
    model: LanguageModel,
    config: EngineConfig,
    processors: Sequence[LogitsProcessor] = (),
    grammars: GrammarLookup | None = None,
    pooler: Pooler | None = None,
    device: torch.device | None = None,
    drafter: LoadedDrafter | None = None,
    comm: Collectives | None = None,
    link: StageLink | None = None,
) -> ModelRunner:
    """Build one rank: KV tensors, attention backend, sampler and worker around a model.

    device: of the tensors; None: the config's. drafter: of the model; None: none has weights. comm:
    of the ranks that sample the same rows. link: to other pipeline stages; None: there are none.
    """
    if link is not None:
        own = stage_cache(config.cache, config.parallel, link.stage)
        config = replace(config, cache=own)
    cache, scheduler = config.cache, config.scheduler
    device = device or torch.device(config.device.kind)
    tensors, host = (
        allocate_kv_tensors(
            cache.layers,
            cache.groups,
            num_blocks=num_blocks,
            block_size=cache.block_size // config.parallel.context,
            form=KV_FORMATS[cache.dtype],
            device=where,
            pinned=device.type == "cuda",
        )
        for num_blocks, where in ((cache.num_blocks, device), (cache.num_host_blocks, None))
    )
    sampler = Sampler(
        config.model.vocab,
        scheduler.max_num_seqs,
        device,
        logprobs_mode=config.model.logprobs_mode,
        processors=processors,
        grammars=grammars,
        comm=comm,
        mesh=Mesh() if link is None else link.mesh,
    )
    backend = _build_backend(config, tensors)
    if isinstance(comm, ProcessGroupCollectives) and comm.context_exchange is not None:
        backend = cast("Backend", context_parallel.Backend(backend, comm.context_exchange))
    further: dict[str, Any] = {}
    if link is not None and not link.is_alone:
        further["link"] = link
    if drafter is not None:
        further["drafter"] = build_drafter(drafter, config, backend, device)
    experts = None
    if isinstance(comm, ProcessGroupCollectives) and comm.dp_exchange is not None:
        like = torch.empty(0, dtype=DTYPES[config.model.dtype], device=device)
        experts = ExpertSteps(model, comm.dp_exchange, like)
        further["experts"] = experts
    if config.device.kind == "cuda":
        further["captured_tokens"] = config.device.captured_tokens
    worker = _worker_class(config.device.kind)(
        model,
        backend,
        sampler,
        table_shape(config),
        cache=tensors,
        host_cache=host,
        max_tokens=scheduler.max_num_batched_tokens,
        logprobs_mode=config.model.logprobs_mode,
        eager=config.device.enforce_eager or _has_no_tapes(config),
        pooler=pooler,
        generates=config.generates,
        max_drafts=config.speculation.max_drafts,
        **further,
    )
    tokens = None
    if isinstance(comm, ProcessGroupCollectives) and comm.tokens and link is not None:
        tokens = StageTokens(link.mesh, comm.tokens, worker.last_tokens)
    return ModelRunner(model, sampler, worker, link, experts, tokens)


_WORKERS = {
    "cpu": ("quire.runner.cpu.cpu_worker", "CpuWorker"),
    "cuda": ("quire.runner.gpu.cuda_worker", "CudaWorker"),
}
"""Kind of device -> (module, class)."""


def _worker_class(kind: str) -> Callable[..., DeviceWorker]:
    """Import the worker class of a kind of device, only where there is such a device."""
    module, name = _WORKERS[kind]
    found: Callable[..., DeviceWorker] = getattr(importlib.import_module(module), name)
    return found


def _has_no_tapes(config: EngineConfig) -> bool:
    """Whether steps exchange what a tape cannot repeat, or a graph: sizes of each step's own."""
    on_cpu, section = config.device.kind == "cpu", config.parallel
    return (on_cpu and section.context > 1) or (section.data > 1 and (on_cpu or section.stages > 1))


def _build_backend(config: EngineConfig, tensors: list[torch.Tensor]) -> Backend:
    layers = config.cache.layers
    wanted = config.device.attention_backend
    needs = BackendRequirements(
        device=config.device.kind,
        dtype=DTYPES[config.model.dtype],
        head_dim=max((layer.head_dim for layer in layers), default=0),
        window=any(layer.window for layer in layers),
        latent=any(layer.latent for layer in layers),
        packed=not layers,
        coded_cache=KV_FORMATS[config.cache.dtype].itemsize == 1,
        encoder=config.encoder is not None,
        spans=config.media_encoder is not None and config.media_encoder.bidirectional,
    )
    choice = select_backend(None if wanted == "auto" else wanted, needs)
    log.debug("attention backend: %s", "; ".join(choice.reasons))
    form, made = KV_FORMATS[config.cache.dtype], backend_registry().load(choice.name).Backend
    if not form.per_token:
        return cast("Backend", made(tensors))
    places = place_layers(layers, config.cache.groups)
    block_size = config.cache.block_size // config.parallel.context
    views = [
        split_memory(memory, form, layer.head_dim, block_size)
        for memory, layer in zip(tensors, places, strict=True)
    ]
    return cast("Backend", made([codes for codes, _ in views], [scales for _, scales in views]))
