"""Sums through the peers' memory, by processes that share memory of the host: real meetings.

The kernel runs in Triton's interpreter, a process for each rank.
"""

import multiprocessing
import os
import traceback

import pytest
import torch

from quire.kernels.collectives import all_reduce
from quire.kernels.formats.peer_memory import SLOT_BYTES, PeerMemory, area_bytes
from quire.kernels.framework import lazy_fusion, op
from quire.kernels.rms_norm import rms_norm

pytest.importorskip("triton", reason="triton is not installed")
PROGRAMS = 2
DEADLINE_S = 120


def terms(rank, rows, size, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(rows, size, generator=generator).bfloat16()


def summed(ranks, rows, size, seed=0):
    return sum(terms(rank, rows, size, seed).float() for rank in range(ranks)).bfloat16()


def run_ranks(ranks, work):
    """Run work(peers, results) in a process for each rank; return the results of each."""
    areas = [
        torch.zeros(area_bytes(PROGRAMS, ranks), dtype=torch.uint8).share_memory_()
        for _ in range(ranks)
    ]
    abort = torch.zeros(1, dtype=torch.int32).share_memory_()
    addresses = torch.tensor([area.data_ptr() for area in areas])
    results = [torch.zeros(7, 64, 64).share_memory_() for _ in range(ranks)]
    context = multiprocessing.get_context("fork")  # the addresses are those of the parent

    def rank_main(rank):
        try:
            work(PeerMemory(addresses, abort, rank, ranks, PROGRAMS), results[rank])
        except Exception:  # noqa: BLE001 - the border of the process
            traceback.print_exc()
            abort.fill_(1)  # the others wait
            os._exit(1)
        os._exit(0)

    processes = [context.Process(target=rank_main, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    abort.fill_(1)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * ranks
    return results


@pytest.fixture
def on_gpu(monkeypatch):
    """Ops take the path of CUDA tensors."""
    monkeypatch.setattr(op, "_device_type", lambda first: "cuda")


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("ranks", "shots"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_sums_are_the_same_on_all_ranks_call_after_call(ranks, shots, monkeypatch):
    from quire.kernels.gpu import peer_all_reduce

    monkeypatch.setattr(peer_all_reduce, "takes_two_shots", lambda x, peers: shots == 2)
    # 19 rows: a program meets three times. Rows for each of which there is a program have flags
    shapes = [(1, 40), (5, 24), (2, 40), (19, 40), (2, 40), (1, 39), (2, 38)]

    def work(peers, results):
        for i, (rows, size) in enumerate(shapes):
            x = terms(peers.rank, rows, size, i)
            out = all_reduce(x, None, peers)
            lazy_fusion.flush()
            results[i, :rows, :size] = out.float()

    for found in run_ranks(ranks, work):
        for i, (rows, size) in enumerate(shapes):
            assert torch.equal(found[i, :rows, :size], summed(ranks, rows, size, i).float())


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("rows", [2, 3])
def test_a_norm_behind_a_sum_is_computed_with_it(kept, rows):
    size = 40
    weight, residual = terms(7, 1, size)[0], terms(8, rows, size)

    def work(peers, results):
        x = all_reduce(terms(peers.rank, rows, size), None, peers)
        first = x if kept else None
        x, r = rms_norm(x, weight, 1e-5, residual, 1.0)
        lazy_fusion.flush()
        results[0, :rows, :size], results[1, :rows, :size] = x.float(), r.float()
        if first is not None:
            results[2, :rows, :size] = first.float()
        alone = all_reduce(terms(peers.rank, rows, size), None, peers)
        y, same = rms_norm(alone, weight, 1e-5)
        lazy_fusion.flush()
        assert same is alone
        results[3, :rows, :size] = y.float()

    total = summed(2, rows, size)
    want, r = rms_norm.__wrapped__(total, weight, 1e-5, residual, 1.0)
    alone, _ = rms_norm.__wrapped__(total, weight, 1e-5)
    found = run_ranks(2, work)
    assert torch.equal(*found)
    got = found[0][:, :rows, :size]
    assert torch.equal(got[1], r.float())
    torch.testing.assert_close(got[0], want.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got[3], alone.float(), atol=2e-2, rtol=2e-2)
    if kept:
        assert torch.equal(got[2], total.float())


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("rows", [1, PROGRAMS + 1])
def test_an_abort_ends_a_sum_whose_other_rank_never_comes(rows, monkeypatch):
    def work(peers, results):
        if peers.rank == 0:
            peers.abort.fill_(1)
            all_reduce(terms(0, rows, 40), None, peers)
            lazy_fusion.flush()

    from quire.kernels.gpu import peer_all_reduce, peer_flagged_sum

    for module in (peer_all_reduce, peer_flagged_sum):
        monkeypatch.setattr(module, "_POLL", module.tl.constexpr(4))
    run_ranks(2, work)


def test_what_does_not_fit_a_slot_is_refused():
    peers = PeerMemory(torch.zeros(2, dtype=torch.int64), torch.zeros(1), 0, 2, PROGRAMS)
    assert peers.fits(torch.empty(3, SLOT_BYTES // 2, dtype=torch.bfloat16))
    assert not peers.fits(torch.empty(3, SLOT_BYTES // 2 + 1, dtype=torch.bfloat16))
    assert not peers.fits(torch.empty(3, 8, 2))
    assert not peers.fits(torch.empty(8, 4).t())
    assert not peers.fits(torch.empty(3, 8, dtype=torch.int32))
