"""Scheduler set-up: builds the parts of a scheduler from the sections of a config."""

from __future__ import annotations

from dataclasses import replace

from quire.config.engine_config import (
    CacheSection,
    EncoderSection,
    EngineConfig,
    SchedulerSection,
)
from quire.config.memory.draft_rows import draft_rows
from quire.config.speculation import CHAIN_METHODS
from quire.core.admission.admission_control import AdmissionControl
from quire.core.kv.cache_spec import CacheSpec, FullAttentionSpec, SlidingWindowSpec
from quire.core.kv.kv_cache import KVCache
from quire.core.kv.state_checkpoints import StateCheckpoints
from quire.core.media.encoder_slices import SliceSizes
from quire.core.scheduling.drafting import Drafting
from quire.core.scheduling.dummy_step import DUMMY_REQUEST
from quire.core.scheduling.limits.base import StepBudget
from quire.core.scheduling.limits.encoder_budget import EncoderBudget
from quire.core.scheduling.limits.isolation_limit import FaultIsolationLimit
from quire.core.scheduling.limits.itl_target import InterTokenLatencyLimit
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.scheduling.limits.media_encoder import BESIDE_ROWS, MediaEncoderLimit
from quire.core.scheduling.limits.per_rank import per_rank
from quire.core.scheduling.limits.pipeline import PipelineLimit
from quire.core.scheduling.limits.prefill_limits import (
    LongPrefillLimit,
    PartialPrefillLimit,
    PrefillChunkLimit,
)
from quire.core.scheduling.limits.shared_prompts import SharedPromptLimit
from quire.core.scheduling.limits.shortest_prompt_first import ShortestPromptFirst
from quire.core.scheduling.limits.state_checkpoints import StateCheckpointLimit
from quire.core.scheduling.limits.token_budget import TokenBudget, WholePromptLimit
from quire.core.scheduling.limits.undivided_runs import UndividedRunLimit
from quire.core.scheduling.order.base import WaitingQueue
from quire.core.types import Pooling, Request
from quire.media.limits import DEFAULT_COUNT
from quire.registry import PluginRegistry

HOST_DRAFTERS = PluginRegistry("quire.core.drafters")
SLICES = {"cpu": (64, 0), "cuda": (1024, BESIDE_ROWS)}
"""By kind of device: rows of a slice, and of the largest item that is not divided. A GPU has graphs
for small items, which are quicker than slices."""


def dummy_request(config: EngineConfig) -> Request:
    """Return a request of one token that the engine can serve: it generates, or pools."""
    if config.generates or config.pooling is None:
        return DUMMY_REQUEST
    return replace(DUMMY_REQUEST, pooling=Pooling(config.pooling.tasks[0]))


def continues_steps(config: EngineConfig) -> bool:
    """Return whether a step may be planned behind drafts that are not verified: what it reads is
    left on the device by the graphs of a drafter's passes, and no recurrent state goes back."""
    alone = config.parallel.stages == config.parallel.data == 1
    on_device = config.speculation.method in CHAIN_METHODS and config.device.kind == "cuda"
    return on_device and alone and not config.cache.states


def build_drafting(config: EngineConfig) -> Drafting:
    """Build what chooses drafts. Methods that are no host drafter have a model on the workers."""
    section, scheduler, drafter = config.speculation, config.scheduler, None
    if section.method in HOST_DRAFTERS.names():
        drafter = HOST_DRAFTERS.load(section.method).build(section)
    return Drafting(
        drafter,
        max_drafts=section.max_drafts if config.generates else 0,
        max_len=section.max_len,
        adaptive=section.adaptive,
        overlaps=scheduler.steps_in_flight > 1 and config.parallel.stages == 1,
        step_tokens=scheduler.max_num_batched_tokens,
        step_rows=draft_rows(
            scheduler.max_num_seqs, section.max_drafts, scheduler.max_num_batched_tokens
        ),
        model=drafter is None and section.method != "none",
        continues=continues_steps(config),
    )


def build_admission_control(section: SchedulerSection) -> AdmissionControl:
    """Build admission control. It is the first limit, so a refused request costs nothing else."""
    return AdmissionControl(
        max_requests=section.max_num_queued_reqs,
        max_tokens=section.max_num_queued_tokens,
        most=section.max_num_batched_tokens,
    )


def cache_specs(cache: CacheSection) -> tuple[CacheSpec, ...]:
    """One cache spec per layer group whose blocks hold the tokens of a sequence."""
    return tuple(
        FullAttentionSpec() if g.window is None else SlidingWindowSpec(g.window)
        for g in cache.groups
        if not g.cross  # its blocks do not follow the sequence: quire.core.kv.cross_blocks
    )


