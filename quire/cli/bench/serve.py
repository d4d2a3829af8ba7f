"""quire bench serve: loads a running OpenAI-compatible server.

Requests start at --request-rate a second (inf: at once), at most --max-concurrency at a time, and
stream. TTFT: request sent to first chunk with text. ITL: the gap between chunks. TPOT: (last chunk
- first) / (output tokens - 1). E2EL: request sent to last chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from quire.cli.bench.arrivals import INF, RequestRate, compute_start_times
from quire.cli.bench.client import (
    BenchEndpoint,
    RequestResult,
    find_model,
    open_session,
    post_command,
    send_request,
    wait_ready,
)
from quire.cli.bench.report import add_json, print_table, write_json
from quire.cli.bench.result import (
    add_result_flags,
    build_request_columns,
    describe_run,
    parse_metrics,
    parse_percentiles,
    parse_slo_limits,
    save_result,
    summarize,
)
from quire.cli.bench.workload import (
    SampleRequest,
    add_workload_flags,
    build_requests,
    check_workload,
    decode_prompts,
)
from quire.config.command_line.option_parser import OptionParser
from quire.errors import ConfigError

ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "quire": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
SMALL_VOCABULARY = 32_000
"""Token ids that nearly every model has, for servers that do not list a vocabulary size."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
            "repetition_penalty")  # fmt: skip


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be >= 1, got {args.max_concurrency}")
    wanted, metrics = (
        parse_percentiles(args.metric_percentiles),
        parse_metrics(args.percentile_metrics),
    )
    limits = parse_slo_limits(args.goodput)
    rate = RequestRate(
        args.request_rate, args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps
    )
    check_workload(args)
    rng = random.Random(args.workload_seed)
    times = compute_start_times(args.num_prompts, rate, args.burstiness, rng)
    extra = _extra_body_fields(args)
    describe_run(args, "")  # errors are reported before the load
    answers, began, seconds, model = asyncio.run(_run_benchmark(args, times, extra))
    found = describe_run(args, model) | summarize(answers, seconds, wanted, metrics, limits)
    _print_result(found, metrics)
    if args.save_detailed:
        found |= build_request_columns(answers, began)
    write_json(found, args.output_json)
    path = save_result(found, args)
    if path is not None:
        print(f"written to {path}", file=sys.stderr)
    return 1 if found["completed"] == 0 else 0


def parser() -> OptionParser:
    """Return the parser of `quire bench serve`."""
    parser = OptionParser(prog="quire bench serve", usage="%(prog)s [options]")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    _add_endpoint_flags(parser)
    group = parser.add_argument_group("load")
    group.add_argument("--request-rate", type=float, default=INF, help="requests per second")
    group.add_argument(
        "--burstiness", type=float, default=1.0, help="1: Poisson; more: more even; less: burstier"
    )
    group.add_argument("--ramp-up-strategy", choices=["linear", "exponential"])
    group.add_argument("--ramp-up-start-rps", type=float, default=0.0, help="rate at the start")
    group.add_argument("--ramp-up-end-rps", type=float, default=0.0, help="rate at the end")
    group.add_argument("--max-concurrency", type=int, default=None, help="most requests at once")
    group.add_argument("--num-warmups", type=int, default=1, help="unmeasured requests before")
    group.add_argument("--profile", action="store_true", help="run the server's profiler meanwhile")
    _add_body_flags(parser)
    add_workload_flags(parser, prompts=1000, seed=("--seed",))
    add_result_flags(parser)
    add_json(parser)
    return parser


def _add_endpoint_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", choices=list(ENDPOINTS), default=None, help="API of the server")
    group.add_argument("--base-url", default=None, help="default: http://HOST:PORT")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument("--endpoint", choices=sorted(set(ENDPOINTS.values())), default=None)
    group.add_argument("--header", nargs="+", default=[], metavar="NAME=VALUE")
    group.add_argument("--api-key", default=None, help="default: OPENAI_API_KEY")
    group.add_argument("--insecure", action="store_true", help="do not verify TLS certificates")
    group.add_argument("--model", default=None, help="default: the server's first model")
    group.add_argument(
        "--served-model-name", default=None, help="model name in requests, if another"
    )
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0, help="seconds to wait for the server"
    )
    group.add_argument(
        "--tokenizer", default=None, help="folder or name: send random prompts as text made with it"
    )
    group.add_argument(
        "--vocab-size", type=int, default=None,
        help=f"random ids are below it; default: the server's, or {SMALL_VOCABULARY}",
    )  # fmt: skip


