"""Milliseconds that an adapter of llama-8b's size takes from its files to memory that a GPU reads.

    python bench/lora_disk.py [--rank 16] [--dtype bfloat16] [--repeat 6] [--readers 1,2,4,8,16] [--chunks 2]

A line for each number of threads: the medians of the whole, of its processor time, and of its steps
one after the other. `pinned` is memory that no adapter has left; else it is that of the one before.
Files are in the page cache. Without a GPU memory is not pinned.
"""

import argparse
import functools
import itertools
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
from quire.weights.adapters import fill, packed, read
from quire.weights.adapters.adapter import AdapterLimits
from quire.weights.adapters.deltas import DeltaBuilder

STEPS = {
    "config": (read, "read_lora_config"),
    "headers": (read, "open_tensors"),
    "names": (read, "_group_by_module"),
    "shapes": (DeltaBuilder, "plan"),
    "fill": (read, "fill"),
}


class Timed:
    """Adds up the milliseconds of a function's calls."""

    def __init__(self, function):
        self.function, self.ms = function, 0.0

    def __call__(self, *args):
        began = time.perf_counter()
        made = self.function(*args)
        self.ms += (time.perf_counter() - began) * 1e3
        return made

    def __get__(self, instance, _):
        return functools.partial(self, instance)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", help="of the files")
    parser.add_argument("--repeat", type=int, default=6)
    parser.add_argument("--readers", default="1,2,4,8,16")
    parser.add_argument("--chunks", default="2", help="MiB that a thread fills at a time")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    shape = SHAPES["llama-8b"]
    _, modules = describe_adaptable("llama", Config.from_hf(shape))
    allocate = Timed(lambda n: torch.empty(n, dtype=torch.uint8, pin_memory=on_gpu))
    steps = {name: Timed(getattr(*place)) for name, place in STEPS.items()} | {"memory": allocate}
    for name, (owner, function) in STEPS.items():
        setattr(owner, function, steps[name])
    with tempfile.TemporaryDirectory(prefix="quire-lora-") as folder:
        path = Path(folder) / "one"
        write_adapter(path, shape, args.rank, 1, getattr(torch, args.dtype))
        mixes = itertools.product(args.chunks.split(","), args.readers.split(","))
        for chunk, readers in (map(int, one) for one in mixes):
            packed.READERS, fill.CHUNK = readers, chunk << 20
            lines = []
            for _ in range(args.repeat):
                for one in steps.values():
                    one.ms = 0.0
                cpu, whole = time.process_time(), Timed(read.read_adapter)
                whole(path, modules, torch.bfloat16, AdapterLimits(), allocate)
                line = {"ms": whole.ms, "cpu ms": (time.process_time() - cpu) * 1e3}
                lines.append(line | {f"{name} ms": one.ms for name, one in steps.items()})
            medians = {key: statistics.median(one[key] for one in lines[1:]) for key in lines[0]}
            found = {
                "readers": readers,
                "chunk": chunk,
                "dtype": args.dtype,
                "pinned ms": lines[0]["memory ms"],
            }
            found = {key: round(v, 1) if key.endswith("ms") else v
                     for key, v in (found | medians).items()}  # fmt: skip
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
