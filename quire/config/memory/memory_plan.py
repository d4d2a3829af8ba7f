"""Memory plan: divides a device's memory into weights, activations of a step, and KV.

Arithmetic over facts and options; no tensor, no device call. The engine sizes its cache with the
same functions that `quire plan` prints, so the two cannot disagree.

    allowed = weights + activations + overhead + KV memory     KV memory = num_blocks * block_bytes

On a GPU these are predictions: the engine measures its largest step before it sizes the cache, and
`apply_measurements` replaces the predictions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.config.facts import ITEMSIZE, ModelFacts
from quire.config.memory.captured_steps import max_captured_tokens
from quire.config.memory.draft_rows import draft_rows
from quire.config.memory.kv_format import KV_FORMATS, KVFormat
from quire.config.memory.kv_layout import (
    KVCacheGroup,
    LayerFacts,
    block_bytes,
    group_layers,
    groups_of_stage,
    max_blocks_held,
    stage_ranges,
)
from quire.config.memory.part_facts import AdapterNumbers, DrafterMemory, MediaEncoderFacts
from quire.config.memory.state_layout import StateFacts, state_bytes, state_rows
from quire.config.quant.held import BEFORE_FP8
from quire.config.quant.read import reconcile_quantization
from quire.config.recurrent_layers import stage_shares
from quire.errors import ConfigError, NoRoom

DEFAULT_UTILIZATION = 0.92
BLOCKS_OPTION = "num_gpu_blocks_override"
MIB = 2**20
GIB = 2**30
CUDA_OVERHEAD_BYTES = 3 * GIB // 4
"""Context, loaded kernels and libraries."""
WORKSPACE_BYTES = 36 * MIB
"""Workspace of cuBLAS on one stream, and small buffers."""
CUDA_GRAPH_BYTES = 256 * MIB
"""Memory of the driver for captured graphs, outside of torch's pool."""
FRAGMENTATION_RESERVE = 64 * MIB
"""Reserved beyond the measured peak, for fragmentation."""
SMALL_BLOCK_RESERVE = 16 * MIB
"""Also reserved, in small blocks, which torch keeps apart from larger ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The sizes that memory depends on."""

    dtype: str
    cache_dtype: str  # a name in KV_FORMATS
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    tensor: int = 1  # ranks over which each layer is sharded
    context: int = 1  # of these, over which the tokens of every sequence are spread
    stage_layers: tuple[int, ...] = ()  # layers of each pipeline stage; (): one has all
    stage: int = 0  # of the rank that is planned
    whole_experts: bool = False  # ranks have some experts each, in place of slices of all
    redundant_experts: int | None = None  # copies in each layer, over all ranks; None: none moves
    data: int = 1  # ranks with requests of their own, which share experts
    hybrid: bool = True
    device: str = "cpu"
    quantization: str | None = None
    chunked_prefill: bool = True  # steps may divide prompts; never those of a model without KV
    max_encoder_len: int = 0  # tokens of the longest source; 0: there is no encoder
    adapter_slots: int = 0
    adapter_rank: int = 0  # of each slot
    adapter_experts: bool = False  # whether slots have room for adapters of experts
    adapter_tokens: int = 0  # of each slot, whose rows of the vocabulary are replaced
    encoder_cache_rows: int = 0  # of media items; 0: there is no media encoder
    encoder_step_rows: int = 0  # that the media encoder makes in one step
    has_logits: bool = True  # False: hidden states are pooled, and the output head is not built
    has_fp8: bool = True  # whether the device multiplies FP8 numbers
    state_checkpoints: int = 0  # of recurrent states, beside those of max_num_seqs sequences
    draft_states: int = 0  # recurrent states after drafts, of all rows of a step
    max_drafts: int = 0  # of a row

    @property
    def stages(self) -> int:
        """Pipeline stages, each with its own layers."""
        return max(1, len(self.stage_layers))

    @property
    def ranks(self) -> int:
        """Processes of an engine, each with one device."""
        return self.tensor * self.stages * self.data

    @property
    def rank_block_size(self) -> int:
        """Tokens of a block on one rank."""
        return self.block_size // self.context

    @property
    def max_pass_tokens(self) -> int:
        """Tokens of the largest forward pass: of the decoder, or of the encoder before it."""
        return max(self.max_num_batched_tokens, self.max_encoder_len)

    @property
    def logit_rows(self) -> int:
        """Rows of a step with logits of the whole vocabulary."""
        samples = self.has_logits and self.stage == self.stages - 1
        most = max(
            self.max_num_seqs,
            draft_rows(self.max_num_seqs, self.max_drafts, self.max_num_batched_tokens),
        )
        return min(most, self.max_pass_tokens) if samples else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one rank, and the capacity that results."""

    shape: EngineShape
    device_bytes: int
    free_bytes: int  # of the device, before anything is loaded
    allowed_bytes: int
    weight_bytes: int
    adapter_bytes: int  # of those: slots of adapters
    encoder_cache_bytes: int  # of those: rows of media items
    encoder_step_bytes: int  # of a step of the media encoder, which is over before the model's
    weight_bits: float  # bits per weight, scales included, of all weights
    activation_bytes: int
    overhead_bytes: int  # used by the device's context and libraries; 0 on a CPU
    kv_available_bytes: int  # for KV; may be negative
    token_bytes: int  # KV of one token, all layers of this rank
    block_bytes: int
    num_blocks: int
    max_len_kv_bytes: int  # KV of one sequence of max_model_len
    max_fitting_len: int  # tokens of the longest sequence that fits
    layers: tuple[
        LayerFacts, ...
    ]  # of all pipeline stages, with one rank's heads; a drafter's last
    groups: tuple[KVCacheGroup, ...]  # of all pipeline stages
    sized_by: str | None = None  # the option that set the cache's size, if one did
    given_share: float = 1.0  # gpu_memory_utilization, if it was given
    has_absolute_budget: bool = False  # gpu_memory was given
    num_host_blocks: int = 0  # of the host tier, on this rank
    host_sized_by: str = ""  # the option that set its size
    host_free_bytes: int | None = None  # for the tiers of all ranks; None: unknown, or free_bytes
    state_bytes: int = 0  # of weight_bytes: recurrent states of sequences and checkpoints
    states: tuple[StateFacts, ...] = ()  # of each recurrent layer, with one rank's heads
    kinds: tuple[str, ...] = ()  # of all layers; (): they have attention

    @property
    def host_bytes(self) -> int:
        """Host memory for KV of this rank."""
        return self.num_host_blocks * self.block_bytes

    @property
    def concurrency(self) -> float:
        """Return how many sequences of max_model_len fit at once; without KV, in one step."""
        if not self.groups and self.states:
            return self.shape.max_num_seqs
        if not self.groups:
            return self.shape.max_num_batched_tokens / self.shape.max_model_len
        held = blocks_per_sequence(self.groups, self.shape, self.shape.max_model_len)
        return self.num_blocks / held

    @property
    def tokens(self) -> int:
        """Tokens the cache holds."""
        return self.num_blocks * self.shape.block_size // max(len(self.groups), 1)


def rank_layers(layers: tuple[LayerFacts, ...], ranks: int) -> tuple[LayerFacts, ...]:
    """Return the layers of one of `ranks`: KV heads are sharded, or replicated on several ranks."""
    if ranks == 1:
        return layers
    for layer in layers:
        if layer.kv_heads % ranks and ranks % layer.kv_heads:
            message = (
                f"tensor_parallel_size must divide or be a multiple of {layer.kv_heads} KV heads"
            )
            raise ConfigError(f"{message}, got {ranks}")
    return tuple(replace(layer, kv_heads=max(1, layer.kv_heads // ranks)) for layer in layers)


def activation_bytes(model: ModelFacts, shape: EngineShape) -> int:
    """Bytes of the largest step: every token of the budget at once, max_num_seqs rows sampled."""
    if shape.device == "cpu":
        return _cpu_step_bytes(model, shape)
    steps = (
        gpu_step_bytes(model, shape)
        + gpu_buffer_bytes(shape)
        + FRAGMENTATION_RESERVE
        + SMALL_BLOCK_RESERVE
    )
    return (
        steps + gpu_captured_bytes(model, shape) + CUDA_GRAPH_BYTES
    )  # graphs have memory of their own


def gpu_step_bytes(model: ModelFacts, shape: EngineShape) -> int:
    """Peak bytes of the largest step on a GPU: within a layer, or in sampling.

    A layer holds hidden states five times (its input, normed input, residual, and the outputs
    of two GEMMs, allocated before they run), and its widest part: in a dense layer gate, up and
    their product; of experts the rows sorted by expert, in and out. Sampling holds hidden states,
    logits, and a copy of them in float32 that penalties may change.
    """
    tokens, itemsize = shape.max_pass_tokens, ITEMSIZE[shape.dtype]
    copies = tokens * itemsize * model.hidden + shape.logit_rows * model.vocab * 4
    return max(_layer_bytes(model, shape, tokens), copies + _sampling_bytes(model, shape))


def _layer_bytes(model: ModelFacts, shape: EngineShape, tokens: int) -> int:
    inner = 3 * model.mlp
    if model.top_k:
        inner = model.top_k * (model.hidden + model.expert_mlp)
    states = tokens * ITEMSIZE[shape.dtype] * (5 * model.hidden + inner // shape.tensor)
    return states + _exchanged_bytes(model, shape, tokens)


def _exchanged_bytes(model: ModelFacts, shape: EngineShape, tokens: int) -> int:
    """Bytes of the rows of all data-parallel ranks: as bytes, as gathered, and what experts add.

    Where experts move, a row is there once for each of its choices, and from each rank.
    """
    row = shape.data * tokens * model.hidden * ITEMSIZE[shape.dtype]
    found = 3 * row if shape.data > 1 else 0
    if shape.redundant_experts is not None:
        found += (3 + shape.tensor) * model.top_k * row
    return found


def _more_experts(model: ModelFacts, shape: EngineShape) -> float:
    """Return how many more experts there would be, as a share of all, if all ranks had as many as
    the one with most."""
    if not shape.whole_experts:
        return 0.0
    ranks = shape.tensor * shape.data
    most = -(-(model.experts + (shape.redundant_experts or 0)) // ranks)
    return most * ranks / model.experts - 1


def gpu_decode_bytes(model: ModelFacts, shape: EngineShape) -> int:
    """Peak bytes of the largest decode step: its logits and what sampling needs."""
    rows = min(shape.max_num_seqs, shape.max_num_batched_tokens)
    return rows * model.hidden * ITEMSIZE[shape.dtype] + _sampling_bytes(model, shape)


def gpu_captured_bytes(model: ModelFacts, shape: EngineShape) -> int:
    """Peak bytes of the largest captured step: with decoding rows, or with prompts."""
    tokens = min(max_captured_tokens(model, shape.tensor), shape.max_num_batched_tokens)
    return max(gpu_decode_bytes(model, shape), _layer_bytes(model, shape, tokens))


def _sampling_bytes(model: ModelFacts, shape: EngineShape) -> int:
    """Bytes of logits, best value and index per group of sixteen, two candidate lists per row."""
    return shape.logit_rows * (model.vocab * ITEMSIZE[shape.dtype] + model.vocab * 3 // 16 + 32768)


def gpu_buffer_bytes(shape: EngineShape) -> int:
    """Bytes of persistent buffers: block tables, and the workspace of the GEMM library."""
    width = -(-max(shape.max_model_len, shape.max_encoder_len) // shape.block_size)
    tables = 3 if shape.max_encoder_len else 1  # of own tokens, of the source, and its length
    return tables * shape.max_num_seqs * width * 4 + WORKSPACE_BYTES


def _cpu_step_bytes(model: ModelFacts, shape: EngineShape) -> int:
    """Residual and normed hidden [T, E], the wider of attention and MLP, and logits in float32.

    Logits count twice: as computed, and as sampled from. Without KV, queries, keys, values and
    output are taken to be as wide as the hidden states.
    """
    tokens = shape.max_pass_tokens
    attention = max(
        ((2 * model.heads + 2 * one.kv_heads) * one.head_dim for one in model.layers),
        default=4 * model.hidden,
    )
    inner = max(attention, 3 * model.mlp) // shape.tensor
    states = tokens * (3 * model.hidden + inner) * ITEMSIZE[shape.dtype]
    states += _exchanged_bytes(model, shape, tokens)
    return states + 2 * shape.logit_rows * model.vocab * 4


def blocks_per_sequence(groups: tuple[KVCacheGroup, ...], shape: EngineShape, tokens: int) -> int:
    """Maximum of blocks that one sequence of this length holds, with steps of the budget's size."""
    chunk, source = shape.max_num_batched_tokens, shape.max_encoder_len
    return max(1, max_blocks_held(groups, tokens, shape.block_size, chunk, source))


