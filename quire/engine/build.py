"""The composition root: options and facts become a config, and the config becomes an engine.

The only place that knows all parts. Each part is given its section or plain values. What takes long
(importing torch's world, reading weights, loading the tokenizer) happens here, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
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
from quire.core.limits.door import Door
from quire.core.limits.grammars import GrammarLimit
from quire.core.limits.grammars import Grammars as GrammarSource
from quire.core.limits.kv_share import KvShare
from quire.core.limits.pace import Pace
from quire.core.limits.prefills import ChunkCap, LongPrefills, PartialPrefills
from quire.core.limits.seats import SeatLimit
from quire.core.limits.short_first import ShortFirst
from quire.core.limits.suspects import Suspects
from quire.core.limits.tokens import TokenBudget, WholePrompts
from quire.core.order.base import Order
from quire.core.order.fair import Fair
from quire.core.order.fifo import Fifo
from quire.core.order.priority import Priority
from quire.core.scheduler import Scheduler
from quire.core.tiers.host import HostPool
from quire.engine import gpu
from quire.engine.device import DTYPES, device_half
from quire.engine.front import Check, inputs_of, load_texts
from quire.engine.grammars import grammars_of
from quire.engine.loop import Engine
from quire.engine.receipt import Receipt, table
from quire.engine.warm import Half
from quire.executors.base import Executor
from quire.executors.profiled import Executor as Profiled
from quire.grammar import choose
from quire.kernels import cache as kernel_cache
from quire.kernels.compiler import Compilers
from quire.models.base import LanguageModel, ModelConfig
from quire.models.build import build as build_model
from quire.models.build import config_of
from quire.platform import cpu, cuda, kernel_store
from quire.runner.profile import Trace
from quire.sampling.processors import load_processors
from quire.text.inputs import InputProcessor
from quire.text.tokenizer import Tokenizer
from quire.weights.files import headers
from quire.weights.files import resolve as resolve_folder

log = logging.getLogger(__name__)

Texts = Callable[[EngineConfig, Callable[[], Path]], None]
"""Begins what has to do with text, beside the rest: given the config and how to find the folder of
the tokenizer."""


LEAST_OF_LONG = {cpu.name: 2, cuda.name: 32}
"""Tokens of a long prompt beside decoding rows at least. A GPU computes 32 as fast as one; a CPU
takes as long for each, and more the longer the context."""


@dataclass(frozen=True, slots=True)
class Bare:
    """An engine that knows tokens only."""

    engine: Engine
    config: EngineConfig
    plan: MemoryPlan
    why: tuple[Why, ...]
    checks: tuple[Check, ...]  # of sampling parameters, by the logits processors of this engine
    seconds: dict[str, float]  # what start-up was spent on, in order: quire.engine.receipt


@dataclass(frozen=True, slots=True)
class Built(Bare):
    """An engine and what its users need beside it."""

    tokenizer: Tokenizer | None
    inputs: InputProcessor


@dataclass(frozen=True, slots=True)
class Described:
    """A model found and read as far as its small files go."""

    folder: Path
    model_type: str
    config: ModelConfig
    facts: ModelFacts


def build(options: Options, *, server: bool = False) -> Built:
    """Make everything that `options` asks for. Raises ConfigError, NoRoom or WeightError."""
    with _starting(options) as receipt:
        loading: list[Future[Tokenizer | None]] = []

        def load(config: EngineConfig, folder: Callable[[], Path]) -> None:
            work = lambda: load_texts(config, None if skipped(config) else folder())  # noqa: E731
            loading.append(receipt.beside("tokenizer", work))

        bare = _build(options, receipt, server=server, texts=load)
        tokenizer = loading[0].result()
        receipt.lap("tokenizer")
        made = {one.name: getattr(bare, one.name) for one in fields(bare)}
        made["seconds"] = receipt.seconds()
        inputs = inputs_of(bare.config, tokenizer, checks=bare.checks)
        built = Built(**made, tokenizer=tokenizer, inputs=inputs)
    _say_ready(built, receipt)
    return built


def build_bare(
    options: Options, found: Callable[[EngineConfig, Path | None], None], *, server: bool = False
) -> Bare:
    """Make the engine alone. Text is another process's business: `found` is told, in a thread,
    the config so far and the folder of the tokenizer. Raises as build() does.
    """
    with _starting(options) as receipt:

        def tell(config: EngineConfig, folder: Callable[[], Path]) -> None:
            work = lambda: found(config, None if skipped(config) else folder())  # noqa: E731
            told.append(receipt.beside("tokenizer files", work))

        told: list[Future[None]] = []
        bare = _build(options, receipt, server=server, texts=tell)
        told[0].result()
        bare = replace(bare, seconds=receipt.seconds())
    _say_ready(bare, receipt)
    return bare


def skipped(config: EngineConfig) -> bool:
    """There is to be no tokenizer."""
    return config.model.skip_tokenizer_init


@contextmanager
def _starting(options: Options) -> Iterator[Receipt]:
    with Receipt() as receipt:
        if options.device.device != cpu.name:
            receipt.beside("CUDA driver", _know_gpu)
        yield receipt


def _build(options: Options, receipt: Receipt, *, server: bool, texts: Texts) -> Bare:
    environment = env.read()
    found = describe(options, environment)
    receipt.lap("model files")
    resolved = decide(found, options, environment, server=server)
    receipt.lap("config")
    bare = _assemble(found, resolved, options, environment, receipt, texts)
    for one in bare.why:
        log.debug("%s = %s: %s", one.field, one.value, one.reason)
    return bare


def _assemble(
    found: Described,
    resolved: Resolved,
    options: Options,
    environment: env.Env,
    receipt: Receipt,
    texts: Texts,
) -> Bare:
    """The parts, in the order that lets slow ones run beside each other."""
    config, plan, why = resolved
    choose.check(config.structured.backend)
    device = torch_device(config.device.kind)
    opening: list[Future[None]] = []
    compilers = None
    if device.type == cuda.name:
        compilers = _compilers(config, environment)  # first: it has much to read
        opening.append(receipt.beside("CUDA context", lambda: _open_device(device)))
        opening.append(receipt.beside("Triton", lambda: _open_triton(config, environment)))
    texts(config, lambda: _tokenizer_folder(found.folder, config, options, environment))
    held = torch.cuda.memory_allocated(device) if opening else 0
    model = _model(found, config, device)
    receipt.lap("weights")
    for one in opening:
        one.result()
    if opening:
        receipt.lap("context")
    processors = load_processors(config.model.logits_processors, config, device)

    tokenizer = lambda: _tokenizer_folder(found.folder, config, options, environment)  # noqa: E731
    grammars = None if lacks(config) else grammars_of(config, tokenizer)

    def half(config: EngineConfig) -> Half:
        return scheduler_of(config, grammars), device_half(model, config, processors, grammars)

    if device.type == cuda.name:
        started = gpu.start(half, config, plan, _room(options, held), device, receipt, compilers)
        config, plan = started.config, started.plan
        why = tuple(_measured(one, config) for one in why)
        engine = _engine(config, *started.half, check=environment.check, grammars=grammars)
    else:
        engine = _engine(config, *half(config), check=environment.check, grammars=grammars)
    receipt.lap("engine")
    checks = tuple(one.validate_params for one in processors if hasattr(one, "validate_params"))
    return Bare(engine, config, plan, why, checks, receipt.seconds())


def _measured(why: Why, config: EngineConfig) -> Why:
    """A choice that was made again when the memory of the steps was known."""
    blocks = config.cache.num_blocks
    if why.field != "cache.num_blocks" or why.value == blocks:
        return why
    return Why(why.field, blocks, f"{why.reason}, with steps as measured")


def _model(found: Described, config: EngineConfig, device: torch.device) -> LanguageModel:
    return build_model(
        found.model_type,
        replace(found.config, max_len=config.scheduler.max_model_len),
        folder=found.folder,
        load_format=config.load.format,
        dtype=DTYPES[config.model.dtype],
        device=device,
        quant=config.model.quantization,
        groups=config.cache.groups,
        progress=config.load.progress,
        seed=config.model.seed,
    )


def _room(options: Options, held: int) -> gpu.Room:
    """What was said of memory, and who holds some already. held: torch, for other engines here."""
    said = options.cache
    fixed = said.num_gpu_blocks_override is not None or said.kv_cache_memory_bytes is not None
    before = cuda.facts()
    return gpu.Room(
        held_by_others=before.total_bytes - before.free_bytes,
        held_by_torch=held,
        fixed_blocks=fixed,
        any_length=options.model.max_model_len in ("auto", -1),
    )


def _know_gpu() -> None:
    """Wake the driver, and let Triton read itself: both are needed, neither needs the options."""
    if cuda.available():
        kernel_cache.know_compiler()


def _open_device(device: torch.device) -> None:
    """The driver's second or two, beside what the interpreter does meanwhile."""
    cuda.open_context()
    torch.zeros(1, device=device)