def build_state_checkpoints(cache: CacheSection) -> StateCheckpoints | None:
    """Build the pool of checkpoints of a model with recurrent layers; None: it has none."""
    if not cache.states:
        return None
    return StateCheckpoints(
        cache.state_checkpoints,
        cache.block_size,
        cache.state_checkpoint_tokens,
        shared=cache.prefix_caching,
        drafts=cache.draft_states,
    )


def build_shared_prompt_limit(kv: KVCache, queue: WaitingQueue) -> list[StepBudget]:
    """The limit of an engine whose prompts share blocks; none without. queue: waiting sequences."""
    return [SharedPromptLimit(kv.block_size, kv.extend_keys, queue)] if kv.prefix_caching else []


def build_state_limit(kv: KVCache, section: SchedulerSection) -> list[StepBudget]:
    """The limit of a model with recurrent layers; none without."""
    if kv.states is None:
        return []
    return [StateCheckpointLimit(kv, divides=section.chunked_prefill)]


def build_pipeline_limit(
    config: EngineConfig, queue: WaitingQueue, isolation: FaultIsolationLimit
) -> list[StepBudget]:
    """The limit of an engine with pipeline stages; none without."""
    if config.parallel.stages == 1:
        return []
    section, parallel = config.scheduler, config.parallel
    return [
        PipelineLimit(
            min(parallel.stages, section.steps_in_flight),
            queue,
            lambda: isolation.serialize_steps,
            divides=section.chunked_prefill,
            sends_tokens=parallel.sends_tokens,
        )
    ]


def build_encoder_budget(section: EncoderSection | None) -> list[StepBudget]:
    """The limit of an engine with an encoder; none without."""
    if section is None:
        return []
    return [EncoderBudget(section.max_batched_tokens, section.max_len)]


def slice_sizes(config: EngineConfig) -> SliceSizes | None:
    """Return how the media encoder's work beside decoding rows is divided; None: it is not."""
    section, rows = config.media_encoder, SLICES.get(config.device.kind)
    if section is None or rows is None or config.parallel.data > 1:
        return None
    return SliceSizes(section.slices, *rows) if config.scheduler.inter_token_target_s else None


def build_media_limits(config: EngineConfig) -> list[StepBudget]:
    """The limits of an engine with a media encoder; none without."""
    section, scheduler = config.media_encoder, config.scheduler
    if section is None:
        return []
    counts = config.media.counts if config.media is not None else {}
    limit = MediaEncoderLimit(
        section.modalities,
        max_rows=section.step_rows,
        cache_rows=section.cache_rows,
        row_bytes=section.row_bytes,
        ranks=config.parallel.data,
        whole_prompts=not scheduler.chunked_prefill,
        counts=dict.fromkeys(section.modalities, DEFAULT_COUNT) | dict(counts),
        max_len=scheduler.max_model_len,
        paced=scheduler.inter_token_target_s > 0,
        slices=slice_sizes(config),
    )
    return [limit, UndividedRunLimit(scheduler.max_num_batched_tokens)]


def build_limits(
    section: SchedulerSection, queue: WaitingQueue, ranks: int = 1
) -> list[StepBudget]:
    """The limits in order: each sees what those before it allow. queue: waiting sequences. ranks:
    data-parallel ones."""
    target = section.inter_token_target_s
    pace = InterTokenLatencyLimit(target) if target else None
    return per_rank([_rank_limits(section, queue, pace) for _ in range(ranks)])


def _rank_limits(
    section: SchedulerSection, queue: WaitingQueue, pace: InterTokenLatencyLimit | None
) -> list[StepBudget]:
    """The limits of one data-parallel rank. pace: of all."""
    budget = TokenBudget(section.max_num_batched_tokens)
    limits: list[StepBudget] = []
    if section.long_prefill_token_threshold and section.chunked_prefill:
        limits.append(PrefillChunkLimit(section.long_prefill_token_threshold))
    limits += [budget, MaxSeqsLimit(section.max_num_seqs)]
    if pace is not None:
        limits.append(pace)
    if section.chunked_prefill:
        left = lambda: budget.left if pace is None else min(budget.left, pace.prompt_tokens_left())  # noqa: E731
        limits.append(ShortestPromptFirst(queue, left))
    else:
        limits.append(WholePromptLimit(section.max_num_batched_tokens))
    if section.max_num_partial_prefills:
        limits.append(PartialPrefillLimit(section.max_num_partial_prefills))
    if section.max_long_partial_prefills and section.long_prefill_token_threshold:
        limits.append(
            LongPrefillLimit(
                section.max_long_partial_prefills, section.long_prefill_token_threshold
            )
        )
    return limits
