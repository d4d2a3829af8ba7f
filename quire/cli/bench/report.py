"""Reports of benchmarks: percentiles, a table for people, JSON for programs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from quire.errors import ConfigError

PERCENTILES = (10, 25, 50, 75, 90, 99)


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile (0 to 100), linearly interpolated. NaN for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    at = (len(ordered) - 1) * q / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def percentiles(values: Sequence[float], wanted: Iterable[float] = PERCENTILES) -> dict[str, float]:
    """Return percentiles by name ("50": the median), because JSON keys are text."""
    return {f"{q:g}": percentile(values, q) for q in wanted}


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output-json", "--json", metavar="FILE", type=_output_file, help='"-": standard output'
    )


def _output_file(name: str) -> str:
    """Refuse a file that cannot be written before anything is measured."""
    folder = Path(name).parent
    if not folder.is_dir() or Path(name).is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {name}: not a file in a folder that exists")
    return name


def write_json(found: Mapping[str, object], to: str | None) -> None:
    """Write the result as JSON, if requested."""
    if to is None:
        return
    text = encode_json(found, indent=2)
    if to == "-":
        print(text)
        return
    try:
        Path(to).write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"--output-json {to}: {error.strerror or error}") from None


def encode_json(found: Mapping[str, object], *, indent: int | None = None) -> str:
    """Format as JSON with null for NaN, which JSON does not have."""
    plain = {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in found.items()
    }
    return json.dumps(plain, indent=indent)


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a table to stderr, so that JSON can have standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    table.add_column("what", style="bold")
    table.add_column("how much", justify="right")
    for row in rows:
        table.add_row(*row)
    Console(file=sys.stderr).print(table)