def _open_triton(config: EngineConfig, environment: env.Env) -> None:
    import triton  # noqa: F401 - it reads much

    if environment.triton_cache is None:
        kernel_cache.keep_in(_kernel_folder(config, environment))


def _kernel_folder(config: EngineConfig, environment: env.Env) -> Path:
    if environment.triton_cache is not None:
        return environment.triton_cache
    kind, compiler = config.device.capability, version("triton")
    return kernel_store.folder_of(environment.cache_dir, compiler, kind)


def _compilers(config: EngineConfig, environment: env.Env) -> Compilers | None:
    """A process that will compile what the folder lacks, if that is all: it needs time to begin."""
    folder = _kernel_folder(config, environment)
    return Compilers(folder) if kernel_store.is_empty(folder) else None


def _say_ready(built: Bare, receipt: Receipt) -> None:
    config = built.config
    log.info(
        "%s ready in %.2f s: %d blocks of %d tokens; sequences of %d tokens, %.1f of those at once",
        config.model.name,
        receipt.total,
        config.cache.num_blocks,
        config.cache.block_size,
        config.scheduler.max_model_len,
        built.plan.concurrency,
    )
    if config.device.kind == cuda.name:
        for line in table(built.seconds, receipt.before):
            log.info("  %s", line)


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
    return Described(folder, model_type, model_config, replace(facts, layers=layers))


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


