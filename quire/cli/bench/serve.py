"""quire bench serve --model NAME: load on a running OpenAI-compatible server.

Requests start at --request-rate a second (inf: at once), at most --max-concurrency at a time, and
stream. TTFT: request sent to first chunk with text. ITL: the gap between chunks. TPOT: (last chunk
- first) / (output tokens - 1). E2EL: request sent to last chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from quire.cli.bench.client import Answer, ask, session
from quire.cli.bench.report import add_json, percentile, show, write
from quire.cli.bench.workload import Item, add_workload, items
from quire.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.request_rate <= 0 or args.burstiness <= 0:
        raise ConfigError("--request-rate and --burstiness must be > 0")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be >= 1, got {args.max_concurrency}")
    work = items(args, args.vocab_size)
    answers, seconds = asyncio.run(_load(args, work))
    found = summary(answers, seconds, [float(q) for q in args.metric_percentiles.split(",")])
    if args.save_detailed:
        found |= _detail(answers)
    _print(found)
    write(found, args.output_json)
    return 1 if found["completed"] == 0 else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quire bench serve", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--base-url", default=None, help="default: http://HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--endpoint", choices=["/v1/completions", "/v1/chat/completions"], default="/v1/completions"
    )
    parser.add_argument("--model", required=True, help="the name the server gives the model")
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--request-rate", type=float, default=float("inf"))
    parser.add_argument(
        "--burstiness", type=float, default=1.0, help="1: Poisson; more: more even; less: burstier"
    )
    parser.add_argument("--max-concurrency", type=int, default=None)
    parser.add_argument("--num-warmups", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--no-ignore-eos", dest="ignore_eos", action="store_false")
    parser.add_argument("--vocab-size", type=int, default=100_000, help="random ids lie below it")
    parser.add_argument("--metric-percentiles", default="50,90,99")
    parser.add_argument("--save-detailed", action="store_true", help="every request in the JSON")
    add_workload(parser, prompts=1000)
    add_json(parser)
    return parser


async def _load(args: argparse.Namespace, work: Sequence[Item]) -> tuple[list[Answer], float]:
    url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/") + args.endpoint
    seats = asyncio.Semaphore(args.max_concurrency or len(work))
    rng = random.Random(args.workload_seed)
    async with session(args.api_key) as http:

        async def one(item: Item) -> Answer:
            async with seats:
                return await ask(http, url, args.model, item, args)

        for item in work[: args.num_warmups]:
            warm = await one(item)
            if warm.error is not None:
                raise ConfigError(f"{url} does not answer: {warm.error}")
        began = time.perf_counter()
        tasks = []
        for item in work:
            tasks.append(asyncio.create_task(one(item)))
            if args.request_rate != float("inf"):
                scale = 1 / (args.request_rate * args.burstiness)
                await asyncio.sleep(rng.gammavariate(args.burstiness, scale))
        answers = await asyncio.gather(*tasks)
        return list(answers), time.perf_counter() - began


def summary(answers: Sequence[Answer], seconds: float, wanted: Sequence[float]) -> dict[str, Any]:
    """The figures of a run, under the names that tools for such results know."""
    good = [one for one in answers if one.error is None]
    read = sum(one.prompt_tokens for one in good)
    made = sum(one.output_tokens for one in good)
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": read,
        "total_output_tokens": made,
        "request_throughput": len(good) / seconds,
        "output_throughput": made / seconds,
        "total_token_throughput": (read + made) / seconds,
        "errors": sorted({one.error for one in answers if one.error is not None})[:10],
    }
    for name in METRICS:
        values = [v * 1e3 for one in good for v in one.times(name)]
        mean = sum(values) / len(values) if values else float("nan")
        found[f"mean_{name}_ms"] = mean
        found[f"median_{name}_ms"] = percentile(values, 50)
        spread = sum((v - mean) ** 2 for v in values) / len(values) if values else float("nan")
        found[f"std_{name}_ms"] = spread**0.5
        found |= {f"p{q:g}_{name}_ms": percentile(values, q) for q in wanted}
    return found


def _detail(answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "input_lens": [one.prompt_tokens for one in answers],
        "output_lens": [one.output_tokens for one in answers],
        "ttfts": [next(iter(one.times("ttft")), None) for one in answers],
        "itls": [one.times("itl") for one in answers],
    }


def _print(found: dict[str, Any]) -> None:
    rows = [
        ("completed / failed", f"{found['completed']} / {found['failed']}"),
        ("requests", f"{found['request_throughput']:.2f} /s"),
        ("output", f"{found['output_throughput']:,.1f} tok/s"),
        ("in and out", f"{found['total_token_throughput']:,.1f} tok/s"),
    ]
    for name in METRICS:
        marks = [key for key in found if key.startswith("p") and key.endswith(f"_{name}_ms")]
        cells = [f"{key.split('_')[0]} {found[key]:.2f}" for key in marks]
        rows.append(
            (f"{name.upper()}, ms", f"mean {found[f'mean_{name}_ms']:.2f}, " + ", ".join(cells))
        )
    show(f"{found['duration']:.2f} s of load", rows)
    for error in found["errors"]:
        print(f"failed: {error}", file=sys.stderr)
