"""quire bench BENCHMARK: measures an engine or a server. Each is a module with `main(argv)`.

    latency       one batch again and again: seconds from the prompts to the last token
    throughput    many prompts at once, offline: tokens per second
    startup       seconds from a new process to a ready engine, cold and warm
    serve         load on a running server: time to first token, time per token, throughput

Each prints a table, and with --output-json FILE ("-": standard output) writes its results.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

KINDS = ("latency", "throughput", "startup", "serve")


def main(argv: Sequence[str]) -> int:
    """Run one benchmark. Returns its exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    if argv[0] not in KINDS:
        print(
            f"quire bench: no benchmark {argv[0]!r}; there are {', '.join(KINDS)}", file=sys.stderr
        )
        return 2
    return int(importlib.import_module(f"quire.cli.bench.{argv[0]}").main(argv[1:]))
