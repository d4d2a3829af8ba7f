"""Warm-up of an engine on a GPU: measures and captures its steps before the first request.

Dummy requests run through the scheduler, runner and sampler of the engine, first with a small
temporary cache, to measure the largest step; the cache gets the memory that is left.

    measure_peak_memory  the largest step is run: its peak, and the memory of the device's libraries
    capture_graphs       with the real cache: memory set aside, all graphs captured
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec
import torch

from quire.config.encoder_facts import SpeechFacts
from quire.config.engine_config import EngineConfig, PoolingTask
from quire.config.memory.memory_plan import (
    FRAGMENTATION_RESERVE,
    MIB,
    SMALL_BLOCK_RESERVE,
    EngineShape,
    blocks_per_sequence,
    gib,
)
from quire.core.media.encoder_cache import pages_for
from quire.core.params import SamplingParams
from quire.core.scheduling.scheduler import Scheduler
from quire.core.types import MediaItem, MediaTensor, Pooling, Request, StopConditions
from quire.engine.startup.media_warmup import largest_items, media_request
from quire.engine.startup.scheduler_setup import slice_sizes
from quire.errors import NoRoom, RequestError, TooLong
from quire.executors.base import Executor
from quire.runner.media.encoder_pool import EncodeItem
from quire.runner.parts.encoder_slices import EncoderSlicesPart

DUMMY_VOCAB = 2
"""Tokens of dummy prompts: every model has the first two."""
SMALL_TENSOR_BYTES = MIB // 2
"""Bytes of a tensor that torch keeps apart from larger ones."""

SchedulerAndExecutor = tuple[Scheduler, Executor]
"""The two parts of an engine: the scheduler makes plans and the executor runs them."""

ALL_FEATURES = SamplingParams(
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logprobs=1,
)
"""Sampling parameters that make a step as large as possible."""
WITH_PROMPT_LOGPROBS = replace(ALL_FEATURES, prompt_logprobs=1)
"""And prompt logprobs of one long prompt: its logits are scored some hundred rows at a time."""
RANDOM = SamplingParams(temperature=0.7)


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes of the largest steps beyond weights, cache and buffers."""

    step_bytes: int  # in use at once, in any step
    reserved_bytes: int  # allocated from the driver for it, fragmentation included
    captured_bytes: int  # in use at once, in the largest steps that are captured


def worst_step_lengths(config: EngineConfig) -> list[int]:
    """Return query tokens per row of the largest step: every slot and token of the budget used.

    One row is as long as possible: work on a whole prompt is largest there.
    """
    scheduler = config.scheduler
    rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    longest = max(scheduler.max_model_len - 2, 1)
    left = scheduler.max_num_batched_tokens
    counts = []
    for others in reversed(range(rows)):
        counts.append(min(left - others, longest))
        left -= counts[-1]
    return counts


def worst_source_lengths(config: EngineConfig) -> list[int]:
    """Return positions of sources per row of the step in which the encoder has most to do.

    [] without an encoder, and of images, of which the plan has the memory. Recordings have all
    positions or none.
    """
    if config.encoder is None or config.encoder.start_id is None:
        return []
    rows = len(worst_step_lengths(config))
    left, counts = config.encoder.max_batched_tokens, []
    if config.encoder.speech is not None:
        full = left // config.encoder.max_len
        return ([config.encoder.max_len] * full + [0] * rows)[:rows]
    for others in reversed(range(rows)):
        counts.append(max(min(left - others, config.encoder.max_len), 1))
        left -= counts[-1]
    return counts


