"""Kernel enumeration: finds every GPU kernel that an engine's steps can need, before any runs.

A worker on meta tensors runs steps of all sizes at which a chooser may decide otherwise, and the
launches are recorded. So the list follows from the code that chooses: there is none kept by hand.
It needs no GPU, and takes a second or two whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.config.engine_config import (
    EncoderSection,
    EngineConfig,
    ParallelSection,
    PoolingSection,
)
from quire.config.memory.draft_rows import draft_rows
from quire.core.params import SamplingParams
from quire.core.types import BlockCopy, Pooling, StopConditions
from quire.distributed.collectives import ProcessGroupCollectives
from quire.distributed.mesh import Mesh, mesh_of
from quire.distributed.peer_memory import PROGRAMS
from quire.distributed.peer_tokens import PeerTokens
from quire.engine.startup.drafter_setup import load_drafter
from quire.engine.startup.executor_setup import (
    build_runner,
    link_stages,
    load_model,
    load_pooler,
)
from quire.engine.startup.model_setup import ModelDescription
from quire.engine.startup.warmup import dummy_recording
from quire.kernels.formats.peer_memory import PeerMemory
from quire.kernels.framework import lazy_fusion
from quire.kernels.framework.kernel_spec import KernelSpec
from quire.kernels.framework.meta_device import MetaGroup, on_meta_device, trace_kernels
from quire.kernels.gpu.runtime.target import GpuTarget
from quire.layers import Linear
from quire.layers.param_module import ParamModule
from quire.models.base import LanguageModel, StepInputs
from quire.pooling.pooling_rows import SEQUENCE_TASKS, PoolingRows, ResultKind
from quire.runner.adapters.adapted_layer import SlotLoad
from quire.runner.adapters.banks import find_banks
from quire.runner.long_contexts import find_long_contexts
from quire.runner.parts.adapters import AdaptersPart
from quire.runner.parts.base import ForwardOutput, PendingPart, StepPart, StepVariant
from quire.runner.parts.encoder import EncoderPart, EncoderSource
from quire.runner.parts.long_contexts import LongContextsPart
from quire.runner.parts.pooling import PoolingPart
from quire.runner.parts.prompt_embeds import PromptEmbedsPart
from quire.runner.parts.prompt_logprobs import CHUNK_POSITIONS, PromptLogprobsPart, PromptRow
from quire.runner.parts.shared_prefixes import SharedPrefixesPart
from quire.runner.parts.token_types import TokenTypesPart
from quire.runner.parts.unattended_tokens import UnattendedTokensPart
from quire.runner.shared_prefixes import find_shared_prefixes
from quire.runner.slots import BlockTableUpdate
from quire.runner.state_tensors import find_states
from quire.runner.step_batch import DraftInputs, StepBatch
from quire.runner.worker_calls import with_few_layers, without_layers
from quire.sampling.slot_join import SlotJoin
from quire.weights.adapters.adapter import LinearDelta
from quire.weights.mapping import stored_shape

META = torch.device("meta")

GREEDY = SamplingParams(temperature=0.0)
SAMPLING_KINDS = (
    GREEDY,
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, repetition_penalty=1.1),
    SamplingParams(temperature=0.0, logprobs=1),
    SamplingParams(temperature=0.7, logprobs=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.1, logprobs=1),
    SamplingParams(temperature=0.7, repetition_penalty=1.1, logprobs=1),
)
"""Sampling parameters whose rows take different ways through the sampler's kernels."""
OTHER_SAMPLING_KINDS = (
    SamplingParams(temperature=0.0, logit_bias={0: 1.0}),
    SamplingParams(temperature=0.7, logit_bias={0: 1.0}, logprobs=1),
    SamplingParams(temperature=0.0, logprob_token_ids=[0, 1]),
)
"""Those with functions of torch too."""
STRIPS = ("embed_tokens.", "lm_head.")
"""Parameters that are cut by vocabulary: the last rank's strip is shorter."""
MIXED_PROMPTS = (64, 512)
"""Tokens of a prompt beside rows that decode; and as many as captured steps have, so none is."""


def enumerate_kernels(
    found: ModelDescription,
    config: EngineConfig,
    target: GpuTarget,
    note: Callable[[KernelSpec], None],
    *,
    peers: bool = True,
) -> None:
    """Call `note` with each kernel of loading a model, and of every step of its engine, on such a
    GPU. Of several ranks, of each whose share of the model has other shapes.

    peers: the GPUs of the ranks access each other's memory.
    """
    stepped = set()
    with on_meta_device(target), trace_kernels(note):
        for rank in _unlike_ranks(config.parallel):
            runner = meta_runner(found, config, rank, peers=peers)
            shapes = _shapes_of(runner.model)
            stage = mesh_of(config.parallel, rank).pp_rank
            rest = stage, tuple(one for one in shapes if not one[0].startswith(STRIPS))
            if shapes not in stepped:
                with torch.inference_mode():
                    run_steps(runner, config, prompts=rest not in stepped)
            stepped |= {shapes, rest}


