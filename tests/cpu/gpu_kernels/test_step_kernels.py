"""The kernels around a forward pass, against a few lines of numpy."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.gpu.attention.block_copy import BlockCopyTable, copy_blocks
from quire.kernels.gpu.runtime import step_io
from quire.runner.step_batch import ahead_code


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("block", [16, 32])
def test_gather_finds_late_tokens_and_where_keys_go(tokens, block):
    rng = np.random.default_rng(tokens)
    slots, width, groups = 9, 12, 2
    tables = rng.integers(0, 500, (groups, slots, width))
    last = rng.integers(0, 97, slots)
    slot = rng.integers(-1, slots, tokens)
    token = rng.integers(-1, 97, tokens)
    position = rng.integers(0, width * block, tokens)
    ids = torch.full((tokens,), -7, dtype=torch.int32)
    kv = torch.full((groups, tokens), -7, dtype=torch.int64)
    step_io.gather_inputs(
        ints(token), ints(slot), ints(position), ints(last), ints(tables), ids, kv, block
    )
    real = slot >= 0
    assert ids.numpy()[real].tolist() == np.where(token < 0, last[slot], token)[real].tolist()
    want = tables[:, slot, position // block] * block + position % block
    assert kv.tolist() == np.where(real, want, -1).tolist()
    assert (ids.numpy()[~real] >= 0).all(), "an embedding is read for padding too"


@pytest.mark.parametrize("count", [1, 5, 400])
def test_table_entries_are_written_and_no_others(count):
    tables = torch.zeros((2, 40, 16), dtype=torch.int32)
    at = torch.randperm(tables.numel())[:count].int()
    blocks = torch.arange(1, count + 1, dtype=torch.int32)
    step_io.write_tables(at, blocks, tables)
    want = torch.zeros(tables.numel(), dtype=torch.int32)
    want[at.long()] = blocks
    assert torch.equal(tables.view(-1), want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_finish_keeps_last_tokens_and_packs_results(dtype):
    last = torch.full((6,), 90, dtype=torch.int32)
    both = torch.full((2, 32), -5, dtype=torch.int32)
    results = both.view(-1)
    tops = torch.tensor([1.5, float("nan"), -float("inf")])
    step_io.store_results(torch.tensor([7, 8, 9], dtype=dtype), tops, ints([4, -1, 0]), last, both)
    assert last.tolist() == [9, 90, 90, 90, 7, 90]
    assert results[:3].tolist() == [7, 8, 9]
    assert results[32:35].view(torch.float32).numpy() == pytest.approx(tops.numpy(), nan_ok=True)
    assert (results[3:32] == -5).all()
    assert (results[35:] == -5).all()


def test_blocks_are_copied_in_every_place_whatever_its_size():
    shapes = [(5, 2, 1, 16, 4), (5, 2, 3, 16, 80)]
    source = [torch.randn(shape) for shape in shapes]
    target = [torch.randn(7, *shape[1:]) for shape in shapes]
    want = [one.clone() for one in target]
    cpu = torch.device("cpu")
    copy_blocks(
        BlockCopyTable.build(source, cpu), BlockCopyTable.build(target, cpu), ints([4, 0, 1, 6]), 2
    )
    for one, other, found in zip(want, source, target):
        one[0], one[6] = other[4], other[1]
        assert torch.equal(one, found)


@pytest.mark.parametrize("rows", [1, 40])
def test_a_decode_step_continues_rows_of_the_step_before(rows):
    """Some rows have a token or a draft that is on the device, as many places on as were
    accepted."""
    stride, block, most = 64, 16, 3
    rng = np.random.default_rng(rows)
    tables = ints(rng.integers(0, 500, (2, 50, 12)))
    last = ints(rng.integers(0, 97, 50))
    ahead = ints(rng.integers(0, 97, (2 + most, 24)))
    ahead[0] %= most
    box = ints(rng.integers(1, 11 * block, (6, stride)))
    box[0], box[4] = ints(rng.integers(-1, 97, stride)), ints(rng.integers(0, 50, stride))
    want, want_ids = box.clone(), box[0].clone()
    for i in range(0, rows, 2):
        row, place = int(rng.integers(24)), int(rng.integers(1 + most))
        box[0, i], want_ids[i] = ahead_code(row, place), ahead[1 + place, row]
        want[[1, 2, 5], i] += ahead[0, row]
    ids, kv = torch.empty(rows, dtype=torch.int32), torch.empty((2, rows), dtype=torch.int64)
    want_kv, found = torch.empty_like(kv), torch.empty_like(ids)
    words, state = torch.zeros((6, stride), dtype=torch.int32), ints([0, 0])
    step_io.gather_inputs(
        want_ids[:rows], want[4, :rows], want[2, :rows] - 1, last, tables, found, want_kv, block
    )
    step_io.load_decode_inputs(state, box, words, last, tables, ids, kv, 1, block, ahead)
    assert torch.equal(ids, found)
    assert torch.equal(kv, want_kv)
    assert torch.equal(words[0, :rows], found)
    assert torch.equal(words[1:, :rows], want[1:, :rows])


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_decode_step_reads_its_inputs_and_writes_its_results_in_turn(rows):
    boxes, stride, block, slots, groups = 3, 64, 16, 50, 2
    rng = np.random.default_rng(rows)
    tables = ints(rng.integers(0, 500, (groups, slots, 12)))
    last = ints(rng.integers(0, 97, slots))
    state = ints([0, 0])
    inbox = ints(rng.integers(0, 12 * block, (boxes, 6, stride)))
    inbox[:, 2] = ints(rng.integers(1, 12 * block, (boxes, stride)))  # the length of the sequence
    inbox[:, 0] = ints(rng.integers(-1, 97, (boxes, stride)))
    inbox[:, 4] = ints(rng.permuted(np.tile(np.arange(stride), (boxes, 1)), axis=1) - 14)
    outbox = torch.zeros((boxes, 2, stride), dtype=torch.int32)
    words = torch.zeros((6, stride), dtype=torch.int32)
    for turn in range(5):
        letter = inbox[turn % boxes, :, :rows]
        ids = torch.empty(rows, dtype=torch.int32)
        kv = torch.empty((groups, rows), dtype=torch.int64)
        want_ids = torch.empty_like(ids)
        want_kv = torch.empty_like(kv)
        step_io.gather_inputs(
            letter[0], letter[4], letter[2] - 1, last, tables, want_ids, want_kv, block
        )
        step_io.load_decode_inputs(state, inbox, words, last, tables, ids, kv, boxes, block)
        assert torch.equal(ids, want_ids)
        assert torch.equal(kv, want_kv)
        assert torch.equal(words[1:, :rows], letter[1:])
        chosen, tops = ints(rng.integers(0, 97, rows)), torch.randn(rows)
        step_io.store_decode_results(state, chosen, tops, words[4, :rows], last, outbox, stride)
        answer = outbox[turn % boxes, :, :rows]
        assert torch.equal(answer[0], chosen)
        assert torch.equal(answer[1].view(torch.float32), tops)
        real = words[4, :rows] >= 0
        assert torch.equal(last[words[4, :rows][real].long()], chosen[real])
    assert state.tolist() == [5 % boxes, 4 % boxes]
