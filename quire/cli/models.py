"""quire models [NAME]: prints the known architectures, how each is served, and why some are not."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from quire.config.architectures import (
    Architecture,
    find_architectures,
    similar_names,
)

FAILED = 1
CONVERTED = (
    "generate: decoders also pool, with --runner pooling --convert embed or classify; "
    "pooling: encoders, of every class with or without a head that classifies"
)
EXACT = (
    "native and transformers: log-probabilities are those of transformers within 1e-4 "
    "(tests/cpu/models, tests/cpu/models/fallback)"
)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="quire models", description=__doc__)
    parser.add_argument(
        "name", nargs="?", default="", metavar="NAME", help="part of an architecture or model type"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    args = parser.parse_args(argv)
    rows = find_architectures(args.name)
    if not rows:
        near = similar_names(args.name)
        hint = f"did you mean {' or '.join(near)}?" if near else "`quire models` lists all"
        print(f"quire models: no known architecture has {args.name!r:.80}; {hint}", file=sys.stderr)
        return FAILED
    print(json.dumps([_as_dict(one) for one in rows], indent=2) if args.json else as_text(rows))
    return 0


def as_text(rows: Sequence[Architecture]) -> str:
    """Format one line per architecture, and the counts."""
    name = max(len(one.name) for one in rows)
    kind = max(len(one.model_type) for one in rows)
    lines = [
        f"{one.name:<{name}}  {one.model_type:<{kind}}  {one.served:<12}  {_purpose(one):<8}  "
        f"{one.note}".rstrip()
        for one in rows
    ]
    counts = [
        f"{count} {served}"
        for served in ("native", "transformers", "refused")
        if (count := sum(one.served == served for one in rows))
    ]
    return "\n".join([*lines, "", ", ".join(counts), CONVERTED, EXACT])


def _purpose(row: Architecture) -> str:
    return "generate" if "generate" in row.tasks else "pooling" if row.tasks else ""


def _as_dict(row: Architecture) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "tested": row.tested}
