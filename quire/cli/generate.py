"""quire generate PROMPT... --model MODEL: complete prompts in this process.

One prompt is printed as it is generated; several run as one batch. "-" reads a prompt from stdin.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from quire.cli.sampling import (
    add_sampling_flags,
    has_max_tokens,
    params_from_args,
    quiet_engine_options,
)
from quire.config.command_line.option_parser import OptionParser, add_options, options_from
from quire.core.params import SamplingParams

MAX_TOKENS = 256
"""A base model may never generate an end token."""


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    texts = [sys.stdin.read() if text == "-" else text for text in args.prompt]
    # Imported after the arguments are checked, because it takes a second
    from quire.llm import LLM

    llm = LLM.from_engine_args(options_from(args, quiet_engine_options(args)))
    params = params_from_args(args, llm.get_default_sampling_params())
    if not has_max_tokens(args, llm):
        params.max_tokens = MAX_TOKENS
    if args.json or len(texts) > 1 or params.n > 1:
        return _run_batch(llm, texts, params, as_json=args.json, stats=args.stats)
    return _stream_one(llm, texts[0], params, stats=args.stats)


def parser() -> OptionParser:
    """Return the parser of `quire generate`."""
    parser = OptionParser(prog="quire generate", usage="%(prog)s PROMPT... [options]")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("prompt", nargs="+", metavar="PROMPT", help='text, or "-" for stdin')
    parser.add_argument("--stats", action="store_true", help="print the speed to stderr")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt")
    add_sampling_flags(parser)
    add_options(parser)
    return parser


def _stream_one(llm: object, text: str, params: SamplingParams, *, stats: bool) -> int:
    from quire.cli.stream_output import stream_to_stdout
    from quire.llm import LLM

    assert isinstance(llm, LLM)
    answer = stream_to_stdout(llm.llm_engine, text, params, request_id="generate", prefix=text)
    if stats:
        print(answer.stats.format_line(), file=sys.stderr)
    return 130 if answer.stats.finish_reason == "abort" else 0


def _run_batch(
    llm: object, texts: Sequence[str], params: SamplingParams, *, as_json: bool, stats: bool
) -> int:
    from quire.llm import LLM

    assert isinstance(llm, LLM)
    began = time.perf_counter()
    outputs = llm.generate(texts, params, use_tqdm=sys.stderr.isatty())
    seconds = time.perf_counter() - began
    for text, output in zip(texts, outputs):
        answers = [one.text for one in output.outputs]
        if as_json:
            reasons = [one.finish_reason for one in output.outputs]
            found = {"prompt": text, "texts": answers, "finish_reasons": reasons}
            print(json.dumps(found, ensure_ascii=False))
            continue
        for answer in answers:
            print(f"{text}{answer}\n")
    if stats:
        read = sum(len(output.prompt_token_ids or ()) for output in outputs)
        written = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        rates = f"{read / seconds:.1f} tok/s in, {written / seconds:.1f} tok/s out"
        print(f"[{read} + {written} tokens in {seconds:.2f} s: {rates}]", file=sys.stderr)
    return 0
