"""quire cache info | pack FILE | unpack FILE | clear: manages the folder of compiled GPU kernels.

A machine or an image with a packed cache starts without compiling. Kernels are stored per compiler
and kind of GPU, so one file may serve several.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from quire import env
from quire.config.memory.memory_plan import gib
from quire.platform import kernel_store as store


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    folder = env.read().cache_dir
    if args.action == "pack":
        print(f"packed {store.pack(folder, args.file)} kernels into {args.file}")
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
    info = actions.add_parser("info", help="show the folder's contents")
    info.add_argument("--json", action="store_true", help="as JSON")
    for name, about in (
        ("pack", "write all kernels to FILE"),
        ("unpack", "add the kernels of FILE"),
    ):
        action = actions.add_parser(name, help=about)
        action.add_argument("file", type=Path, metavar="FILE")
    actions.add_parser("clear", help="remove all kernels")
    return parser


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