def _shapes_of(model: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return names and shapes of what a rank stores, whatever its form and the adapters of it."""
    return tuple(
        (f"{path}.{name}", stored_shape(module.layout(name)))
        for path, module in model.named_modules()
        if isinstance(module, ParamModule)
        for name in module.param_names()
    )


def _unlike_ranks(section: ParallelSection) -> list[int]:
    """Return the first and last tensor-parallel rank of each stage, of the first and last
    data-parallel rank: others have the shares of one of them."""
    ends, stages = {0, section.tensor - 1}, section.stages
    return sorted(
        (data * stages + stage) * section.tensor + end
        for data in {0, section.data - 1}
        for stage in range(stages)
        for end in ends
    )


def meta_runner(
    found: ModelDescription, config: EngineConfig, rank: int = 0, *, peers: bool = True
) -> Any:
    """Return a rank's ModelRunner on meta tensors. Call on_meta_device() first."""
    mesh = mesh_of(config.parallel, rank)
    comm = _meta_collectives(mesh, peers=peers) if mesh.size > 1 else None
    model = load_model(found.model_type, found.config, found.folder, config, META, mesh, comm)
    link = link_stages(found.config, config, META, mesh, comm)
    pooler = load_pooler(model, found.folder, config, META, link)
    drafter = load_drafter(found.drafter, model, config, META, mesh, comm)
    return build_runner(
        model, config, pooler=pooler, device=META, drafter=drafter, comm=comm, link=link
    )


def _meta_collectives(mesh: Mesh, *, peers: bool) -> ProcessGroupCollectives:
    group = memory = None
    if mesh.tp > 1:
        group = MetaGroup(mesh.tp)
        areas = torch.empty(mesh.tp, dtype=torch.int64, device=META)
        abort = torch.zeros(1, dtype=torch.int32)
        memory = PeerMemory(areas, abort, mesh.tp_rank, mesh.tp, PROGRAMS) if peers else None
    comm = ProcessGroupCollectives(group, memory, stages=MetaGroup(mesh.pp))
    if mesh.pp > 1 and mesh.pp_rank in (0, mesh.pp - 1) and peers:
        area = torch.empty(1, dtype=torch.int64, device=META)
        comm.tokens = PeerTokens(area, torch.zeros(1, dtype=torch.int32))
    if mesh.dcp > 1:
        comm.share_context(MetaGroup(mesh.dcp), mesh)
    if mesh.dp > 1:
        comm.share_experts(MetaGroup(mesh.dp), MetaGroup(mesh.ep))
    return comm


def run_steps(runner: Any, config: EngineConfig, *, prompts: bool = True) -> None:
    """Run steps of all sizes and kinds. Of equal layers two run: more need no other kernels.

    prompts: False: those with prompts only as far as these are scored.
    """
    model: nn.Module = runner.model
    scheduler = config.scheduler
    rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    worker, sampler = runner.worker, runner.sampler
    for _ in range(2):  # the second reads a token that the first samples
        with runner.tokens.step([0], [0]):
            pass
    with with_few_layers(worker, model):
        if config.cache.groups:
            _run_block_operations(worker, config)
        if not config.generates:
            assert config.pooling is not None, "a model that does neither"
            _run_pooled_steps(worker, config, config.pooling, rows)
            worker.warm_up_kernels()
            worker.capture_graphs(0)
            return
        states = find_states(runner.model)
        if states is not None:
            states.begin([0], [0])
        _join(sampler, GREEDY)
        most_drafts = config.speculation.max_drafts
        verified = draft_rows(scheduler.max_num_seqs, most_drafts, scheduler.max_num_batched_tokens)
        if runner.link.is_last:  # first: the sampler's kernels compile longest
            _run_sampling(runner, SAMPLING_KINDS, rows, max(rows, verified))
        # then those of drafts
        batches = [*draft_batches(verified, scheduler.max_model_len)]
        batches += step_batches(config, rows)
        for batch in batches:
            if not (prompts or batch.decode_only):
                continue
            worker.compute(batch, ())
            if find_shared_prefixes(model) is not None and batch.decode_only:
                worker.compute(batch, [SharedPrefixesPart(())])
            if find_long_contexts(model) is not None and LongContextsPart.serves(batch):
                worker.compute(batch, [LongContextsPart()])
        ranks = config.parallel.data
        for count in sizes(ranks * scheduler.max_num_batched_tokens) if ranks > 1 else ():
            with runner.experts.step((0, count, *[0] * (ranks - 2))):
                pass  # a step without rows computes the experts for the others
        with runner.experts.step([1] * ranks, padded=1):
            pass  # as one that raised, of equal sizes
        if worker.proposals is not None:
            _run_drafter(worker, config, verified)
        one = decode_batch(1, 1)
        for load in () if config.adapters is None else adapter_loads(model):
            worker.compute(one, [adapted_rows(one, load)])
            for batch in batches:
                worker.compute(batch, [adapted_rows(batch)])
        worker.warm_up_kernels()
        worker.capture_graphs(0)
        # last: torch imports torch._dynamo for some functions on the meta device, which takes a
        # second, while the kernels of other steps compile
        if runner.link.is_last:
            _run_sampling(runner, OTHER_SAMPLING_KINDS, rows, max(rows, verified))
        _run_parts(worker, config, model, rows)


def _run_sampling(runner: Any, kinds: Sequence[SamplingParams], rows: int, most: int) -> None:
    """Run steps with sampling parameters. most: rows of the largest step that samples."""
    worker, sampler, hidden = runner.worker, runner.sampler, _HiddenStates()
    worker.compute(decode_batch(most, 1), [hidden])
    for params in kinds:
        _join(sampler, params)
        worker.compute(decode_batch(rows, 1), ())
        worker.compute(prompt_batch(0, [2], 0), ())
        for size in sizes(most):
            _sample(runner.model, sampler, hidden.states[:size])
    _join(sampler, GREEDY)


def _run_parts(worker: Any, config: EngineConfig, model: nn.Module, rows: int) -> None:
    """Run the parts of steps that generate."""
    for count in sizes(min(CHUNK_POSITIONS, config.scheduler.max_model_len - 1)):
        part = PromptLogprobsPart((PromptRow(0, 0, 0, (0,) * count, 1),))
        worker.compute(prompt_batch(0, [count], 0), [part])
    worker.compute(prompt_batch(1, [2], 0), [PromptEmbedsPart((), bytes(8))])
    if config.encoder is not None and config.encoder.start_id is not None:
        for sources in _encoder_batches(config.encoder, config.cache.block_size):
            worker.compute(prompt_batch(1, [2], 0), [EncoderPart(sources)])
    if config.pooling is not None:
        # the forward passes are those of other steps
        known = worker.proposals is None
        with without_layers(model) if known else nullcontext():
            _run_pooled_steps(worker, config, config.pooling, rows, heads_alone=known)


def _run_drafter(worker: Any, config: EngineConfig, verified: int) -> None:
    """Run a drafter behind steps of all sizes: with one new token a row, with several, and
    prompts. Its further passes are like the first behind steps with one. verified: rows of the
    largest step with drafts."""
    scheduler, most = config.scheduler, config.speculation.max_drafts
    rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    longest = max(scheduler.max_model_len - 2, 1)
    kept = _HiddenStates()
    worker.compute(decode_batch(1, 1), [kept])
    batches = [decode_batch(count, longest) for count in sizes(rows)]
    for count in range(2, min(1 + most, longest) + 1):
        batches.append(prompt_batch(0, [count] * min(rows, 4), longest - count))
    for count in sizes(min(scheduler.max_num_batched_tokens, longest)):
        batches.append(prompt_batch(0, [count], 0))
    for batch in batches:
        ones = np.ones(len(batch.rows), dtype=np.int32)
        inputs = DraftInputs(-ones, ones << 20, ones)
        hidden = kept.states.new_empty((len(batch.token_ids), kept.states.shape[1]))
        worker.proposals.launch(replace(batch, draft_inputs=inputs), hidden)
    if worker.proposals.is_chain:
        for batch in draft_batches(verified, scheduler.max_model_len):
            worker.compute(drafted(batch), ())
        for group in worker.proposals.graph_groups(sizes(verified), ()):
            for graph in group:
                worker.proposals.launch_own(graph)


def drafted(batch: StepBatch) -> StepBatch:
    """Return a step of rows that decode with a model that drafts behind it, as of one row."""
    ones = np.ones(len(batch.rows), dtype=np.int32)
    count = len(batch.sampled_rows)
    return replace(batch, sampled_rows=[0] * count, draft_inputs=DraftInputs(-ones, ones, ones))


def _run_pooled_steps(
    worker: Any,
    config: EngineConfig,
    section: PoolingSection,
    rows: int,
    *,
    heads_alone: bool = False,
) -> None:
    """Run prompts of all sizes without sampled rows; each row ends, and is pooled.

    heads_alone: only the kernels of the poolers are to be found.
    """
    kinds = [ResultKind.of(Pooling(task)) for task in section.tasks]
    batches = step_batches(config, rows)
    seen: set[tuple[ResultKind, int]] = set()
    for batch in batches:
        if not (batch.decode_only or batch.max_prior_context):
            types = TokenTypesPart(bytes(len(batch.token_ids)))
            inputs: list[list[StepPart]] = [[], [types]]
            late = section.late_interaction
            if late and not (late.attends_to_expansion or config.cache.groups):
                inputs.append([types, UnattendedTokensPart([1] * len(batch.rows))])
            for kind in kinds:
                of_sequences = kind.task in SEQUENCE_TASKS
                size = kind, len(batch.rows if of_sequences else batch.token_ids)
                if heads_alone and size in seen:
                    continue
                seen.add(size)
                for parts in inputs:
                    worker.compute(without_samples(batch), [*parts, pooled_rows(batch, kind)])


def adapted_rows(batch: StepBatch, *loads: SlotLoad) -> AdaptersPart:
    """Return the part of a step whose every row has the adapter of slot 0."""
    return AdaptersPart(bytes(4 * len(batch.rows)), loads)


def adapter_loads(model: nn.Module) -> Iterator[SlotLoad]:
    """Yield loads of an adapter that changes nothing, of one with a factor in some layer, and, if
    other kernels have those of many ranks, of both with all ranks."""
    banks = find_banks(model)
    assert banks is not None
    yield SlotLoad(0, {})
    for name, layer in model.named_modules():
        if name in banks.layers and isinstance(layer, Linear):
            rows = layer.outputs[0].rows
            for rank in banks.ranks:
                a = torch.empty((rank, layer.inputs), dtype=banks.dtype, device=META)
                b = torch.empty((rank, rows), dtype=banks.dtype, device=META)
                for factor in (None, torch.empty(rows, device=META)):
                    yield SlotLoad(0, {name: {0: LinearDelta(a, b, factor=factor)}})
            return


def pooled_rows(batch: StepBatch, kind: ResultKind) -> PoolingPart:
    """Return the part of a step whose every row is the whole of a prompt."""
    counts, first = np.diff(batch.q_starts).tolist(), batch.q_starts[:-1].tolist()
    none, last = [0] * len(counts), [True] * len(counts)
    rows = PoolingRows([kind], none, none, first, counts, none, last, none, {})
    return PoolingPart(list(range(len(counts))), rows)


def without_samples(batch: StepBatch) -> StepBatch:
    """Return a step of the same rows that samples none."""
    none = np.zeros(0, dtype=np.int32)
    return replace(batch, sampled_tokens=none, sampled_rows=(), sampled_slots=(), num_outputs=none)


def _run_block_operations(worker: Any, config: EngineConfig) -> None:
    worker.write_tables([BlockTableUpdate(0, 0, 0, [0])])
    worker.copy([BlockCopy(0, 0)])
    if config.cache.num_host_blocks:
        worker.swap_out([BlockCopy(0, 0)])
        worker.swap_in([BlockCopy(0, 0)])


def _join(sampler: Any, params: SamplingParams) -> None:
    """All rows of all steps are in slot 0."""
    sampler.join(SlotJoin(0, "start", 0, params, 0, [0], 1, 2, StopConditions(max_tokens=1)))


class _HiddenStates:
    """A part of a step that keeps the hidden states."""

    states: Tensor  # [T, E]

    keeps_graphs = False

    def variant(self, model: LanguageModel) -> None:
        return None

    def write_inputs(self, model: LanguageModel, batch: StepBatch) -> None:
        pass

    def before_forward(
        self, model: LanguageModel, step: StepInputs, variant: StepVariant
    ) -> StepInputs:
        return step

    def after_forward(self, model: LanguageModel) -> None:
        pass

    def apply(self, forward: ForwardOutput) -> PendingPart:
        self.states = forward.hidden
        return self

    def result(self) -> dict[str, Any]:
        return {}


def _sample(model: Any, sampler: Any, hidden: Tensor) -> None:
    """Sample so many rows, within a graph and outside."""
    rows = len(hidden)
    slots = (0,) * rows
    kind = sampler.kind(slots)
    logits = model.logits(hidden)
    lazy_fusion.flush()
    if kind is None:
        sampler.sample(logits, slots, [0] * rows).copy_to_host()
    else:
        integers = torch.zeros(rows, dtype=torch.int32, device=META)
        sampler.choose(logits, integers, integers, kind)
    lazy_fusion.flush()


def _encoder_batches(
    section: EncoderSection, block_size: int
) -> Iterator[tuple[EncoderSource, ...]]:
    """Yield the sources of steps of all sizes: one text, or recordings, which have one size."""
    for count in sizes(section.max_batched_tokens // (section.max_len if section.speech else 1)):
        length = section.max_len if section.speech else count
        blocks = [0] * -(-length // block_size)
        recording = dummy_recording(section.speech)
        media = () if recording is None else (recording,)
        source = EncoderSource((0,) * length, blocks, 0, media)
        yield (source,) * (count if section.speech else 1)


def sizes(most: int) -> list[int]:
    """Return the sizes at which choosers may decide otherwise: all small ones, then beside and
    between the powers of two."""
    found = set(range(1, min(most, 33) + 1)) | {most}
    for bit in range(5, most.bit_length() + 1):
        half = 1 << (bit - 1)
        found |= {
            1 << bit,
            (1 << bit) - 1,
            (1 << bit) + 1,
            *(half + half * i // 4 for i in (1, 2, 3)),
        }
    return sorted(size for size in found if size <= most)


def step_batches(config: EngineConfig, max_rows: int) -> Iterator[StepBatch]:
    """Yield steps of greedy rows that decode, of prompts, and of both.

    The first need most of the kernels, and those that take longest to compile.
    """
    max_tokens = config.scheduler.max_num_batched_tokens
    longest = max(config.scheduler.max_model_len - 2, 1)
    yield prompt_batch(min(max_rows - 1, max_tokens // 2), [min(longest, max_tokens // 2)], 0)
    yield decode_batch(1, longest)
    for rows in sizes(max_rows):
        for context in {1, longest}:
            yield decode_batch(rows, context)
    for tokens in sizes(max_tokens):
        rows = -(-tokens // longest)
        if rows <= max_rows:
            for prior in {0, max(longest - tokens, 0)}:
                yield prompt_batch(0, _shares(tokens, rows), prior)
        many = min(max_rows, max(tokens // 2, 1))
        if tokens // many <= longest:
            priors = {0, max(longest - tokens, 0)}
            if config.parallel.context > 1:  # short contexts are attended to at once
                priors.add(max(min(1, longest - tokens // many - 1), 0))
            for prior in priors:
                yield prompt_batch(0, _shares(tokens, many), prior)
    for decodes in sizes(max_rows - 1):
        for prompt in (*MIXED_PROMPTS, config.device.captured_tokens):
            count = min(prompt, longest, max_tokens - decodes)
            if count > 1:
                yield prompt_batch(decodes, [count], 0)
                yield prompt_batch(decodes, [count], longest - count)


def draft_batches(max_rows: int, max_len: int) -> Iterator[StepBatch]:
    """Yield steps of greedy rows that decode, of which the later ones are drafts."""
    for rows in sizes(max_rows) if max_rows else ():
        drafts = [0] * (rows - 1) + [-1]
        yield replace(decode_batch(rows, max(max_len - 2, 1)), next_drafts=drafts)


def _shares(tokens: int, rows: int) -> list[int]:
    return [tokens // rows + (i < tokens % rows) for i in range(rows)]


def decode_batch(rows: int, context: int) -> StepBatch:
    """A step of rows that decode, with this context."""
    return replace(prompt_batch(rows, [], context - 1), decode_only=True)


def prompt_batch(decodes: int, prompts: Sequence[int], prior: int) -> StepBatch:
    """A step of rows that decode and then of prompts, with `prior` tokens in the cache."""
    counts = np.array([1] * decodes + list(prompts), dtype=np.int32)
    rows = len(counts)
    starts = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    slots = np.zeros(rows, dtype=np.int32)
    contexts = counts + np.int32(prior)
    ones = int((counts == 1).sum())
    return StepBatch(
        rows=range(rows),
        slots=slots,
        token_ids=np.zeros(starts[-1], dtype=np.int32),
        token_slots=np.repeat(slots, counts),
        positions=np.zeros(starts[-1], dtype=np.int32),
        q_starts=starts,
        contexts=contexts,
        sampled_tokens=starts[1:] - 1,
        sampled_rows=range(rows),
        sampled_slots=(0,) * rows,
        num_outputs=np.zeros(rows, dtype=np.int32),
        num_decodes=ones,
        max_query=int(counts.max()),
        max_context=int(contexts.max()),
        decode_only=False,
    )
