"""The composition root: options and facts become a config, and the config becomes an engine.

The only place that knows all parts. Each part is given its section or plain values. What takes long
(importing torch's world, reading weights, loading the tokenizer) happens here, once.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire import embedded, env
from quire.config.config import CacheSection, EngineConfig, SchedulerSection, Why
from quire.config.facts import (
    DeviceFacts,
    ModelFacts,
    read_folder,
    read_hf_config,
    tied_embeddings,
    weights_of,
)
from quire.config.options import Options
from quire.config.plan import MemoryPlan
from quire.config.resolve import Resolved, resolve
from quire.core.block_pool import BlockPool
from quire.core.cache_spec import CacheSpec, Full, Window
from quire.core.kv_cache import KVCache
from quire.core.limits.base import Limit
from quire.core.limits.prefills import ChunkCap, LongPrefills, PartialPrefills
from quire.core.limits.seats import SeatLimit
from quire.core.limits.tokens import TokenBudget, WholePrompts
from quire.core.order.fifo import Fifo
from quire.core.order.priority import Priority
from quire.core.params import SamplingParams
from quire.core.scheduler import Scheduler
from quire.core.tiers.host import HostPool
from quire.engine.device import DTYPES, device_half
from quire.engine.loop import Engine
from quire.executors.base import Executor
from quire.models.base import ModelConfig
from quire.models.build import build as build_model
from quire.models.build import config_of
from quire.platform import cpu, cuda
from quire.sampling.processors import load_processors
from quire.text.inputs import InputProcessor
from quire.text.tokenizer import Tokenizer, load_tokenizer
from quire.weights.files import headers
from quire.weights.files import resolve as resolve_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """An engine and what its users need beside it."""

    engine: Engine
    config: EngineConfig
    plan: MemoryPlan
    why: tuple[Why, ...]
    tokenizer: Tokenizer | None
    inputs: InputProcessor
    seconds: Mapping[str, float]  # what start-up was spent on, in order


@dataclass(frozen=True, slots=True)
class Described:
    """A model found and read as far as its small files go."""

    folder: Path
    model_type: str
    config: ModelConfig
    facts: ModelFacts


class _Clock:
    """Seconds per named part of start-up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._since
        self._since = now


def build(options: Options, *, server: bool = False) -> Built:
    """Make everything that `options` asks for. Raises ConfigError, NoRoom or WeightError."""
    clock = _Clock()
    environment = env.read()
    found = describe(options, environment)
    resolved = decide(found, options, environment, server=server)
    config = resolved.config
    clock.lap("config")
    tokenizer = _tokenizer(found.folder, config, options, environment)
    clock.lap("tokenizer")
    model_config = replace(found.config, max_len=config.scheduler.max_model_len)
    device = torch_device(config.device.kind)
    model = build_model(
        found.model_type,
        model_config,
        folder=found.folder,
        load_format=config.load.format,
        dtype=DTYPES[config.model.dtype],
        device=device,
        quant=config.model.quantization,
        groups=config.cache.groups,
        progress=config.load.progress,
        seed=config.model.seed,
    )
    clock.lap("weights")
    processors = load_processors(config.model.logits_processors, config, device)
    executor = device_half(model, config, processors)
    engine = mind(config, executor, check=environment.check)
    clock.lap("engine")
    inputs = InputProcessor(
        tokenizer,
        max_model_len=config.scheduler.max_model_len,
        vocab_size=config.model.vocab,
        eos_ids=config.sampling.eos_ids,
        defaults=SamplingParams(**config.sampling.defaults),
        max_logprobs=config.model.max_logprobs,
        seeds=random.Random(config.model.seed),
        checks=[one.validate_params for one in processors if hasattr(one, "validate_params")],
    )
    for one in resolved.why:
        log.debug("%s = %s: %s", one.field, one.value, one.reason)
    log.info(
        "%s ready in %.2f s: %d blocks of %d tokens; sequences of %d tokens, %.1f of those at once",
        config.model.name,
        sum(clock.seconds.values()),
        config.cache.num_blocks,
        config.cache.block_size,
        config.scheduler.max_model_len,
        resolved.plan.concurrency,
    )
    return Built(engine, config, resolved.plan, resolved.why, tokenizer, inputs, clock.seconds)


def torch_device(kind: str) -> torch.device:
    """The device of this engine's tensors: the CPU, or the first visible GPU."""
    return torch.device("cpu") if kind == cpu.name else torch.device(kind, 0)