def profiling_config(config: EngineConfig, shape: EngineShape) -> EngineConfig:
    """Return the config with a cache for the largest step alone, and nothing recorded or kept."""
    groups, lengths = config.cache.groups, worst_step_lengths(config)
    own, blocks = replace(shape, max_encoder_len=0), 0
    if groups:
        blocks = 1 + sum(blocks_per_sequence(groups, own, n + 2) for n in lengths)
    blocks += sum(-(-n // shape.block_size) for n in worst_source_lengths(config))
    return replace(
        config,
        cache=replace(config.cache, num_blocks=blocks, num_host_blocks=0, prefix_caching=False),
        device=replace(config.device, enforce_eager=True),
    )


def run_dummy_requests(
    half: SchedulerAndExecutor,
    counts: Sequence[int],
    params: SamplingParams,
    tokens: int = 1,
    longest: SamplingParams | None = None,
    sources: Sequence[int] = (),
    speech: SpeechFacts | None = None,
) -> None:
    """Run dummy requests to their end: `tokens` outputs each. Nothing else may be running.

    longest: the params of the longest of them, if they differ. sources: positions that an encoder
    reads of each. speech: of EncoderSection.
    """
    at = counts.index(max(counts))
    for i, count in enumerate(counts):
        prompt = tuple((i + k) % DUMMY_VOCAB for k in range(count))
        stop = StopConditions(max_tokens=tokens)
        own_params = longest if i == at and longest is not None else params
        request = Request(f"start-{i}", prompt, stop, own_params, read_prefix_cache=False)
        if sources:  # the salt makes each a source of its own
            source = (0,) * sources[i]
            media = dummy_recording(speech) if source else None
            request = replace(request, encoder_prompt=source, encoder_media=media, salt=b"%d" % i)
        _add_shortened(half[0], request)
    _run_to_end(half)


def _add_shortened(scheduler: Scheduler, request: Request) -> None:
    """Add a request. A cache that is too small for max_model_len gets a shorter prompt."""
    try:
        scheduler.add(request)
    except TooLong:
        if len(request.prompt) == 1:
            raise
        half = request.prompt[: len(request.prompt) // 2]
        _add_shortened(scheduler, replace(request, prompt=half))


def dummy_recording(speech: SpeechFacts | None) -> MediaItem | None:
    """Return a silent recording; None for None."""
    if speech is None:
        return None
    size = 4 * math.prod(speech.features)
    tensor = MediaTensor("input_features", "float32", speech.features, bytes(size))
    return MediaItem("audio", b"", 0, speech.positions, ((0, speech.positions),), (tensor,))


def run_dummy_pooling(half: SchedulerAndExecutor, counts: Sequence[int], task: PoolingTask) -> None:
    """Run dummy requests of an engine that generates no tokens."""
    for i, count in enumerate(counts):
        prompt = tuple((i + k) % DUMMY_VOCAB for k in range(count))
        one = Request(f"start-{i}", prompt, StopConditions(1), pooling=Pooling(task))
        half[0].add(replace(one, read_prefix_cache=False))
    _run_to_end(half)


def _run_to_end(half: SchedulerAndExecutor) -> None:
    scheduler, executor = half
    while not scheduler.idle:
        plan = scheduler.plan()
        scheduler.apply(plan, executor.submit(plan).wait())


def _run_first_step(half: SchedulerAndExecutor, config: EngineConfig) -> None:
    """Run one token: the library allocates its workspace at the first product."""
    if config.generates or config.pooling is None:
        run_dummy_requests(half, [1], RANDOM)
    else:
        run_dummy_pooling(half, [1], config.pooling.tasks[0])


@contextmanager
def _beside_slices(
    half: SchedulerAndExecutor, config: EngineConfig, items: Sequence[EncodeItem]
) -> Iterator[None]:
    """Encode items slice by slice, and before the last one run what is within: steps between slices
    have less memory."""
    sizes = slice_sizes(config)
    blocks = 0 if sizes is None else sizes.blocks
    if blocks < 2 or not items:
        yield
        return
    for at in range(blocks - 1):
        _run_slice(half, EncoderSlicesPart(tuple(items) if at == 0 else (), (at, at + 1), False))
    yield
    placed = tuple([msgspec.structs.replace(one, tensors=()) for one in items])
    _run_slice(half, EncoderSlicesPart(placed, (blocks - 1, blocks), True))


def _run_slice(half: SchedulerAndExecutor, part: EncoderSlicesPart) -> None:
    half[1].call("call_part", "encoder_slices", msgspec.msgpack.encode(part))


def _run_worst_step(half: SchedulerAndExecutor, config: EngineConfig) -> None:
    """Run the step that takes most memory; where there is no sampling, once for each task."""
    if not config.generates and config.pooling is not None:
        for task in config.pooling.tasks:
            run_dummy_pooling(half, worst_step_lengths(config), task)
        return
    counts, ranks = worst_step_lengths(config), config.parallel.data
    if ranks > 1:  # each has such a step; short ones first, as tokens are left for those that wait
        counts = [count for count in reversed(counts) for _ in range(ranks)]
    run_dummy_requests(
        half,
        counts,
        ALL_FEATURES,
        longest=WITH_PROMPT_LOGPROBS,
        sources=worst_source_lengths(config),
        speech=None if config.encoder is None else config.encoder.speech,
    )


def _run_worst_step_beside(
    half: SchedulerAndExecutor, config: EngineConfig, items: Sequence[EncodeItem]
) -> None:
    with _beside_slices(half, config, items):
        _run_worst_step(half, config)


def _run_media(half: SchedulerAndExecutor, config: EngineConfig) -> None:
    request = media_request(config)
    if request is None:
        return
    try:
        half[0].add(request)
    except RequestError:  # a cache or limits that are too small for it
        return
    _run_to_end(half)
    item = request.media[0]
    pages = tuple(range(pages_for(item.num_rows)))
    small = EncodeItem(item.modality, item.num_rows, item.tensors, pages)
    with _beside_slices(half, config, [small]):
        pass  # slices have kernels of their own


def measure_peak_memory(half: SchedulerAndExecutor, config: EngineConfig) -> PeakMemory:
    """Return peaks of the largest step and of the largest captured ones, in bytes. Raises
    NoRoom."""
    with _out_of_memory_as_no_room(config):
        _run_first_step(half, config)
        captured, _ = _peak_of(half, lambda: half[1].call("launch_graph_bodies"))
        items = largest_items(config)
        step, reserved = _peak_of(half, lambda: _run_worst_step_beside(half, config, items))
        media = msgspec.msgpack.encode(items)
        encoded = (
            _peak_of(half, lambda: half[1].call("call_part", "media", media)) if items else (0, 0)
        )
    return PeakMemory(
        step_bytes=max(step, captured, encoded[0]),
        reserved_bytes=max(reserved, captured, encoded[1]),
        captured_bytes=captured,
    )


def _peak_of(half: SchedulerAndExecutor, function: Callable[[], object]) -> tuple[int, int]:
    """Return bytes in use at once, and allocated from the driver for that, beyond the start.

    Of several ranks, the largest of each.
    """
    executor = half[1]
    executor.call("start_memory_peak")
    function()
    peaks = executor.call("memory_peak")
    return max(used for used, _ in peaks), max(reserved for _, reserved in peaks)


@contextmanager
def _traced(executor: Executor) -> Iterator[None]:
    """Within, steps are shortened to what they would compile or allocate: no result is right."""
    executor.call("begin_trace")
    try:
        yield
    finally:
        executor.call("end_trace")


def capture_graphs(half: SchedulerAndExecutor, config: EngineConfig, captured_bytes: int) -> None:
    """Allocate from the driver what steps will need, and capture all graphs.

    Afterwards no step allocates from the driver, and none captures. The largest step is traced once
    more for its allocations: the pieces it leaves with torch then have the sizes that steps need,
    so there is one for each whatever the step's size. captured_bytes: see PeakMemory.
    """
    executor = half[1]
    with _out_of_memory_as_no_room(config):
        with _traced(executor):
            _run_worst_step(half, config)
        executor.call("warm_up_kernels")
        executor.call("capture_graphs", captured_bytes)
        _run_media(half, config)
        pieces = SMALL_BLOCK_RESERVE // SMALL_TENSOR_BYTES
        executor.call("reserve_memory", FRAGMENTATION_RESERVE, pieces, SMALL_TENSOR_BYTES)
    half[0].reset_prefix_cache()


def check_cache_fits(need: int, free_bytes: int) -> None:
    """Raise NoRoom, with the numbers, before the driver would fail. need: bytes of the cache."""
    if need > free_bytes:
        raise NoRoom(
            f"the KV cache needs {gib(need)}, but only {gib(max(free_bytes, 0))} of the GPU are "
            "free: another process has allocated the rest since; lower gpu_memory_utilization, or "
            "set gpu_memory or kv_cache_memory_bytes"
        )


@contextmanager
def _out_of_memory_as_no_room(config: EngineConfig) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        scheduler = config.scheduler
        raise NoRoom(
            f"the largest step (max_num_batched_tokens={scheduler.max_num_batched_tokens}, "
            f"max_num_seqs={scheduler.max_num_seqs}) does not fit in the GPU's memory: lower "
            f"one of these, or free memory. The driver's error: {error}"
        ) from error
