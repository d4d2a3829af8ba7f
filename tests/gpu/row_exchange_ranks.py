"""One rank: `python -m tests.gpu.row_exchange_ranks RENDEZVOUS RANK SIZE` checks exchanges of rows
between data-parallel ranks on GPUs: of sizes of their own, and of equal sizes in a graph."""

import sys
from pathlib import Path

import torch

from quire.distributed.collectives import check_sum, connect
from quire.distributed.mesh import Mesh

WIDTH, TOP = 2048, 8


def rows_of(rank, count, seed):
    generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    x = torch.randn(count, WIDTH, generator=generator, device="cuda").bfloat16()
    ids = torch.randint(0, 128, (count, TOP), generator=generator, device="cuda").int()
    return x, ids, torch.rand(count, TOP, generator=generator, device="cuda")


def add_of(rank, x, ids, weights):
    """What the experts of a rank add: nothing to rows of padding. Exact in any order of sums."""
    factor = ((ids + 1 + rank) * (ids >= 0)).sum(1, keepdim=True) * weights.amax(1, keepdim=True)
    return (x.float() * factor).bfloat16()


def want(ranks, x, ids, weights):
    total = add_of(0, x, ids, weights).float()
    for rank in range(1, ranks):
        total = total + add_of(rank, x, ids, weights).float()
    return total.bfloat16()


def through(exchange, mesh, x, ids, weights):
    return exchange.combine(add_of(mesh.rank, *exchange.gather(x, ids, weights)))


def check_uneven(exchange, mesh):
    for seed, counts in enumerate([(3, 0), (1, 700), (64, 64), (0, 1)]):
        counts = (counts * mesh.size)[: mesh.size]
        given = rows_of(mesh.rank, counts[mesh.rank], seed)
        exchange.begin_step(counts)
        got = through(exchange, mesh, *given)
        assert torch.equal(got, want(mesh.size, *given)), counts
        exchange.begin_step(())


def check_graph(exchange, mesh, size, rounds):
    """Replayed by all ranks, and by all but one, which launches the kernels."""
    places = [torch.empty_like(one) for one in rows_of(0, size, 0)]
    slots = torch.zeros(size, dtype=torch.int32, device="cuda")
    outs = []

    def launch():
        outs.clear()
        with exchange.equal_rows(slots):
            outs.extend(through(exchange, mesh, *places) for _ in range(3))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            launch()
        captured = list(outs)
        for turn in range(rounds):
            own = (turn * (1 + mesh.rank)) % (size + 1)
            given = rows_of(mesh.rank, size, turn)
            for place, one in zip(places, given):
                place.copy_(one)
            slots.fill_(-1)
            slots[:own] = 5
            if turn % 4 == 3 and mesh.rank == 0:
                launch()
                found = list(outs)
            else:
                graph.replay()
                found = captured
            expected = want(mesh.size, *[one[:own] for one in given])
            for one in found:
                assert torch.equal(one[:own], expected), turn
                assert not one[own:].any(), turn
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(200):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        us = begin.elapsed_time(end) / 600 * 1000
        print(f"{size} rows: {us:.1f} us a layer", file=sys.stderr)


def main():
    path, rank, size = sys.argv[1], *map(int, sys.argv[2:])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    mesh = Mesh(dp=size, ep=size, rank=rank)
    comm = connect(mesh, Path(path), device)
    check_sum(mesh, comm, device)
    exchange = comm.dp_exchange
    with torch.inference_mode():
        check_uneven(exchange, mesh)
        for size in (1, 24, 128, 256, 640):
            check_graph(exchange, mesh, size, 20)
    print("exact", flush=True)


if __name__ == "__main__":
    main()