def describe(options: Options, environment: env.Env) -> Described:
    """Find the model and read its small files. No weights are read."""
    said = options.model
    folder = _folder(said.model, said.revision, options, environment)
    config_folder = (
        folder
        if said.hf_config_path is None
        else _folder(said.hf_config_path, said.revision, options, environment)
    )
    hf = read_hf_config(config_folder, said.hf_overrides)
    model_type, model_config = config_of(hf)
    weights = None
    if options.load.load_format not in ("dummy", "pt") and any(folder.glob("*.safetensors")):
        weights = weights_of(headers(folder), tied=tied_embeddings(hf))
    facts = read_folder(
        folder,
        name=said.model,
        config_folder=config_folder,
        overrides=said.hf_overrides,
        generation_config=said.generation_config,
        override_generation_config=said.override_generation_config,
        weights=weights,
    )
    layers = model_config.attention_layers()
    stored = model_config.quantized
    facts = replace(facts, layers=layers, quantization=stored.dialect if stored else None)
    return Described(folder, model_type, model_config, facts)


def decide(
    found: Described, options: Options, environment: env.Env, *, server: bool = False
) -> Resolved:
    """Options and facts to config. Raises ConfigError, NoRoom."""
    return resolve(options, found.facts, device_facts(options, environment), server=server)


def device_facts(options: Options, environment: env.Env) -> DeviceFacts:
    """The device asked for, or the best there is, as it is now. Raises ConfigError."""
    threads = environment.num_threads or cpu.threads()
    said = options.device.device
    if said == "cuda" or (said == "auto" and cuda.available()):
        found, now = cuda.facts(), cuda.memory()
        return DeviceFacts(
            kind=cuda.name,
            total_bytes=now.total,
            free_bytes=now.free,
            name=found.name,
            threads=threads,
            capability=found.capability,
        )
    memory = cpu.memory()
    return DeviceFacts(
        kind=cpu.name, total_bytes=memory.total, free_bytes=memory.free, threads=threads
    )


def mind(config: EngineConfig, executor: Executor, *, check: bool = False) -> Engine:
    """Scheduler and engine over an executor. No device: tests give it a fake one."""
    cache, said = config.cache, config.scheduler
    kv = KVCache(
        BlockPool(cache.num_blocks),
        cache.block_size,
        specs_of(cache),
        prefix_caching=cache.prefix_caching,
        host=HostPool(cache.num_host_blocks),
    )
    scheduler = Scheduler(
        kv,
        limits_of(said),
        Priority() if said.policy == "priority" else Fifo(),
        max_seqs=said.max_num_seqs,
        max_len=said.max_model_len,
        preemption=said.preemption_mode,
        steps_in_flight=said.steps_in_flight,
    )
    return Engine(scheduler, executor, steps_in_flight=said.steps_in_flight, check=check)


def specs_of(cache: CacheSection) -> tuple[CacheSpec, ...]:
    """One spec per layer group."""
    return tuple(Full() if g.window is None else Window(g.window) for g in cache.groups)


def limits_of(said: SchedulerSection) -> list[Limit]:
    """In order: each sees what those before it left of the wish."""
    limits: list[Limit] = []
    if said.long_prefill_token_threshold:
        limits.append(ChunkCap(said.long_prefill_token_threshold))
    limits += [TokenBudget(said.max_num_batched_tokens), SeatLimit(said.max_num_seqs)]
    if not said.chunked_prefill:
        limits.append(WholePrompts(said.max_num_batched_tokens))
    if said.max_num_partial_prefills:
        limits.append(PartialPrefills(said.max_num_partial_prefills))
    if said.max_long_partial_prefills and said.long_prefill_token_threshold:
        limits.append(
            LongPrefills(said.max_long_partial_prefills, said.long_prefill_token_threshold)
        )
    return limits


def _folder(name: str, revision: str | None, options: Options, environment: env.Env) -> Path:
    if name == "embedded":
        return embedded.path()
    return resolve_folder(
        name,
        revision=revision,
        token=options.model.hf_token,
        download_dir=options.load.download_dir,
        env=environment,
    )


def _tokenizer(
    folder: Path, config: EngineConfig, options: Options, environment: env.Env
) -> Tokenizer | None:
    said = config.model
    if said.skip_tokenizer_init:
        return None
    if options.model.tokenizer is not None or said.tokenizer_revision != said.revision:
        folder = _folder(said.tokenizer, said.tokenizer_revision, options, environment)
    return load_tokenizer(folder, said.tokenizer_mode, trust_remote_code=said.trust_remote_code)
