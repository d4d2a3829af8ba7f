"""One rank of a mesh: `python -m tests.cpu.kernels.ranks RENDEZVOUS RANK SIZE` checks its sums."""

import sys
from pathlib import Path

import torch

from quire.distributed.collectives import connect
from quire.distributed.mesh import Mesh, uneven_shard_range


def main(rendezvous, rank, size):
    mesh = Mesh(tp=size, rank=rank)
    comm = connect(mesh, Path(rendezvous), timeout_s=60)
    for dtype in (torch.float32, torch.bfloat16):
        given = [
            torch.randn(3, 5, generator=torch.Generator().manual_seed(r)).to(dtype)
            for r in range(size)
        ]
        want = sum(part.float() for part in given).to(dtype)
        assert torch.equal(comm.all_reduce(given[rank].clone()), want)
        whole = torch.randn(2, 7, generator=torch.Generator().manual_seed(9)).to(dtype)
        mine = uneven_shard_range(7, mesh)
        assert torch.equal(comm.all_gather(whole[:, mine.start : mine.stop], 7), whole)
        x = given[rank].clone()
        assert comm.broadcast(x) is x
        assert torch.equal(x, given[0])
    ids = torch.full((4,), rank, dtype=torch.int32)
    assert torch.equal(comm.broadcast(ids), torch.zeros(4, dtype=torch.int32))
    print("exact")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
