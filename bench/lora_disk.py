"""Milliseconds that an adapter of llama-8b's size takes from its files to memory that a GPU reads.

    python bench/lora_disk.py [--rank 16] [--repeat 6] [--readers 1,4,8,16]

A line for each number of threads: the medians of reading (checks and hashes with it), of packing,
and of the memory it is packed into. Files are in the page cache. Without a GPU memory is not pinned.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from lora import write_adapter
from make_models import SHAPES

from quire.models.build import describe_adaptable
from quire.models.llama import Config
from quire.weights.adapters import deltas, packed
from quire.weights.adapters.read import read_adapter


def timed(function, *given):
    began = time.perf_counter()
    made = function(*given)
    return made, (time.perf_counter() - began) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=6)
    parser.add_argument("--readers", default="1,4,8,16")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    shape = SHAPES["llama-8b"]
    _, modules = describe_adaptable("llama", Config.from_hf(shape))
    with tempfile.TemporaryDirectory(prefix="quire-lora-") as folder:
        write_adapter(Path(folder) / "one", shape, args.rank, 1)
        for readers in map(int, args.readers.split(",")):
            deltas.READERS = packed.READERS = readers
            times = []
            for _ in range(args.repeat):
                one, read = timed(read_adapter, Path(folder) / "one", modules, torch.bfloat16)
                size = one.nbytes + packed.ALIGNMENT * 1024
                room, pinned = timed(lambda n: torch.empty(n, dtype=torch.uint8, pin_memory=on_gpu),
                                     size)  # fmt: skip
                _, pack = timed(packed.pack_adapter, one, lambda n, room=room: room[:n])
                del room
                times.append((read, pinned, pack))
            read, pinned, pack = (round(statistics.median(some[1:]), 1) for some in zip(*times))
            found = {"readers": readers, "read ms": read, "memory ms": pinned, "pack ms": pack}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
