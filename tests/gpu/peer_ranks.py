"""One rank: `python -m tests.gpu.peer_ranks RENDEZVOUS RANK SIZE` checks sums by peer memory.

Ranks share a card where there are too few.
"""

import logging
import sys

import torch
import torch.distributed as dist

from quire.distributed.mesh import Mesh
from quire.distributed.peer_memory import connect_peers
from quire.kernels.collectives import all_reduce
from quire.kernels.framework import lazy_fusion
from quire.kernels.gpu import peer_all_reduce
from quire.kernels.rms_norm import rms_norm

SHAPES = [(1, 4096), (8, 4096), (127, 1024), (300, 4096), (2500, 5120), (3, 8192), (1, 16384)]


def terms(rank, rows, size, seed):
    generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    return torch.randn(rows, size, generator=generator, device="cuda").bfloat16()


def summed(ranks, rows, size, seed):
    total = terms(0, rows, size, seed).float()
    for rank in range(1, ranks):
        total += terms(rank, rows, size, seed).float()
    return total.bfloat16()


def check_sums(peers, seed):
    for rows, size in SHAPES:
        x = terms(peers.rank, rows, size, seed)
        all_reduce(x, None, peers)
        lazy_fusion.flush()
        assert torch.equal(x, summed(peers.ranks, rows, size, seed)), (rows, size)


def check_norms(peers):
    for rows, size in SHAPES:
        weight, residual = terms(77, 1, size, 0)[0], terms(78, rows, size, 0)
        fused = rms_norm(all_reduce(terms(peers.rank, rows, size, 1), None, peers), weight, 1e-5,
                         residual)  # fmt: skip
        lazy_fusion.flush()
        apart = rms_norm(summed(peers.ranks, rows, size, 1), weight, 1e-5, residual)
        lazy_fusion.flush()
        assert torch.equal(fused[1], apart[1]), (rows, size)
        torch.testing.assert_close(fused[0], apart[0], atol=2e-2, rtol=2e-2)


def check_replays(peers, rounds):
    """A graph of five calls of different rows, again and again, with new terms each time."""
    shapes = SHAPES[:5]
    given = [terms(peers.rank, *shape, 5) for shape in shapes]
    inputs = [torch.empty_like(x) for x in given]

    def launch():
        for x in inputs:
            all_reduce(x, None, peers)
        lazy_fusion.flush()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for x, y in zip(inputs, given):
            x.copy_(y)
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            launch()
        wanted = [summed(peers.ranks, *shape, 5) for shape in shapes]
        for round_ in range(rounds):
            scale = 2.0 ** (round_ % 3)
            for x, y in zip(inputs, given):
                torch.mul(y, scale, out=x)
            graph.replay()
            for x, want in zip(inputs, wanted):
                assert torch.equal(x, want * scale), round_


def main(rendezvous, rank, size):
    logging.basicConfig(level=logging.INFO)  # why there is no shared memory
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.FileStore(rendezvous, size)
    peers = connect_peers(Mesh(tp=size, rank=rank), store, device)
    assert peers is not None
    for seed in range(3):
        check_sums(peers, seed)
    check_norms(peers)
    real, peer_all_reduce.takes_two_shots = peer_all_reduce.takes_two_shots, lambda x, peers: True
    check_sums(peers, 9)
    check_norms(peers)
    peer_all_reduce.takes_two_shots = real
    check_sums(peers, 10)
    check_replays(peers, 20 if torch.cuda.device_count() < size else 2000)
    print("exact")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
