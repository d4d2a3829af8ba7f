"""Rows exchanged through the peers' memory, by processes that share memory of the host.

The kernels run in Triton's interpreter, a process for each rank.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from quire.kernels.framework import lazy_fusion, op
from quire.kernels.row_exchange import gather_equal_rows, sum_equal_rows
from tests.cpu.gpu_kernels.test_peer_all_reduce import run_ranks

TOP = 3
SHAPES = [(1, 40, torch.bfloat16), (5, 24, torch.float32), (2, 38, torch.bfloat16),
          (1, 7, torch.float32), (4, 40, torch.float16)]  # fmt: skip
"""A program has one row or, of more than two, several."""


@pytest.fixture
def on_gpu(monkeypatch):
    """Ops take the path of CUDA tensors."""
    monkeypatch.setattr(op, "_device_type", lambda first: "cuda")


def rows_of(rank, turn, rows, size, dtype):
    generator = torch.Generator().manual_seed(100 * turn + rank)
    x = torch.randn(rows, size, generator=generator).to(dtype)
    ids = torch.randint(0, 99, (rows, TOP), generator=generator, dtype=torch.int32)
    return x, ids, torch.rand(rows, TOP, generator=generator)


def slots_of(rank, turn, rows):
    """None; or the last row of some ranks is padding."""
    if turn == 0:
        return None
    slots = torch.arange(rows, dtype=torch.int32)
    slots[rows - (turn + rank) % 2 :] = -1
    return slots


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_come_in_rank_order_and_sums_go_back_call_after_call(ranks):
    def work(peers, results):
        for turn, shape in enumerate(SHAPES):
            given, slots = rows_of(peers.rank, turn, *shape), slots_of(peers.rank, turn, shape[0])
            x, ids, weights = gather_equal_rows(*given, slots, None, peers)
            total = sum_equal_rows(x * (1 + peers.rank), ranks, None, peers)
            lazy_fusion.flush()
            found = results[turn]
            for at, one in ((0, x), (16, ids), (32, weights), (48, total)):
                found[at : at + len(one), : one.shape[1]] = one.float()

    found = run_ranks(ranks, work)
    for turn, (rows, size, dtype) in enumerate(SHAPES):
        each = [rows_of(rank, turn, rows, size, dtype) for rank in range(ranks)]
        for rank in range(ranks):
            slots = slots_of(rank, turn, rows)
            if slots is not None:
                each[rank][1][slots < 0] = -1
        for rank in range(ranks):
            got = found[rank][turn]
            for at, parts in zip((0, 16, 32), zip(*each)):
                want = torch.cat(parts).float()
                assert torch.equal(got[at : at + len(want), : want.shape[1]], want)
            terms = [(each[rank][0] * (1 + other)).float() for other in range(ranks)]
            want = sum(terms[1:], terms[0]).to(dtype).float()
            assert torch.equal(got[48 : 48 + rows, :size], want)
