"""quire bench startup --model MODEL: measures seconds from a new process to a ready engine.

Each round is a new process. Cold: the folder of compiled kernels is empty. Warm: it has the kernels
of the previous round. The file system's cache is not changed. A report splits the time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from quire import env
from quire.cli.bench.report import add_json, percentile, print_table, write_json
from quire.config.command_line.option_parser import OptionParser, add_options, flat_options_from
from quire.errors import ConfigError, QuireError

CHILD_SCRIPT = """
import json, sys, time
began = time.perf_counter()
import quire
from quire import LLM
imported = time.perf_counter()
from quire.config.options import Options
llm = LLM.from_engine_args(Options.from_flat(json.loads(sys.argv[1])))
ready = time.perf_counter()
print(json.dumps({"import_s": imported - began, "init_s": ready - imported,
                  "parts_s": dict(llm.llm_engine.built.seconds)}))
"""


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.num_iters_cold < 0 or args.num_iters_warm < 0:
        raise ConfigError("--num-iters-cold and --num-iters-warm must be >= 0")
    flat = {name: value for name, value in flat_options_from(args).items() if value is not None}
    rounds: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.num_iters_cold):
            rounds["cold"].append(measure_startup(flat, f"{folder}/cold{i}"))
        for i in range(args.num_iters_warm + 1 if args.num_iters_warm else 0):
            found = measure_startup(flat, f"{folder}/warm")
            if i:  # the first fills the folder
                rounds["warm"].append(found)
    for kind, found_all in rounds.items():
        if found_all:
            _print_rounds(kind, found_all)
    write_json(rounds, args.output_json)
    return 0


def _parser() -> OptionParser:
    parser = OptionParser(prog="quire bench startup", usage="%(prog)s --model MODEL [options]")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--num-iters-cold", type=int, default=3)
    parser.add_argument("--num-iters-warm", type=int, default=3)
    add_json(parser)
    add_options(parser)
    return parser


def measure_startup(flat: dict[str, Any], cache: str) -> dict[str, Any]:
    """Return the report of one process, and `process_s` from its start to its end."""
    began = time.perf_counter()
    child = subprocess.run(
        [sys.executable, "-c", CHILD_SCRIPT, json.dumps(flat)],
        env=env.child_environment(QUIRE_CACHE=cache),
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise QuireError(f"the engine did not start: {last}")
    found: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
    return {**found, "process_s": seconds}


def _print_rounds(kind: str, rounds: Sequence[dict[str, Any]]) -> None:
    def middle(values: Sequence[float]) -> str:
        return f"{percentile(values, 50):.2f} s"

    names = ("import_s", "init_s", "process_s")
    rows = [(name[:-2], middle([one[name] for one in rounds])) for name in names]
    rows += [
        (f"  {name}", middle([one["parts_s"].get(name, 0.0) for one in rounds]))
        for name in rounds[0]["parts_s"]
    ]
    print_table(f"start-up, {kind} (medians of {len(rounds)})", rows)