def mind(
    config: EngineConfig,
    executor: Executor,
    *,
    check: bool = False,
    grammars: GrammarSource | None = None,
) -> Engine:
    """Scheduler and engine over an executor. No device: tests give it a fake one."""
    scheduler = scheduler_of(config, grammars)
    return _engine(config, scheduler, executor, check=check, grammars=grammars)


def lacks(config: EngineConfig) -> str | None:
    """What structured output needs and this engine has not."""
    if skipped(config):
        return "a tokenizer"
    return None if config.sampling.eos_ids else "a token that ends the text"


def _engine(
    config: EngineConfig,
    scheduler: Scheduler,
    executor: Executor,
    *,
    check: bool,
    grammars: GrammarSource | None = None,
) -> Engine:
    said = config.observe
    if said.profile is not None:
        trace = Trace(Path(said.profile), skip=said.profile_skip, steps=said.profile_steps)
        executor = Profiled(executor, trace)
    depth = config.scheduler.steps_in_flight
    return Engine(scheduler, executor, steps_in_flight=depth, check=check, grammars=grammars)


def scheduler_of(config: EngineConfig, grammars: GrammarSource | None = None) -> Scheduler:
    """The deciding part of an engine, and the block pool it decides about."""
    cache, said = config.cache, config.scheduler
    missing = lacks(config) or "workers that compile grammars"
    kv = KVCache(
        BlockPool(cache.num_blocks),
        cache.block_size,
        specs_of(cache),
        prefix_caching=cache.prefix_caching,
        host=HostPool(cache.num_host_blocks),
    )
    order = Fair(Priority if said.policy == "priority" else Fifo)
    return Scheduler(
        kv,
        [
            Suspects(),
            door_of(said),
            KvShare(order, cache.num_blocks, kv.most_blocks),
            *limits_of(said, order, LEAST_OF_LONG[config.device.kind]),
            GrammarLimit(grammars, said.max_model_len, missing=missing),
        ],
        order,
        max_seqs=said.max_num_seqs,
        max_len=said.max_model_len,
        preemption=said.preemption_mode,
        steps_in_flight=said.steps_in_flight,
    )


def door_of(said: SchedulerSection) -> Door:
    """Who may come in. It is the first to be asked: a request sent away costs nothing else."""
    return Door(
        max_requests=said.max_num_queued_reqs,
        max_tokens=said.max_num_queued_tokens,
        most=said.max_num_batched_tokens,
    )


def specs_of(cache: CacheSection) -> tuple[CacheSpec, ...]:
    """One spec per layer group."""
    return tuple(Full() if g.window is None else Window(g.window) for g in cache.groups)


def limits_of(said: SchedulerSection, queue: Order, least_of_long: int) -> list[Limit]:
    """In order: each sees what those before it left of the wish. queue: who waits."""
    budget = TokenBudget(said.max_num_batched_tokens)
    limits: list[Limit] = []
    if said.long_prefill_token_threshold:
        limits.append(ChunkCap(said.long_prefill_token_threshold))
    limits += [budget, SeatLimit(said.max_num_seqs)]
    target = said.inter_token_target_s
    pace = Pace(target, least_of_long=least_of_long) if target else None
    if pace is not None:
        limits.append(pace)
    if said.chunked_prefill:
        room = lambda: budget.left if pace is None else min(budget.left, pace.room())  # noqa: E731
        limits.append(ShortFirst(queue, room))
    else:
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


def _tokenizer_folder(
    folder: Path, config: EngineConfig, options: Options, environment: env.Env
) -> Path:
    """Where the tokenizer is; it is fetched if it is not the model's own."""
    said = config.model
    if options.model.tokenizer is None and said.tokenizer_revision == said.revision:
        return folder
    return _folder(said.tokenizer, said.tokenizer_revision, options, environment)
