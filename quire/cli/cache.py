"""quire cache build | info | pack FILE | wheel FOLDER | unpack FILE | clear: manages GPU kernels.

A machine or an image with a packed cache starts without compiling. Kernels are stored per compiler
and kind of GPU, so one file may serve several. `build` needs no GPU: it compiles the kernels of a
model and its options for the GPU that --gpu names.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire import __version__, env
from quire.config.command_line.option_parser import OptionParser, add_options, options_from
from quire.config.facts import DeviceFacts
from quire.config.memory.memory_plan import gib
from quire.config.resolve import resolve
from quire.config.vllm_environment import apply_environment
from quire.engine.startup.kernel_builder import KernelBuildTask, build_task
from quire.engine.startup.plain_config import plain_config
from quire.platform import cuda
from quire.platform import kernel_store as store


class Gpu(NamedTuple):
    """A kind of GPU that kernels can be built for."""

    capability: tuple[int, int]
    sm_count: int
    gib: int


GPUS = {
    "a100": Gpu((8, 0), 108, 80),
    "l40s": Gpu((8, 9), 142, 48),
    "rtx4090": Gpu((8, 9), 128, 24),
    "h100": Gpu((9, 0), 132, 80),
    "h200": Gpu((9, 0), 132, 140),
    "b200": Gpu((10, 0), 148, 180),
}
"""Kinds of GPU by name: how kernels are chosen depends on these figures."""


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] == "build":
        return build(argv[1:])
    args = _parser().parse_args(argv)
    folder = env.read().cache_dir
    if args.action == "pack":
        print(f"packed {store.pack(folder, args.file)} kernels into {args.file}")
    elif args.action == "wheel":
        for wheel in store.write_wheels(folder, args.folder, str(__version__)):
            print(wheel)
    elif args.action == "unpack":
        print(f"unpacked {store.unpack(args.file, folder)} kernels into {folder}")
    elif args.action == "clear":
        print(f"removed {store.clear(folder)} kernels from {folder}")
    else:
        _print_cache(folder, as_json=args.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("build", help="compile the kernels of a model for a kind of GPU")
    info = actions.add_parser("info", help="show the folder's contents")
    info.add_argument("--json", action="store_true", help="as JSON")
    for name, about in (
        ("pack", "write all kernels to FILE"),
        ("unpack", "add the kernels of FILE"),
    ):
        action = actions.add_parser(name, help=about)
        action.add_argument("file", type=Path, metavar="FILE")
    wheel = actions.add_parser("wheel", help="write a Python wheel for each kind of GPU")
    wheel.add_argument("folder", type=Path, metavar="FOLDER")
    actions.add_parser("clear", help="remove all kernels")
    return parser


def build(argv: Sequence[str]) -> int:
    """quire cache build MODEL --gpu GPU [options]: compile the kernels of `quire serve` and LLM."""
    parser = OptionParser(
        prog="quire cache build", usage="%(prog)s MODEL --gpu GPU [options]", description=__doc__
    )
    parser.add_argument("model_tag", metavar="MODEL", help="folder or hub name")
    parser.add_argument("--gpu", required=True, choices=GPUS, help="kind of GPU")
    add_options(parser)
    args = parser.parse_args(argv)
    gpu = GPUS[args.gpu]
    rest = {name: value for name, value in vars(args).items() if name != "gpu"}
    options = apply_environment(options_from(argparse.Namespace(**rest)))
    options = replace(options, device=replace(options.device, device="cuda"))
    environment = env.read()
    from quire.engine.startup.model_setup import describe_model  # it imports torch

    found = describe_model(options, environment)
    size = gpu.gib << 30
    facts = DeviceFacts(
        kind=cuda.name,
        total_bytes=size,
        free_bytes=size,
        capability=gpu.capability,
        count=options.parallel.tensor_parallel_size,
    )
    folder = store.kernel_folder(environment.cache_dir, version("triton"), gpu.capability)
    for server in (True, False):  # `quire serve` and LLM() have other defaults: a manifest each
        config, _, _ = resolve(found.options, found.facts, facts, server=server)
        plain = plain_config(config, options)
        task = build_task(*plain, found.config, folder, gpu.capability, gpu.sm_count)
        if not _run_build(msgspec.structs.replace(task, launchers=False)):
            print("some kernels cannot be compiled: the lines above say why", file=sys.stderr)
            return 1
    print(f"all kernels of this model are in {folder}")
    return 0


def _run_build(task: KernelBuildTask) -> bool:
    """Compile what the folder lacks, and write the manifest. Returns whether all of it compiled."""
    from quire.engine.startup import kernel_build_process

    complete = False
    for count, progress in enumerate(kernel_build_process.build(task), 1):
        complete = progress.kernel is None
        if not complete and sys.stderr.isatty():
            print(f"\r{count} of {progress.total} kernels", end="", file=sys.stderr)
    return complete


def _print_cache(folder: Path, *, as_json: bool) -> None:
    found = store.store_info(folder)
    if as_json:
        print(json.dumps({"folder": str(folder), "kernels": [asdict(one) for one in found]}))
        return
    print(folder)
    for one in found:
        print(f"  {one.name}: {one.kernels} kernels, {gib(one.bytes)}")
    if not found:
        print("  no compiled kernels")