def find_max_fitting_len(
    groups: tuple[KVCacheGroup, ...], shape: EngineShape, num_blocks: int
) -> int:
    """Return the length of the longest sequence that fits in the blocks. 0 if none does."""
    if not groups:
        return shape.max_model_len
    if num_blocks < 1:
        return 0
    # With a window on every layer a sequence of any length may fit in these blocks.
    low, high = 0, max(num_blocks * shape.block_size, shape.max_model_len)
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_per_sequence(groups, shape, middle) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def plan_memory(
    model: ModelFacts,
    shape: EngineShape,
    *,
    device_bytes: int,
    allowed_bytes: int,
    free_bytes: int | None = None,
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    most_bytes: int | None = None,
) -> MemoryPlan:
    """Plan one rank. kv_bytes: KV memory as given; most_bytes: a cap; num_blocks: as given.
    free_bytes: of the device; None: all of it.

    Does not raise if too little is free: `require_memory` does.
    """
    drafter = None if model.drafter is None else model.drafter.memory
    further = () if drafter is None else drafter.layers
    layers = rank_layers((*model.layers, *further), shape.tensor)
    groups = group_layers(layers, hybrid=shape.hybrid, dealt=shape.stages > 1)
    own_layers, own_groups, weight_facts = layers, groups, model.weights
    states = own_states = tuple(one.of_rank(shape.tensor) for one in model.states)
    if shape.stage_layers:
        stage = stage_ranges(shape.stage_layers)[shape.stage]
        own, recurrent = stage_shares(model.kinds, stage)
        own_layers, own_groups = layers[own.start : own.stop], groups_of_stage(groups, own)
        own_states = states[recurrent.start : recurrent.stop]
        weight_facts = weight_facts.of_layers(stage, sum(shape.stage_layers))
    form = KV_FORMATS[shape.cache_dtype]
    block = block_bytes(own_layers, own_groups, shape.rank_block_size, form)
    quantized = reconcile_quantization(model.quantization, shape.quantization, len(model.layers))
    place = shape.device if shape.has_fp8 else BEFORE_FP8
    itemsize, tensor = ITEMSIZE[shape.dtype], shape.tensor
    more = _more_experts(model, shape)
    weights = weight_facts.bytes(itemsize, tensor, quantized, place, more)
    weight_bits = 8 * weights * tensor / max(weight_facts.elements(quantized), 1)
    if shape.data > 1:
        weights = weight_facts.bytes(itemsize, tensor, quantized, place, more, shape.data)
    weights += model.rotary * shape.max_model_len * 4 + model.pooling.dense_bytes
    drafter_weights, drafter_step = drafter_bytes(drafter, shape)
    weights += drafter_weights
    adapters = adapter_bytes(model.adapters, shape)
    encoder_cache, encoder_step = encoder_bytes(model.media_encoder, shape)
    rows = state_rows(shape.max_num_seqs, shape.state_checkpoints + shape.draft_states)
    held_states = rows * state_bytes(own_states, itemsize)
    weights += adapters + encoder_cache + held_states
    step = activation_bytes(model, shape) + gathered_bytes(own_layers, shape, form)
    activations = max(step + drafter_step, encoder_step)
    overhead = CUDA_OVERHEAD_BYTES if shape.device == "cuda" else 0
    available = allowed_bytes - weights - activations - overhead if kv_bytes is None else kv_bytes
    if most_bytes is not None:
        available = min(available, most_bytes)
    blocks = _fitting_blocks(available, block, num_blocks)
    return MemoryPlan(
        shape=shape,
        device_bytes=device_bytes,
        free_bytes=device_bytes if free_bytes is None else free_bytes,
        allowed_bytes=allowed_bytes,
        weight_bytes=weights,
        adapter_bytes=adapters,
        encoder_cache_bytes=encoder_cache,
        encoder_step_bytes=encoder_step,
        weight_bits=weight_bits,
        activation_bytes=activations,
        overhead_bytes=overhead,
        kv_available_bytes=available,
        token_bytes=sum(
            one.block_bytes(shape.rank_block_size, form) for one in own_layers if not one.cross
        )
        // shape.block_size,
        block_bytes=block,
        num_blocks=blocks,
        max_len_kv_bytes=blocks_per_sequence(groups, shape, shape.max_model_len) * block,
        max_fitting_len=find_max_fitting_len(groups, shape, blocks),
        layers=layers,
        groups=groups,
        state_bytes=held_states,
        states=states,
        kinds=model.kinds,
    )


