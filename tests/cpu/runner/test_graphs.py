"""Replayed decode steps: padding rows touch nothing, and what cannot be recorded runs eagerly."""

import logging

import numpy as np
import pytest
import torch

from quire.attention.base import AttentionMetadata
from quire.attention.paged import Backend
from quire.config.memory.kv_format import KV_FORMATS
from quire.config.memory.kv_layout import group_layers
from quire.kernels.native import library
from quire.models.base import StepInputs
from quire.runner.cpu.tape_cache import StepForward, TapeCache, padded_rows
from quire.runner.kv_tensors import allocate_kv_tensors
from quire.runner.step_batch import StepBatch
from tests.cpu.engine_of import TINY, engine_of, model_of, request, run

pytestmark = pytest.mark.skipif(not library.available(), reason="tapes need the native kernels")
BLOCK = 4


def step_of(rows, context, first_block=0):
    """`rows` sequences of `context` tokens, each in blocks of its own."""
    width = -(-context // BLOCK)
    blocks = np.arange(first_block, first_block + rows * width, dtype=np.int32).reshape(rows, width)
    tables = torch.from_numpy(blocks)
    last = context - 1
    slots = np.arange(rows, dtype=np.int32)
    inputs = StepBatch(
        rows=range(rows),
        slots=slots,
        token_ids=np.arange(5, 5 + rows, dtype=np.int32),
        token_slots=slots,
        positions=np.full(rows, last, dtype=np.int32),
        q_starts=np.arange(rows + 1, dtype=np.int32),
        contexts=np.full(rows, context, dtype=np.int32),
        sampled_tokens=slots,
        sampled_rows=range(rows),
        sampled_slots=tuple(range(rows)),
        num_outputs=np.zeros(rows, dtype=np.int32),
        num_decodes=rows,
        max_query=1,
        max_context=context,
        decode_only=True,
    )
    batch = AttentionMetadata(
        q_starts=torch.from_numpy(inputs.q_starts),
        contexts=torch.from_numpy(inputs.contexts),
        tables=(tables,),
        slots=(tables[:, last // BLOCK].long() * BLOCK + last % BLOCK,),
        max_query=1,
        max_context=context,
        decodes=rows,
    )
    return inputs, batch


def graphs_over():
    model, config = model_of(TINY, torch.float32)
    layers = config.attention_layers()
    cache = allocate_kv_tensors(
        layers, group_layers(layers), num_blocks=64, block_size=BLOCK, form=KV_FORMATS["float32"]
    )
    backend = Backend(cache)
    forward = StepForward(model, backend, max_rows=16, max_tokens=64, width=32, groups=1)
    return TapeCache(forward), model, backend, cache


def eager(model, backend, inputs, batch):
    step = StepInputs(
        torch.from_numpy(inputs.token_ids),
        torch.from_numpy(inputs.positions),
        backend.plan(batch),
    )
    return model.logits(model(step))


@torch.inference_mode()
def test_replay_equals_eager_for_any_number_of_rows():
    graphs, model, backend, _ = graphs_over()
    for rows in (1, 5, 7, 5, 6, 3, 7):
        step = step_of(rows, context=1)
        want = eager(model, backend, *step).clone()
        assert torch.equal(graphs.run(*step).out, want)


@torch.inference_mode()
def test_padding_rows_write_nothing():
    graphs, _, _, cache = graphs_over()
    assert padded_rows(6) == padded_rows(5) == 6
    graphs.run(*step_of(6, context=2))
    for tensor in cache:
        tensor.fill_(0.5)
    inputs, batch = step_of(5, context=2, first_block=20)
    graphs.run(inputs, batch)
    for tensor in cache:
        touched = (tensor != 0.5).flatten(1).any(1).nonzero().flatten().tolist()
        assert touched == sorted(batch.tables[0][:, 0].tolist())


@torch.inference_mode()
def test_a_model_that_cannot_be_recorded_runs_eagerly_with_one_log_line(caplog):
    graphs, model, _, _ = graphs_over()

    class Computes:
        def __call__(self, step):
            return model(step) * 2.0

        logits = staticmethod(model.logits)

    graphs._forward._model = Computes()
    with caplog.at_level(logging.INFO, "quire.runner.cpu.tape_cache"):
        assert graphs.run(*step_of(2, context=1)) is None
        assert graphs.run(*step_of(3, context=1)) is None
    assert [r.message.split(":")[0] for r in caplog.records] == ["decode steps run eagerly"]


def test_two_engines_may_record_at_the_same_time():
    def work():
        return [request(str(i), range(3 + i, 20 + i), 10) for i in range(4)]

    want, _ = run(engine_of(), work())
    engines = [engine_of(depth=2) for _ in range(2)]
    out = [{}, {}]
    for engine in engines:
        for one in work():
            engine.add(one)
    while not all(engine.idle for engine in engines):
        for engine, into in zip(engines, out):
            for update in engine.step():
                into.setdefault((update.request_id, update.index), []).extend(update.token_ids)
    assert out == [want, want]


def test_padding_adds_at_most_a_fifth_and_few_sizes():
    sizes = {padded_rows(rows) for rows in range(1, 1025)}
    assert all(rows <= padded_rows(rows) <= rows * 1.2 + 1 for rows in range(1, 1025))
    assert len(sizes) < 60
