"""Results of a run against a server, under the names that comparable benchmarks use."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.cli.bench.client import RequestResult
from quire.cli.bench.report import encode_json, percentile
from quire.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of what is measured and where the result is written."""
    group = parser.add_argument_group("result")
    group.add_argument(
        "--percentile-metrics", default=",".join(METRICS), help="metrics: ttft,tpot,itl,e2el"
    )
    group.add_argument("--metric-percentiles", default="50,90,99", help="percentiles of each")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS",
        help="count requests within all of these limits, in ms: ttft:200 tpot:50 e2el:3000",
    )  # fmt: skip
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument(
        "--save-detailed", action="store_true", help="write every request to the JSON"
    )
    group.add_argument("--append-result", action="store_true", help="append a line to the file")
    group.add_argument("--result-dir", metavar="FOLDER")
    group.add_argument("--result-filename", metavar="FILE")
    group.add_argument(
        "--metadata", nargs="+", default=[], metavar="NAME=VALUE", help="further fields of the JSON"
    )
    group.add_argument("--label", help="the same as --metadata label=...")


def parse_slo_limits(words: Iterable[str]) -> dict[str, float]:
    """Parse METRIC:MS words to a table. Raises ConfigError."""
    found: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput takes METRIC:MS, got {word!r}") from None
        if name not in ("ttft", "tpot", "e2el") or found[name] < 0:
            raise ConfigError(f"--goodput takes ttft, tpot and e2el, in ms >= 0; got {word!r}")
    return found


def parse_percentiles(text: str) -> list[float]:
    """Parse numbers with commas. Raises ConfigError."""
    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        raise ConfigError(f"--metric-percentiles takes 50,90,99; got {text!r}") from None
    if not all(0 <= one <= 100 for one in found):
        raise ConfigError(f"--metric-percentiles must be in [0, 100], got {text!r}")
    return found


def parse_metrics(text: str) -> list[str]:
    """Parse names with commas. Raises ConfigError."""
    found = [one.strip() for one in text.split(",") if one.strip()]
    if not set(found) <= set(METRICS):
        raise ConfigError(f"--percentile-metrics takes {', '.join(METRICS)}; got {text!r}")
    return found


def summarize(
    answers: Sequence[RequestResult],
    seconds: float,
    wanted: Sequence[float],
    metrics: Sequence[str] = METRICS,
    limits: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The metrics of a run."""
    good = [one for one in answers if one.error is None]
    read = sum(one.prompt_tokens for one in good)
    output_tokens = sum(one.output_tokens for one in good)
    kept = [one for one in good if _meets_slo(one, limits)] if limits else None
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": read,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / seconds,
        "request_goodput": None if kept is None else len(kept) / seconds,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (read + output_tokens) / seconds,
        "max_output_tokens_per_s": _peak_output_throughput(good),
        "max_concurrent_requests": _peak_concurrency(good),
        "errors": sorted({one.error for one in answers if one.error is not None})[:10],
    }
    for name in metrics:
        found |= _metric_summary(
            name, [v * 1e3 for one in good for v in one.metric_values(name)], wanted
        )
    return found


def _metric_summary(
    name: str, values: Sequence[float], wanted: Sequence[float]
) -> dict[str, float]:
    mean = sum(values) / len(values) if values else float("nan")
    spread = sum((v - mean) ** 2 for v in values) / len(values) if values else float("nan")
    found = {f"mean_{name}_ms": mean, f"median_{name}_ms": percentile(values, 50)}
    found[f"std_{name}_ms"] = spread**0.5
    return found | {f"p{q:g}_{name}_ms": percentile(values, q) for q in wanted}


def _meets_slo(answer: RequestResult, limits: Mapping[str, float]) -> bool:
    """Whether no time of the request exceeds its limit. A missing time counts as within it."""
    return all(v * 1e3 <= most for name, most in limits.items() for v in answer.metric_values(name))


def _peak_output_throughput(answers: Iterable[RequestResult]) -> float:
    """Return the most tokens in one second; a request's are spread evenly over its chunks."""
    counts: defaultdict[int, float] = defaultdict(float)
    for one in answers:
        for at in one.chunks_at:
            counts[int(at)] += one.output_tokens / len(one.chunks_at)
    return max(counts.values(), default=0.0)


def _peak_concurrency(answers: Iterable[RequestResult]) -> int:
    ends = [(one.chunks_at[-1], -1) for one in answers if one.chunks_at]
    begins = [(one.sent_at, 1) for one in answers if one.chunks_at]
    now = most = 0
    for _, change in sorted(ends + begins):
        now += change
        most = max(most, now)
    return most


def build_request_columns(answers: Sequence[RequestResult], began: float) -> dict[str, Any]:
    """Return every request, as columns. `errors` has one entry per request."""
    first = [next(iter(one.metric_values("ttft")), None) for one in answers]
    return {
        "input_lens": [one.prompt_tokens for one in answers],
        "output_lens": [one.output_tokens for one in answers],
        "ttfts": first,
        "itls": [one.metric_values("itl") for one in answers],
        "latencies": [next(iter(one.metric_values("e2el")), None) for one in answers],
        "start_times": [one.sent_at - began for one in answers],
        "queue_times": [one.sent_at - one.scheduled_at for one in answers],
        "generated_texts": [one.text for one in answers],
        "errors": [one.error or "" for one in answers],
    }


def save_result(found: Mapping[str, Any], args: argparse.Namespace) -> Path | None:
    """Write the result as the flags request. Returns the file, or None without one."""
    if not (args.save_result or args.append_result or args.result_filename):
        return None
    path = Path(args.result_dir or ".") / (args.result_filename or _result_file_name(found))
    text = encode_json(found, indent=None if args.append_result else 2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if args.append_result else "w", encoding="utf-8") as into:
            into.write(text + "\n")
    except OSError as error:
        raise ConfigError(f"--result-filename {path}: {error.strerror or error}") from None
    return path


def _result_file_name(found: Mapping[str, Any]) -> str:
    """Return the default file name, backend-rate-model-date.json."""
    model = str(found["model_id"]).replace("/", "_")
    return f"{found['backend']}-{found['request_rate']}qps-{model}-{found['date']}.json"


def describe_run(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Describe the run for later readers of the result. Raises ConfigError."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": args.request_rate if args.request_rate < float("inf") else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    pairs = [*args.metadata, *([f"label={args.label}"] if args.label else [])]
    for word in pairs:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--metadata takes NAME=VALUE, got {word!r}")
        found[name] = value
    return found