def adapter_bytes(numbers: AdapterNumbers, shape: EngineShape) -> int:
    """Bytes of the slots of adapters on one rank."""
    ranked = numbers.layers + shape.adapter_experts * numbers.experts
    slot = shape.adapter_rank * ranked + shape.adapter_tokens * numbers.token + numbers.classifiers
    return shape.adapter_slots * (slot * ITEMSIZE[shape.dtype] + 4 * numbers.scales)


GATHER_COPIES = 3
"""Copies of a longest sequence's blocks in one layer while ranks gather them: a rank's part, the
parts of all ranks, and their tokens in order."""


def gathered_bytes(layers: tuple[LayerFacts, ...], shape: EngineShape, form: KVFormat) -> int:
    """Bytes in which ranks that have a part of its tokens each gather a longest sequence's blocks.
    See quire.attention.context_parallel."""
    if shape.context == 1:
        return 0
    blocks = -(-shape.max_model_len // shape.block_size)
    return GATHER_COPIES * blocks * max(one.block_bytes(shape.block_size, form) for one in layers)


def drafter_bytes(drafter: DrafterMemory | None, shape: EngineShape) -> tuple[int, int]:
    """Bytes of a drafter's weights on one rank, and of its pass over a step beside the model's."""
    if drafter is None:
        return 0, 0
    itemsize = ITEMSIZE[shape.dtype]
    place = shape.device if shape.has_fp8 else BEFORE_FP8
    weights = drafter.weights.bytes(itemsize, shape.tensor, drafter.quantization, place)
    weights += drafter.rotary * shape.max_model_len * 4
    step = shape.max_num_batched_tokens * (drafter.states + drafter.widest) * itemsize
    return weights, step


def encoder_bytes(encoder: MediaEncoderFacts | None, shape: EngineShape) -> tuple[int, int]:
    """Bytes of the encoder cache, and of a step of the encoder, on a rank of the first stage.

    A layer of a tower holds its input, its output,
    the residual and what is between its matrices: about thrice its widest layer for each patch.
    """
    if encoder is None or shape.stage:
        return 0, 0
    itemsize = ITEMSIZE[shape.dtype]
    each = 3 * encoder.patches_per_row * encoder.widest
    cache = shape.encoder_cache_rows * encoder.width * itemsize
    return cache, shape.encoder_step_rows * (each + encoder.width) * itemsize


def _fitting_blocks(available: int, block: int, given: int | None) -> int:
    """Return the number of blocks in so many bytes. given: by an option. Without KV there are
    none."""
    if not block:
        return 0
    return max(0, available // block) if given is None else given


def apply_measurements(
    plan: MemoryPlan, *, weights: int, activations: int, overhead: int, num_blocks: int | None
) -> MemoryPlan:
    """Replace predicted bytes by measured ones. num_blocks: as given, not fitted."""
    available = plan.allowed_bytes - weights - activations - overhead
    blocks = _fitting_blocks(available, plan.block_bytes, num_blocks)
    return replace(
        plan,
        weight_bytes=weights,
        activation_bytes=activations,
        overhead_bytes=overhead,
        kv_available_bytes=available,
        num_blocks=blocks,
        max_fitting_len=find_max_fitting_len(plan.groups, plan.shape, blocks),
    )


def require_memory(plan: MemoryPlan) -> None:
    """Raise NoRoom, with numbers and what would fit, if the device cannot hold the plan.

    It must hold the weights, the activations, and KV of one sequence of max_model_len.
    """
    fixed = plan.weight_bytes + plan.activation_bytes + plan.overhead_bytes
    most = plan.free_bytes if plan.sized_by else plan.allowed_bytes
    if fixed + plan.block_bytes > most:
        raise NoRoom(_too_large_weights(plan, fixed, most))
    if plan.sized_by and plan.weight_bytes + plan.num_blocks * plan.block_bytes > plan.free_bytes:
        raise NoRoom(_too_large_cache(plan, fixed))
    if plan.sized_by != BLOCKS_OPTION and plan.max_fitting_len < plan.shape.max_model_len:
        raise NoRoom(_too_little_kv(plan, fixed))
    if plan.num_host_blocks:
        _require_host_memory(plan, fixed)


def _require_host_memory(plan: MemoryPlan, fixed: int) -> None:
    """Raise NoRoom if host memory cannot hold the host tier, and on a CPU all else."""
    ranks = plan.shape.ranks
    need, free, beside = plan.host_bytes * ranks, plan.host_free_bytes, 0
    if plan.shape.device == "cpu":
        free = plan.free_bytes * ranks
        beside = (fixed + plan.num_blocks * plan.block_bytes) * ranks
    if free is None or need + beside <= free:
        return
    option, room = plan.host_sized_by, free - beside
    cures = ["leave the host memory out (preemption_mode=recompute)"]
    if option != "swap_space":
        cures = [f"leave {option} out"]
    if room // ranks >= plan.block_bytes:
        cures.insert(0, f"{option}={_floor_gib(room)}")
    rest = f" beside {gib(beside)} of weights, activations and KV" if beside else ""
    raise NoRoom(
        f"needs {gib(need)} of host memory for KV ({option}){rest}; {gib(free)} of host memory are "
        f"free, limits of control groups included. What would fit: {'; '.join(cures)}"
    )


def _floor_gib(size: int) -> str:
    """GiB with as many decimals as leave at most a tenth of a MiB, not more than `size`."""
    return f"{size * 10**4 // GIB / 10**4:g}"


def _too_large_weights(plan: MemoryPlan, fixed: int, most: int) -> str:
    shape = plan.shape
    rest, total = fixed - plan.weight_bytes, fixed + plan.max_len_kv_bytes
    cures = []
    if plan.state_bytes:
        cures.append(
            f"max_num_seqs below {shape.max_num_seqs}, state_checkpoints below "
            f"{shape.state_checkpoints} (recurrent states are {gib(plan.state_bytes)} of that)"
        )
    if plan.sized_by is None:
        if shape.dtype == "float32" and total - plan.weight_bytes // 2 <= most:
            cures.append("dtype=bfloat16 (half of the weights)")
        cures += _budget_cures(plan, total)
    room = max(most - rest - plan.block_bytes, 0)
    cures.append(f"a model with at most {gib(room)} of weights")
    device = "machine" if shape.device == "cpu" else "GPU"
    free = gib(int(total / DEFAULT_UTILIZATION))
    cures.append(f"a {device} with {free} free (for max_model_len={shape.max_model_len})")
    return (
        f"needs {gib(plan.weight_bytes)} for weights in {shape.quantization or shape.dtype} and "
        f"{gib(rest)} for activations; there is room for {gib(max(most, 0))}, and "
        f"{gib(plan.free_bytes)} of {gib(plan.device_bytes)} are free. "
        f"What would fit: {'; '.join(cures)}"
    )


def _too_large_cache(plan: MemoryPlan, fixed: int) -> str:
    kv, room = plan.num_blocks * plan.block_bytes, plan.free_bytes - fixed - MIB
    cures = [f"leave {plan.sized_by} out"]
    if room >= plan.max_len_kv_bytes:
        cures.insert(0, _kv_cure(plan, room // plan.block_bytes))
    return (
        f"needs {gib(kv)} of KV ({plan.sized_by}) and {gib(plan.weight_bytes)} of weights; "
        f"{gib(plan.free_bytes)} of {gib(plan.device_bytes)} are free. "
        f"What would fit: {'; '.join(cures)}"
    )


def _too_little_kv(plan: MemoryPlan, fixed: int) -> str:
    length = plan.shape.max_model_len
    blocks = blocks_per_sequence(plan.groups, plan.shape, length)
    need = f"{gib(plan.max_len_kv_bytes)} of KV for one sequence of max_model_len={length}"
    available = gib(max(plan.kv_available_bytes, 0))
    room = f"{available} ({plan.num_blocks} blocks of {plan.shape.block_size})"
    spent = f"weights {gib(plan.weight_bytes)}, activations {gib(plan.activation_bytes)}"
    if plan.overhead_bytes:
        spent += f", context and libraries {gib(plan.overhead_bytes)}"
    total = fixed + plan.max_len_kv_bytes
    cures = []
    if plan.max_fitting_len > 0:
        cures.append(f"max_model_len={plan.max_fitting_len} (or auto)")
    if total + MIB <= plan.free_bytes:
        cures += [_kv_cure(plan, blocks)] if plan.sized_by else _budget_cures(plan, total)
        cures.append(f"{BLOCKS_OPTION}={blocks}")
    cures = cures or [f"a device with {gib(total)} free"]
    return (
        f"needs {need}; there is room for {room} of {gib(plan.allowed_bytes)} allowed "
        f"({spent}). What would fit: {'; '.join(cures)}"
    )


def _kv_cure(plan: MemoryPlan, blocks: int) -> str:
    """Return the option that sized the cache, with a value for this many blocks or up to a MiB
    more."""
    size = blocks * plan.block_bytes
    if plan.sized_by == "cpu_kvcache_space":
        return f"{plan.sized_by}={-(-size * 10**6 // GIB) / 10**6:.6f}"
    return (
        f"{plan.sized_by}={blocks if plan.sized_by == BLOCKS_OPTION else f'{-(-size // MIB)}MiB'}"
    )


def _budget_cures(plan: MemoryPlan, total: int) -> list[str]:
    """Return the options that allow `total` bytes; none if that many are not free."""
    cures = []
    share = (total * 100 // max(plan.device_bytes, 1) + 1) / 100
    if not plan.has_absolute_budget and share <= 1 and plan.device_bytes * share <= plan.free_bytes:
        cures.append(f"gpu_memory_utilization={share:.2f}")
    size = -(-int(total / plan.given_share + 1) // MIB) * MIB
    if size * plan.given_share <= plan.free_bytes:
        cures.append(f"gpu_memory={size // MIB}MiB")
    return cures


def gib(size: int) -> str:
    """Format bytes as GiB with two decimals; small ones as MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / 2**20:.2f} MiB"
