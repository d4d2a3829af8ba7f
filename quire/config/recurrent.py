"""Recurrent models: decides how many states and checkpoints there are, and refuses numbers of ranks
that cannot share their layers. Part of resolve(): pure."""

from __future__ import annotations

from dataclasses import replace

from quire.config.decisions import DecisionLog
from quire.config.facts import DeviceFacts, ModelFacts
from quire.config.memory.draft_rows import draft_rows
from quire.config.memory.memory_plan import DEFAULT_UTILIZATION, EngineShape, plan_memory
from quire.config.memory.state_layout import state_rows
from quire.config.options import Options
from quire.config.speculation_options import parse_speculative_config
from quire.errors import ConfigError

SLOT_SHARE = 0.25
"""Share of the memory beside weights and activations that states of running sequences take, if
max_num_seqs is not given."""
CHECKPOINT_SHARE = 0.125
"""The same of checkpoints, if their number is not given."""
CHECKPOINTS_PER_SEQUENCE = 4
MAX_GPU_WIDTH = 4
"""Tokens that a convolution reads, in GPU kernels (quire.kernels.gpu.recurrent.causal_conv)."""
DRAFT_SHARE = 0.0625
"""The same of states after drafts, of which there are at most as many as sequences."""


def check_recurrent(options: Options, model: ModelFacts) -> None:
    """Raise ConfigError unless ranks can share the recurrent layers of a model."""
    for state in set(model.states):
        state.of_rank(options.parallel.tensor_parallel_size)


def _space_of_states(model: ModelFacts, shape: EngineShape, allowed: int) -> tuple[int, int]:
    """Return the bytes beside weights and activations on a rank, and those of one state there."""
    alone = replace(shape, max_num_seqs=1)
    plan = plan_memory(model, alone, device_bytes=0, allowed_bytes=allowed)
    return plan.kv_available_bytes, max(1, plan.state_bytes // state_rows(1, 0))


def resolve_states(
    options: Options, model: ModelFacts, shape: EngineShape, device: DeviceFacts, why: DecisionLog
) -> EngineShape:
    """Return the shape with as many sequences as their states leave space for, and checkpoints."""
    if not model.states:
        return shape
    if shape.data > 1:
        raise ConfigError(
            f"data_parallel_size={shape.data} with experts over all ranks is not supported yet for "
            f"{model.model_type}, whose layers keep a state of each sequence: leave "
            "enable_expert_parallel out"
        )
    width = 1 + max(state.conv[1] for state in model.states)
    if device.kind == "cuda" and width > MAX_GPU_WIDTH:
        raise ConfigError(
            f"config.json: convolutions of {width} tokens are not supported on a GPU yet, only of "
            f"up to {MAX_GPU_WIDTH}: run the model with device='cpu'"
        )
    cache, seqs = options.cache, shape.max_num_seqs
    share = cache.gpu_memory_utilization or DEFAULT_UTILIZATION
    allowed = int(min(device.free_bytes, cache.gpu_memory or device.free_bytes) * share)
    rest, one = min(
        (_space_of_states(model, replace(shape, stage=i), allowed) for i in range(shape.stages)),
        key=lambda found: found[0] / found[1],
    )
    if options.scheduler.max_num_seqs is None:
        fitting = max(1, int(rest * SLOT_SHARE) // one)
        if fitting < seqs:
            reason = "states of more sequences would take over a quarter of the memory"
            seqs = int(why.record("scheduler.max_num_seqs", fitting, reason))
    count = cache.state_checkpoints
    if count is None:
        count = max(0, min(CHECKPOINTS_PER_SEQUENCE * seqs, int(rest * CHECKPOINT_SHARE) // one))
        why.record("cache.state_checkpoints", count, "an eighth of the memory, or four a sequence")
    else:
        why.record("cache.state_checkpoints", count, "requested")
    with_drafts = draft_rows(seqs, shape.max_drafts, shape.max_num_batched_tokens)
    drafts = max(
        0, min(with_drafts - 1, max(seqs, shape.max_drafts), int(rest * DRAFT_SHARE) // one)
    )
    if parse_speculative_config(options.speculation) is not None:
        drafts = max(drafts, 1)
    why.record("cache.draft_states", drafts, "a sixteenth of the memory, or one a sequence")
    return replace(shape, max_num_seqs=seqs, state_checkpoints=count, draft_states=drafts)
