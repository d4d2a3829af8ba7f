"""quire quantize MODEL OUT --to FORMAT: writes a quantized copy of a model that other engines read.

int4, int8, w8a8, fp8, fp8_block, mxfp4 and nvfp4 are written as compressed-tensors; Q4_K_M and the
other names of GGUF types as one GGUF file. With --data FILE the rounding is chosen for the
activations of its texts (GPTQ, AWQ). An interrupted run continues when it is started again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.config.memory.memory_plan import gib
from quire.quantize.options import ALGORITHMS, QuantizeOptions
from quire.quantize.out_folder import REPORT
from quire.quantize.run import QuantizePlan, make_plan, quantize_model
from quire.quantize.schemes import FORMATS

INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    args = vars(_parser().parse_args(argv))
    dry_run, quiet = args.pop("dry_run"), args.pop("quiet")
    as_json = args.pop("json")
    options = QuantizeOptions(**args | {"ignore": tuple(args["ignore"])})
    if dry_run:
        plan = make_plan(options)
        print(json.dumps(_plan_json(plan), indent=2)) if as_json else print_plan(options, plan)
        return 0
    try:
        report = quantize_model(options, progress=not quiet)
    except KeyboardInterrupt:
        print(
            f"interrupted; the same command continues with what is in {options.out}",
            file=sys.stderr,
        )
        return INTERRUPTED
    if as_json:
        print(json.dumps(report, indent=2))
    elif not quiet:
        print_report(options, report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire quantize", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="folder or hub name of an unquantized model")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder, new or empty")
    parser.add_argument("--to", required=True, metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--bits", type=int, help="of int4 and int8: 2, 3, 4, 5, 6 or 8")
    parser.add_argument(
        "--group-size", type=int, help="of int4 and int8: inputs that share a scale; -1: all (128)"
    )
    parser.add_argument(
        "--asymmetric", dest="symmetric", action="store_false", help="give each group a zero too"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FILE",
        help="texts for calibration: .txt, or .jsonl with text or messages in each line",
    )  # fmt: skip
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, help="with --data: gptq for int4 and int8, else rtn"
    )
    parser.add_argument("--samples", type=int, default=128, help="sequences of --data (128)")
    parser.add_argument("--seqlen", type=int, default=512, help="tokens of a sequence (512)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of sequences (0)")
    parser.add_argument(
        "--act-order", action="store_true", help="GPTQ: inputs of large activations first"
    )
    parser.add_argument("--damp", type=float, default=0.01, help="GPTQ: damping (0.01)")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="PATTERN",
        help="leave matrices unquantized: a run of name components, or re: and a pattern; again "
        "for more",
    )  # fmt: skip
    parser.add_argument("--lm-head", action="store_true", help="quantize the output head too")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dry-run", action="store_true", help="print the sizes, write nothing")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no table")
    return parser


def _plan_json(plan: QuantizePlan) -> dict[str, Any]:
    tensors = {name: {"type": kind, "bytes": size} for name, (kind, size) in plan.sizes.items()}
    return {
        "source_bytes": plan.source_bytes,
        "out_bytes": plan.out_bytes,
        "plain": plan.plain,
        "tensors": tensors,
    }


def print_plan(options: QuantizeOptions, plan: QuantizePlan) -> None:
    """Print the sizes by type."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{options.model} to {options.to}")
    for name in ("type", "tensors", "size"):
        table.add_column(name, justify="left" if name == "type" else "right")
    kinds: dict[str, list[int]] = {}
    for kind, size in plan.sizes.values():
        kinds.setdefault(kind, []).append(size)
    for kind, sizes in sorted(kinds.items()):
        table.add_row(kind, str(len(sizes)), gib(sum(sizes)))
    Console().print(table)
    for reason, count in _counts(plan.plain).items():
        print(f"unquantized: {count} matrices, {reason}")
    print(f"{gib(plan.source_bytes)} become {gib(plan.out_bytes)}")


def print_report(options: QuantizeOptions, report: Mapping[str, Any]) -> None:
    """Print the errors of each layer: the mean over its matrices, and the worst of them."""
    from rich.console import Console
    from rich.table import Table

    errors: Mapping[str, Mapping[str, Any]] = report["errors"]
    with_outputs = any("output_error" in one for one in errors.values())
    kinds = ["weight_error", *(["output_error"] if with_outputs else [])]
    table = Table(title=f"{options.to}: relative squared errors")
    table.add_column("layer")
    for kind in kinds:
        table.add_column(kind.replace("_", " "), justify="right")
    table.add_column("worst matrix")
    for number, names in _by_layer(errors).items():
        means = [_mean([errors[name].get(kind) for name in names]) for kind in kinds]
        worst = max(names, key=lambda name: errors[name].get(kinds[-1]) or 0.0)
        value = errors[worst].get(kinds[-1]) or 0.0
        table.add_row(number, *means, f"{worst.removesuffix('.weight')} {value:.2e}")
    Console().print(table)
    for reason, count in _counts(report["plain"]).items():
        print(f"unquantized: {count} matrices, {reason}")
    print(f"{gib(report['source_bytes'])} became {gib(report['out_bytes'])} in {options.out}")
    print(f"all errors: {options.out / REPORT}")


def _by_layer(errors: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, one in errors.items():
        found.setdefault("head" if one["layer"] is None else str(one["layer"]), []).append(name)
    return found


def _mean(values: Sequence[float | None]) -> str:
    there = [value for value in values if value is not None]
    return f"{sum(there) / len(there):.2e}" if there else ""


def _counts(plain: Mapping[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for reason in plain.values():
        found[reason] = found.get(reason, 0) + 1
    return found