def _add_body_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    for name in SAMPLING:
        default = 0.0 if name == "temperature" else None
        kind = int if name == "top_k" else float
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    group.add_argument("--logprobs", type=int, default=None)
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="generate exactly --output-len tokens per answer; this is the default",
    )  # fmt: skip
    group.add_argument("--extra-body", metavar="JSON", default=None, help="further body fields")


def _extra_body_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of every body. Raises ConfigError."""
    given = {name: getattr(args, name) for name in SAMPLING}
    extra = {name: value for name, value in given.items() if value is not None}
    extra["ignore_eos"] = args.ignore_eos
    if args.logprobs is not None:
        is_chat = _resolve_endpoint(args).endswith("/chat/completions")
        extra |= (
            {"logprobs": True, "top_logprobs": args.logprobs}
            if is_chat
            else {"logprobs": args.logprobs}
        )
    try:
        more = json.loads(args.extra_body or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(more, dict):
        raise ConfigError("--extra-body must be a JSON object")
    return extra | more


def _resolve_endpoint(args: argparse.Namespace) -> str:
    """Return the request path: the given one, or the backend's. Sets the backend too."""
    if args.backend is None:
        args.backend = "openai-chat" if "/chat/" in (args.endpoint or "") else "openai"
    endpoint = args.endpoint or ENDPOINTS[args.backend]
    if endpoint != ENDPOINTS[args.backend]:
        raise ConfigError(f"--backend {args.backend} uses {ENDPOINTS[args.backend]}")
    return str(endpoint)


async def _run_benchmark(
    args: argparse.Namespace,
    times: Sequence[float],
    extra: dict[str, Any],
) -> tuple[list[RequestResult], float, float, str]:
    """Return the answers, when the load began, how long it took, and the model's name."""
    base = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    endpoint = _resolve_endpoint(args)
    async with open_session(args.api_key, args.header, insecure=args.insecure) as http:
        await wait_ready(http, base, args.ready_check_timeout_sec)
        found = await find_model(http, base, args.served_model_name or args.model)
        model, vocab = found.name, args.vocab_size or found.vocab_size or SMALL_VOCABULARY
        work = decode_prompts(build_requests(args, vocab), args.tokenizer)
        target = BenchEndpoint(http, base + endpoint, model, extra)
        for item in work[: args.num_warmups]:
            warm = await send_request(target, item, time.perf_counter())
            if warm.error is not None:
                raise ConfigError(f"{target.url} does not answer: {warm.error}")
        if args.profile:
            await post_command(http, f"{base}/start_profile")
        began = time.perf_counter()
        answers = await _send_load(target, work, [began + at for at in times], args.max_concurrency)
        seconds = time.perf_counter() - began
        if args.profile:
            await post_command(http, f"{base}/stop_profile")
        return answers, began, seconds, model


async def _send_load(
    target: BenchEndpoint, work: Sequence[SampleRequest], due: Sequence[float], at_once: int | None
) -> list[RequestResult]:
    seats = asyncio.Semaphore(at_once or len(work))

    async def one(item: SampleRequest, at: float) -> RequestResult:
        async with seats:
            return await send_request(target, item, at)

    tasks = []
    for item, at in zip(work, due):
        wait = at - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(item, at)))
    return list(await asyncio.gather(*tasks))


def _print_result(found: dict[str, Any], metrics: Sequence[str]) -> None:
    rows = [
        ("completed / failed", f"{found['completed']} / {found['failed']}"),
        ("requests", f"{found['request_throughput']:.2f} /s"),
        ("output", f"{found['output_throughput']:,.1f} tok/s"),
        ("in and out", f"{found['total_token_throughput']:,.1f} tok/s"),
        ("most at once", str(found["max_concurrent_requests"])),
    ]
    if found["request_goodput"] is not None:
        rows.append(("goodput", f"{found['request_goodput']:.2f} /s"))
    for name in metrics:
        marks = [key for key in found if key.startswith("p") and key.endswith(f"_{name}_ms")]
        cells = [f"{key.split('_')[0]} {found[key]:.2f}" for key in marks]
        rows.append(
            (f"{name.upper()}, ms", f"mean {found[f'mean_{name}_ms']:.2f}, " + ", ".join(cells))
        )
    print_table(f"{found['duration']:.2f} s of load", rows)
    for error in found["errors"]:
        print(f"failed: {error}", file=sys.stderr)
