"""Composition root: resolves options and facts to a config, and builds the engine from it.

The only module that imports all parts. Each part gets its section of the config, or plain values.
Slow work (importing torch, reading weights, loading the tokenizer) runs here, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch

from quire import env
from quire.config.advice import advise
from quire.config.data_parallel import check_one_server
from quire.config.engine_config import (
    Decision,
    EngineConfig,
)
from quire.config.memory.memory_plan import MemoryPlan
from quire.config.options import Options
from quire.config.pooling import describe_pooling
from quire.config.resolve import ResolvedConfig, resolve
from quire.core.admission.supported_tasks import SupportedTasks
from quire.core.kv.block_pool import BlockPool
from quire.core.kv.kv_cache import KVCache
from quire.core.kv.tiers.host import HostTier
from quire.core.scheduling.grammar_wait import GrammarProvider as GrammarSource
from quire.core.scheduling.grammar_wait import GrammarWait
from quire.core.scheduling.limits.adapters import AdapterLimit, AdapterProvider
from quire.core.scheduling.limits.base import by_contract
from quire.core.scheduling.limits.constrained_rank import ConstrainedRankLimit
from quire.core.scheduling.limits.isolation_limit import FaultIsolationLimit
from quire.core.scheduling.limits.tenant_kv_quota import TenantKVQuota
from quire.core.scheduling.order.fair import FairQueue
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.order.priority import Priority
from quire.core.scheduling.scheduler import Scheduler
from quire.core.snapshot import ExpertBalanceStats
from quire.distributed.collectives import ProcessGroupCollectives
from quire.distributed.mesh import Mesh
from quire.engine.core.adapter_scaling import AdapterScaling
from quire.engine.core.adapter_store import AdapterStore
from quire.engine.core.engine_core import Closeable, EngineCore
from quire.engine.startup import gpu_startup
from quire.engine.startup.device_facts import device_facts
from quire.engine.startup.drafter_setup import load_drafter
from quire.engine.startup.early_ranks import stop_early_ranks
from quire.engine.startup.early_start import DRIVER, begin_startup, early_device, early_rank_count
from quire.engine.startup.executor_setup import (
    build_adapter_store,
    build_executor,
    build_runner,
    link_stages,
    load_model,
    load_pooler,
    pack_for,
    register_modules,
)
from quire.engine.startup.gpu_preparation import GpuPreparation, compute_compiler_key
from quire.engine.startup.grammar_setup import build_grammars
from quire.engine.startup.head_setup import JoinPort
from quire.engine.startup.kernel_builder import stop_early_process
from quire.engine.startup.launched_rank import LaunchedRank, join_launched_ranks, local_rank
from quire.engine.startup.machines import Machines, find_machines
from quire.engine.startup.model_setup import (
    ModelDescription,
    describe_model,
    model_folder,
    torch_device,
)
from quire.engine.startup.plain_config import plain_config
from quire.engine.startup.rank_process import Ranks, check_params
from quire.engine.startup.scheduler_setup import (
    build_admission_control,
    build_drafting,
    build_encoder_budget,
    build_limits,
    build_media_limits,
    build_pipeline_limit,
    build_shared_prompt_limit,
    build_state_checkpoints,
    build_state_limit,
    cache_specs,
    dummy_request,
)
from quire.engine.startup.startup_timer import StartupTimer, format_table
from quire.engine.startup.text_setup import ParamCheck, build_input_processor, load_engine_tokenizer
from quire.engine.startup.warmup import SchedulerAndExecutor
from quire.errors import ConfigError
from quire.executors.balanced import Executor as Balanced
from quire.executors.base import Executor
from quire.executors.profiled import Executor as Profiled
from quire.grammar.backends import backend_select
from quire.kernels.framework import late_work
from quire.models.build import build_model as build_model
from quire.platform import cpu, cuda
from quire.runner.profiler import StepProfiler
from quire.sampling.processors import load_processors
from quire.text.input_processor import InputProcessor
from quire.text.tokenizing.folder_check import tokenizer_source
from quire.text.tokenizing.tokenizer import Tokenizer

log = logging.getLogger(__name__)

StartTextSetup = Callable[[EngineConfig, Callable[[], Path]], None]
"""Starts the text side concurrently: called with the config and a function for the tokenizer's
folder."""


@dataclass(frozen=True, slots=True)
class EngineCoreBundle:
    """An engine without its text side."""

    engine: EngineCore
    config: EngineConfig
    memory_plan: MemoryPlan
    decisions: tuple[Decision, ...]
    param_checks: tuple[
        ParamCheck, ...
    ]  # checks of sampling parameters, by the logits processors of this engine
    seconds: dict[
        str, float
    ]  # seconds of start-up by stage, in order: quire.engine.startup.startup_timer
    adapters: AdapterStore | None


@dataclass(frozen=True, slots=True)
class EngineBundle(EngineCoreBundle):
    """An engine with its text side."""

    tokenizer: Tokenizer | None
    input_processor: InputProcessor


def build_engine(
    options: Options, *, server: bool = False, timer: StartupTimer | None = None
) -> EngineBundle:
    """Build an engine with its text side. Raises ConfigError, NoRoom or WeightError.

    timer: of begin_startup(), if the start began before this module was imported.
    """
    check_one_server(options, "this program")
    engines = options.parallel.num_engines
    if engines > 1:
        raise ConfigError(
            f"data_parallel_size={engines}: this runs one engine; `quire serve`, LLM and AsyncLLM "
            "run several"
        )
    with _startup(options, timer) as timer:
        loading: list[Future[Tokenizer | None]] = []

        def load(config: EngineConfig, folder: Callable[[], Path]) -> None:
            def load_tokenizer() -> Tokenizer | None:
                return load_engine_tokenizer(config, None if skips_tokenizer(config) else folder())

            loading.append(timer.run_concurrently("tokenizer", load_tokenizer))

        bundle = _resolve_and_assemble(options, timer, server=server, texts=load)
        tokenizer = loading[0].result()
        timer.lap("tokenizer")
        parts = {one.name: getattr(bundle, one.name) for one in fields(bundle)}
        parts["seconds"] = timer.seconds()
        inputs = build_input_processor(bundle.config, tokenizer, checks=bundle.param_checks)
        built = EngineBundle(**parts, tokenizer=tokenizer, input_processor=inputs)
    _finish_startup(built, timer)
    return built


def build_engine_core(
    options: Options,
    found: Callable[[EngineConfig, Path | None], None],
    *,
    server: bool = False,
    timer: StartupTimer | None = None,
    join_port: JoinPort | None = None,
) -> EngineCoreBundle:
    """Build an engine without its text side, which is in another process. Raises as build_engine().

    found: called in a thread with the config so far and the folder of the tokenizer. join_port:
    where other machines join; None: this process listens, if there are any.
    """
    with _startup(options, timer) as timer:

        def start_text(config: EngineConfig, folder: Callable[[], Path]) -> None:
            work = lambda: found(config, None if skips_tokenizer(config) else folder())  # noqa: E731
            futures.append(timer.run_concurrently("tokenizer files", work))

        futures: list[Future[None]] = []
        bundle = _resolve_and_assemble(
            options,
            timer,
            server=server,
            texts=start_text,
            prepare_grammars=True,
            join_port=join_port,
        )
        futures[0].result()
        bundle = replace(bundle, seconds=timer.seconds())
    _finish_startup(bundle, timer)
    return bundle


def skips_tokenizer(config: EngineConfig) -> bool:
    """Whether the engine has no tokenizer."""
    return config.model.skip_tokenizer_init


@contextmanager
def _startup(options: Options, timer: StartupTimer | None) -> Iterator[StartupTimer]:
    with (
        late_work.starting_up(),
        timer or begin_startup(early_device(options), ranks=early_rank_count(options)) as timer,
    ):
        timer.lap("imports")
        if early_device(options) != cpu.name:
            timer.run_concurrently("compiler key", compute_compiler_key)
        try:
            yield timer
        finally:
            stop_early_process()
            stop_early_ranks()


def _resolve_and_assemble(
    options: Options,
    timer: StartupTimer,
    *,
    server: bool,
    texts: StartTextSetup,
    prepare_grammars: bool = False,
    join_port: JoinPort | None = None,
) -> EngineCoreBundle:
    """prepare_grammars: start what compiles grammars now, in the background."""
    machines = find_machines(options, join_port)
    try:
        options, environment = machines.options, env.read()
        found = describe_model(options, environment)
        timer.lap("model files")
        timer.wait_for(DRIVER)
        resolved = resolve_config(found, environment, server=server)
        timer.lap("config")
        for line in advise(found.facts, resolved.plan):
            log.info("%s", line)
        bundle = _assemble(
            found,
            resolved,
            machines,
            environment,
            timer,
            texts,
            prepare_grammars=prepare_grammars,
        )
    except BaseException:
        machines.close()
        raise
    for one in bundle.decisions:
        log.debug("%s = %s: %s", one.field, one.value, one.reason)
    return bundle


def _assemble(
    found: ModelDescription,
    resolved: ResolvedConfig,
    machines: Machines,
    environment: env.Env,
    timer: StartupTimer,
    texts: StartTextSetup,
    *,
    prepare_grammars: bool,
) -> EngineCoreBundle:
    """Build the parts. Other ranks start first: their processes import meanwhile."""
    config = resolved.config
    backend_select.check_backend(config.structured.backend)
    ranks = None
    if config.parallel.backend == "mp":
        ranks = Ranks(config, machines.options, machines.gather(config))
    try:
        return _assemble_rank(
            found, resolved, machines, environment, timer, texts, ranks, prepare_grammars
        )
    except BaseException as error:
        if ranks is not None:
            ranks.close(f"the start failed: {error}")
        raise


def _assemble_rank(
    found: ModelDescription,
    resolved: ResolvedConfig,
    machines: Machines,
    environment: env.Env,
    timer: StartupTimer,
    texts: StartTextSetup,
    ranks: Ranks | None,
    prepare_grammars: bool,
) -> EngineCoreBundle:
    """Build the parts of this process, in the order in which slow ones can run concurrently.

    ranks: the other ranks of the model.
    """
    config, plan, why = resolved
    options = machines.options
    device = torch_device(config.device.kind, local_rank(config.parallel))
    gpu: GpuPreparation | None = None
    if device.type == cuda.name:
        plain, flat = plain_config(config, options)
        gpu = GpuPreparation(found, plain, flat, environment, device, timer)
    _check_tokenizer(found.folder, config, options)
    tokenizer = lambda: _tokenizer_folder(found.folder, config, options, environment)  # noqa: E731
    texts(config, tokenizer)
    adapters = build_adapter_store(found.model_type, found.config, found.folder, config)
    grammars = None if missing_for_structured_output(config) else build_grammars(config, tokenizer)
    if grammars is not None and prepare_grammars:  # while weights are read: it takes the lock
        grammars.prepare()
    held = 0 if gpu is None else torch.cuda.memory_allocated(device)
    if gpu is not None and config.parallel.ranks > 1:
        gpu.wait()  # the ranks try a sum as they meet
        timer.lap("context")
    mesh, comm = Mesh(), None
    group: Ranks | LaunchedRank | None = None
    if ranks is not None:
        device, mesh, comm = ranks.join(found.folder, timer)
        group = ranks
        if isinstance(comm, ProcessGroupCollectives):
            sends = comm.tokens is not None
            config = replace(config, parallel=replace(config.parallel, sends_tokens=sends))
    elif config.parallel.backend == "external_launcher":
        launched = join_launched_ranks(config)
        device, mesh, comm, group = launched.device, launched.mesh, launched.comm, launched
    model = load_model(found.model_type, found.config, found.folder, config, device, mesh, comm)
    drafter = load_drafter(found.drafter, model, config, device, mesh, comm)
    link = link_stages(found.config, config, device, mesh, comm)
    pooler = load_pooler(model, found.folder, config, device, link)
    timer.lap("weights")
    if gpu is not None:
        gpu.wait()
        timer.lap("context")
        log.debug("%d kernels", gpu.kernels.load())
        timer.lap("kernels")
    if ranks is not None:
        ranks.wait_for_weights(timer)
        if gpu is None:
            plan = ranks.fit_blocks(plan, fixed=_has_fixed_blocks(options))
            config = replace(config, cache=replace(config.cache, num_blocks=plan.num_blocks))
            why = tuple(_with_measured_blocks(one, config) for one in why)
        timer.lap("other ranks")
    processors = load_processors(config.model.logits_processors, config, device)

    def half(config: EngineConfig) -> SchedulerAndExecutor:
        parts = (model, config, processors, grammars, pooler, device, drafter)
        executor: Executor = (
            build_executor(*parts)
            if group is None
            else group.build_executor(config, build_runner(*parts, comm, link))
        )
        return build_scheduler(config, grammars, adapters), executor

    if gpu is not None:
        situation = gpu_startup.MemorySituation(
            held_by_torch=held,
            has_fixed_blocks=_has_fixed_blocks(options),
            can_shrink_max_len=options.model.max_model_len in ("auto", -1),
        )
        measure = None if group is None else group.measure_devices
        record = gpu.kernels.memory_record
        started = gpu_startup.start_on_gpu(
            half, config, plan, situation, device, timer, record, measure
        )
        config, plan = started.config, started.plan
        why = tuple(_with_measured_blocks(one, config) for one in why)
        parts = started.engine_parts
    else:
        parts = half(config)
    if group is not None:
        group.begin_serving()
    background = [one for one in (grammars, adapters) if one is not None]
    engine = build_core(
        config, *parts, check=environment.check, background=background, machines=machines
    )
    if adapters is not None and config.adapters is not None:
        scaling = AdapterScaling(engine.executor, partial(pack_for, config))
        adapters.set_scaling(scaling.start)
        register_modules(adapters, config.adapters.modules)
    timer.lap("engine")
    checks: list[ParamCheck] = [] if ranks is None else [check_params]
    checks += [one.validate_params for one in processors if hasattr(one, "validate_params")]
    return EngineCoreBundle(engine, config, plan, why, tuple(checks), timer.seconds(), adapters)


def _with_measured_blocks(why: Decision, config: EngineConfig) -> Decision:
    """Return the decision, with the number of blocks after the memory of steps was measured."""
    blocks = config.cache.num_blocks
    if why.field != "cache.num_blocks" or why.value == blocks:
        return why
    return Decision(why.field, blocks, f"{why.reason}, with steps as measured")


def _has_fixed_blocks(options: Options) -> bool:
    """Whether the number of blocks was given, or follows from given bytes."""
    section = options.cache
    return section.num_gpu_blocks_override is not None or section.kv_cache_memory_bytes is not None


def _finish_startup(built: EngineCoreBundle, timer: StartupTimer) -> None:
    built.engine.mark_ready()
    config = built.config
    cache, length = config.cache, config.scheduler.max_model_len
    log.info(
        "%s ready in %.2f s: %s; sequences of %d tokens, %.1f of those %s",
        config.model.name,
        timer.total,
        f"{cache.num_blocks} blocks of {cache.block_size} tokens" if cache.groups else "no KV",
        length,
        built.memory_plan.concurrency,
        "at once" if cache.groups else "in a step",
    )
    if config.pooling is not None:
        log.info("%s", describe_pooling(config.pooling, generates=config.generates))
    if config.device.kind == cuda.name:
        for line in format_table(built.seconds, timer.seconds_before):
            log.info("  %s", line)


def resolve_config(
    found: ModelDescription, environment: env.Env, *, server: bool = False
) -> ResolvedConfig:
    """Resolve options and facts to a config. Raises ConfigError, NoRoom."""
    device = device_facts(found.options, environment)
    return resolve(found.options, found.facts, device, server=server)


def missing_for_structured_output(config: EngineConfig) -> str | None:
    """Return what structured output needs and this engine lacks; None: nothing."""
    if skips_tokenizer(config):
        return "a tokenizer"
    if config.parallel.backend == "external_launcher":  # each program would compile at its own time
        return "distributed_executor_backend='mp'"
    return None if config.sampling.eos_ids else "a token that ends the text"


def build_core(
    config: EngineConfig,
    scheduler: Scheduler,
    executor: Executor,
    *,
    check: bool,
    background: Sequence[Closeable] = (),
    machines: Closeable | None = None,
) -> EngineCore:
    """Join scheduler and executor, with a profiler and a balancer of experts if the config has
    them."""
    section = config.observe
    expert_stats: Callable[[], ExpertBalanceStats] = ExpertBalanceStats
    if config.parallel.expert_balance is not None:
        executor = balanced = Balanced(executor, config.parallel.expert_balance)
        expert_stats = balanced.stats
    if section.profile is not None:
        trace = StepProfiler(
            Path(section.profile), skip=section.profile_skip, steps=section.profile_steps
        )
        executor = Profiled(executor, trace)
    depth = config.scheduler.steps_in_flight
    return EngineCore(
        scheduler,
        executor,
        steps_in_flight=depth,
        check=check,
        background=background,
        expert_stats=expert_stats,
        machines=machines,
    )


def build_scheduler(
    config: EngineConfig,
    grammars: GrammarSource | None = None,
    adapters: AdapterProvider | None = None,
) -> Scheduler:
    """Build the scheduler, with its block pool."""
    cache, section = config.cache, config.scheduler
    missing = missing_for_structured_output(config) or "workers that compile grammars"
    ranks = config.parallel.data
    kv, *others = [
        KVCache(
            BlockPool(cache.num_blocks),
            cache.block_size,
            cache_specs(cache),
            prefix_caching=cache.prefix_caching,
            host=HostTier(cache.num_host_blocks) if cache.num_host_blocks else None,
            states=build_state_checkpoints(cache),
        )
        for _ in range(ranks)
    ]
    order = FairQueue(Priority if section.policy == "priority" else Fifo)
    isolation = FaultIsolationLimit()
    return Scheduler(
        kv,
        order,
        **by_contract(
            [
                isolation,
                SupportedTasks(
                    generates=config.generates,
                    tasks=() if config.pooling is None else config.pooling.tasks,
                    media=config.reads_media,
                    aligns=config.aligns_sources,
                ),
                build_admission_control(section),
                TenantKVQuota(order, ranks * cache.num_blocks, kv.max_blocks),
                *build_shared_prompt_limit(kv, order),
                *build_limits(section, order, ranks),
                *build_state_limit(kv, section),
                *([ConstrainedRankLimit()] if ranks > 1 else []),
                *build_encoder_budget(config.encoder),
                *build_media_limits(config),
                AdapterLimit(
                    1 if config.adapters is None else config.adapters.max_adapters, adapters
                ),
                GrammarWait(grammars, section.max_model_len, missing=missing),
                *build_pipeline_limit(config, order, isolation),
            ]
        ),
        max_seqs=section.max_num_seqs,
        max_len=section.max_model_len,
        steps_in_flight=section.steps_in_flight,
        drafting=build_drafting(config),
        dummy_request=dummy_request(config),
        other_ranks=others,
    )


def _check_tokenizer(folder: Path, config: EngineConfig, options: Options) -> None:
    """Raise ConfigError if a tokenizer that need not be downloaded is missing or not trusted."""
    section = config.model
    own = _has_own_tokenizer(config, options)
    where = folder if own else Path(section.tokenizer)
    if not skips_tokenizer(config) and where.is_dir():
        mode, trust = section.tokenizer_mode, section.trust_remote_code
        tokenizer_source(where, mode, trust_remote_code=trust)


def _tokenizer_folder(
    folder: Path, config: EngineConfig, options: Options, environment: env.Env
) -> Path:
    """The folder of the tokenizer; downloaded if it is not the model's own."""
    if _has_own_tokenizer(config, options):
        return folder
    name, revision = config.model.tokenizer, config.model.tokenizer_revision
    return model_folder(name, revision, options, environment, want="tokenizer")


def _has_own_tokenizer(config: EngineConfig, options: Options) -> bool:
    section = config.model
    return options.model.tokenizer is None and section.tokenizer_revision == section.revision
