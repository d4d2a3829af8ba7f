"""Sums over two or more GPUs: NCCL and the peers' memory, alone and with the norm behind them.

    python bench/collectives.py [--ranks 2] [--rows 1,8,64,256,1024,4096] [--size 4096] [--meetings]

Microseconds a call inside a CUDA graph of 50, the median of replays, on rank 0. One JSON line for
each number of rows. The ranks are processes of this host.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from gpu_ops import BF16, graph_ms

CALLS = 50


def measure(rank, ranks, rendezvous, rows, size, meetings):
    from quire.distributed.collectives import connect
    from quire.distributed.mesh import Mesh
    from quire.kernels.collectives import all_reduce
    from quire.kernels.framework import lazy_fusion
    from quire.kernels.gpu import peer_flagged_sum
    from quire.kernels.rms_norm import rms_norm

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    comm = connect(Mesh(tp=ranks, rank=rank), Path(rendezvous), device)
    if meetings:
        peer_flagged_sum.supports = lambda x, peers: False
    group, peers = comm._group, comm._peers
    weight = torch.ones(size, dtype=BF16, device=device)
    for count in rows:
        x = torch.randn(count, size, device=device).to(BF16) / 1e4
        residual = torch.randn_like(x)

        def sum_by(shared, x=x):
            all_reduce(x, group, shared)
            lazy_fusion.flush()

        def norm_by(shared, x=x, residual=residual):
            total = all_reduce(x, group, shared)
            pair = rms_norm(total, weight, 1e-5, residual)
            del total
            lazy_fusion.flush()
            return pair

        found = {"rows": count, "size": size, "ranks": ranks, "meetings": meetings}
        for name, shared in (("nccl", None), ("peers", peers)):
            if name == "nccl" or peers is not None:
                found[f"{name} us"] = round(graph_ms([lambda s=shared: sum_by(s)] * CALLS) * 1e3, 2)
                fused = graph_ms([lambda s=shared: norm_by(s)] * CALLS)
                found[f"{name} + norm us"] = round(fused * 1e3, 2)
        if not rank:
            print(json.dumps(found), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--rows", default="1,8,32,64,256,1024,4096,8192")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--meetings", action="store_true", help="also for few rows, for comparison")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.rank is not None:
        rows = [int(n) for n in a.rows.split(",")]
        measure(a.rank, a.ranks, a.rendezvous, rows, a.size, a.meetings)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--rendezvous", f"{folder}/ranks", "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(a.ranks)]
        codes = [rank.wait() for rank in ranks]
    assert not any(codes), codes


if __name__ == "__main__":
    main()
