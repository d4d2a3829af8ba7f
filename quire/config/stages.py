"""Pipeline stages: divides a model's layers among stages, by the bytes of their weights. Pure.

The embedding counts for the first stage and the output head for the last: the head of a large
vocabulary is as much work as several layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from quire.config.decisions import DecisionLog
from quire.config.engine_config import CacheSection, ParallelSection
from quire.config.facts import ITEMSIZE, DeviceFacts, ModelFacts
from quire.config.memory.kv_format import KV_FORMATS
from quire.config.memory.kv_layout import block_bytes, groups_of_stage, stage_ranges
from quire.config.memory.kv_memory import resolve_kv_memory
from quire.config.memory.memory_plan import EngineShape, MemoryPlan
from quire.config.options import Options
from quire.config.quant.read import reconcile_quantization
from quire.config.recurrent_layers import stage_shares
from quire.errors import ConfigError


def resolve_stage_layers(
    options: Options, model: ModelFacts, shape: EngineShape
) -> tuple[int, ...]:
    """Return the number of layers of each stage; (): one stage has all. Raises ConfigError."""
    stages, given = options.parallel.pipeline_parallel_size, options.parallel.pipeline_layers
    if stages == 1:
        return ()
    what = f"pipeline_parallel_size={stages}"
    depth = len(model.kinds) or len(model.layers)
    if not depth or model.encoder is not None:
        raise ConfigError(
            f"{what}: models with an encoder are not cut into stages; use data_parallel_size for "
            "more requests, or tensor_parallel_size"
        )
    if stages > depth:
        raise ConfigError(
            f"{what}, and the model has {depth} layers (num_hidden_layers): each stage needs one, "
            f"so use at most {depth}"
        )
    if given is not None:
        return _parse_layers(given, stages, depth)
    quantized = reconcile_quantization(model.quantization, shape.quantization, depth)
    itemsize = ITEMSIZE[shape.dtype]
    sizes = [
        model.weights.of_layers(range(i, i + 1), depth, ends=False).bytes(itemsize, 1, quantized)
        for i in range(depth)
    ]
    first, last = (
        model.weights.of_layers(one, depth).bytes(itemsize, 1, quantized) - sizes[one.start]
        for one in (range(1), range(depth - 1, depth))
    )
    sizes[0] += first
    sizes[-1] += last
    return cut_evenly(sizes, stages)


def plan_tightest_stage(
    options: Options, model: ModelFacts, device: DeviceFacts, shape: EngineShape, why: DecisionLog
) -> tuple[MemoryPlan, int]:
    """Plan a rank of each pipeline stage. Returns the plan of the one with space for the fewest
    blocks, and the bytes of a block in all stages together. A stage without attention needs no
    blocks: its plan is returned where nothing fits in its memory, or no stage has any."""
    found = []
    for stage in range(shape.stages):
        own = DecisionLog([])
        plan = resolve_kv_memory(options, model, device, replace(shape, stage=stage), own)
        found.append((plan, own))
    tight = [one for one in found if one[0].block_bytes or (shape.stages > 1 and _is_full(one[0]))]
    plan, own = min(tight or found, key=lambda one: (one[0].num_blocks, -one[0].weight_bytes))
    why.decisions.extend(own.decisions)
    if shape.stage_layers:
        given = options.parallel.pipeline_layers is not None
        reason = "requested" if given else "stages of similar weight"
        why.record("parallel.stage_layers", shape.stage_layers, reason)
    return plan, sum(one.block_bytes for one, _ in found)


def _is_full(plan: MemoryPlan) -> bool:
    return plan.weight_bytes + plan.activation_bytes + plan.overhead_bytes > plan.allowed_bytes


def _parse_layers(text: str, stages: int, depth: int) -> tuple[int, ...]:
    """Parse "20,20,21,19". Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    counts = tuple(int(part) for part in parts if part.isascii() and part.isdigit())
    if len(counts) != len(parts) or len(counts) != stages or sum(counts) != depth or 0 in counts:
        raise ConfigError(
            f"pipeline_layers (VLLM_PP_LAYER_PARTITION) is {text!r:.80}; it must be {stages} "
            f"numbers >= 1 with commas between, one for each stage, whose sum is {depth}: the "
            "layers of the model"
        )
    return counts


def cut_evenly(sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """Cut a row of sizes into so many pieces, each of at least one: the counts of each.

    The largest sum is as small as possible; among such cuts, the sum of squares is.
    """
    ends = [0, *accumulate(sizes)]
    most, _ = _best_cut(ends, stages, lambda cost, piece: max(cost, piece))
    _, counts = _best_cut(
        ends, stages, lambda cost, piece: None if piece > most else cost + piece * piece
    )
    return counts


def _best_cut(
    ends: Sequence[int], pieces: int, add: Callable[[int, int], int | None]
) -> tuple[int, tuple[int, ...]]:
    """Return the least cost of a cut, and its counts. ends: sums of the first 0, 1, ... sizes.
    add: returns the cost with one more piece; None: it is not allowed."""
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # of the first so many sizes
    for _ in range(pieces):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for i, (cost, counts) in best.items():
            for j in range(i + 1, len(ends)):
                more = add(cost, ends[j] - ends[i])
                if more is not None and (j not in longer or more < longer[j][0]):
                    longer[j] = more, (*counts, j - i)
        best = longer
    return best[len(ends) - 1]


def stage_layers(section: ParallelSection, stage: int) -> range | None:
    """Return the numbers of a stage's layers; None: it has all."""
    return stage_ranges(section.stage_layers)[stage] if section.stage_layers else None


def stage_cache(cache: CacheSection, section: ParallelSection, stage: int) -> CacheSection:
    """Return the cache of the ranks of one stage: its layers, numbered from 0."""
    own = stage_layers(section, stage)
    if own is None:
        return cache
    own, recurrent = stage_shares(cache.kinds, own)
    layers, groups = cache.layers[own.start : own.stop], groups_of_stage(cache.groups, own)
    size = block_bytes(layers, groups, cache.block_size // section.context, KV_FORMATS[cache.dtype])
    states = cache.states[recurrent.start : recurrent.stop]
    return replace(cache, layers=layers, groups=groups, block_bytes=size, states=states)
