"""quire bench throughput --model MODEL: runs many prompts at once, offline.

Every answer has exactly --output-len tokens (ignore_eos). The prompts are random token ids, or
read from a file. A short round before the measured one warms caches and graphs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from quire.cli.bench.report import add_json, print_table, write_json
from quire.cli.bench.workload import (
    SampleRequest,
    add_workload_flags,
    build_requests,
    check_workload,
)
from quire.config.command_line.option_parser import OptionParser, add_options, options_from
from quire.core.params import SamplingParams

WARMUP_DIVISOR = 8
"""The warm-up round has this fraction of the prompts."""


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    check_workload(args)
    from quire.llm import LLM

    llm = LLM.from_engine_args(options_from(args))
    work = build_requests(args, llm.llm_engine.config.model.vocab)
    if not args.no_warmup:
        _run_batch(llm, work[: max(1, len(work) // WARMUP_DIVISOR)], args)
    began = time.perf_counter()
    outputs = _run_batch(llm, work, args)
    seconds = time.perf_counter() - began
    read = sum(len(output.prompt_token_ids or ()) for output in outputs)
    output_tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    found = {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": read + output_tokens,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": (read + output_tokens) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
    }
    print_table(
        f"{len(outputs)} requests in {seconds:.2f} s",
        [
            ("requests", f"{len(outputs) / seconds:.2f} /s"),
            ("tokens in and out", f"{(read + output_tokens) / seconds:,.1f} /s"),
            ("tokens out", f"{output_tokens / seconds:,.1f} /s"),
        ],
    )
    write_json(found, args.output_json)
    return 0


def _parser() -> OptionParser:
    parser = OptionParser(prog="quire bench throughput", usage="%(prog)s --model MODEL [options]")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--n", type=int, default=1, help="answers per prompt")
    parser.add_argument("--no-warmup", action="store_true", help="measure the first round")
    parser.add_argument("--disable-detokenize", action="store_true")
    add_workload_flags(parser, prompts=1000)
    add_json(parser)
    add_options(parser)
    return parser


def _run_batch(llm: Any, work: Sequence[SampleRequest], args: argparse.Namespace) -> list[Any]:
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
    prompts = [
        {"prompt": item.prompt}
        if isinstance(item.prompt, str)
        else {"prompt_token_ids": list(item.prompt)}
        for item in work
    ]
    return list(llm.generate(prompts, params, use_tqdm=False))
