"""quire bench latency --model MODEL: runs one batch repeatedly, offline.

Prompts are random token ids; every answer has exactly --output-len tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quire.cli.bench.report import add_json, percentiles, print_table, write_json
from quire.cli.bench.workload import (
    SampleRequest,
    add_workload_flags,
    build_requests,
    check_workload,
)
from quire.config.command_line.option_parser import OptionParser, add_options, options_from
from quire.core.params import BeamSearchParams, SamplingParams
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.llm import LLM


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.batch_size < 1 or args.num_iters < 1 or args.num_iters_warmup < 0:
        raise ConfigError("--batch-size and --num-iters must be >= 1, and --num-iters-warmup >= 0")
    args.num_prompts = args.batch_size
    check_workload(args)
    from quire.llm import LLM

    llm = LLM.from_engine_args(options_from(args))
    work = build_requests(args, llm.llm_engine.config.model.vocab)
    run = _build_runner(llm, work, args)
    for _ in range(args.num_iters_warmup):
        run()
    latencies = [_time_run(run) for _ in range(args.num_iters)]
    mean = sum(latencies) / len(latencies)
    output_tokens = sum(item.output_len for item in work) * args.n
    found = {
        "avg_latency": mean,
        "latencies": latencies,
        "percentiles": percentiles(latencies),
        "output_tokens_per_second": output_tokens / mean,
    }
    print_table(
        f"{args.batch_size} x ({args.input_len} in, {args.output_len or 128} out)",
        [
            ("mean", f"{mean * 1e3:.2f} ms"),
            *((f"p{q}", f"{s * 1e3:.2f} ms") for q, s in percentiles(latencies).items()),
            ("output", f"{output_tokens / mean:.1f} tok/s"),
        ],
    )
    write_json(found, args.output_json)
    return 0


def _parser() -> OptionParser:
    parser = OptionParser(prog="quire bench latency", usage="%(prog)s --model MODEL [options]")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--n", type=int, default=1, help="answers per prompt (the number of beams)")
    parser.add_argument("--num-iters-warmup", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=30)
    parser.add_argument("--use-beam-search", action="store_true")
    parser.add_argument("--disable-detokenize", action="store_true")
    add_workload_flags(parser, prompts=8)
    parser.set_defaults(input_len=32)
    add_json(parser)
    add_options(parser)
    return parser


def _time_run(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _build_runner(
    llm: LLM, work: Sequence[SampleRequest], args: argparse.Namespace
) -> Callable[[], Any]:
    prompts = [_prompt(item) for item in work]
    if args.use_beam_search:
        beams = BeamSearchParams(args.n, max_tokens=args.output_len or 128, ignore_eos=True)
        return lambda: llm.beam_search(prompts, beams)
    params = [
        SamplingParams(
            n=args.n,
            temperature=1.0 if args.n > 1 else 0.0,
            ignore_eos=True,
            max_tokens=item.output_len,
            detokenize=not args.disable_detokenize,
        )
        for item in work
    ]
    return lambda: llm.generate(prompts, params, use_tqdm=False)


def _prompt(item: SampleRequest) -> Any:
    if isinstance(item.prompt, str):
        return {"prompt": item.prompt}
    return {"prompt_token_ids": list(item.prompt)}
