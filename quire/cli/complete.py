"""quire complete [MODEL]: complete lines of text, in this process or with --url on a server.

A line that ends in \\ continues on the next. Ctrl-C ends an answer, Ctrl-D the program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from quire.cli.chat import enable_line_editing, read_message
from quire.cli.generate import MAX_TOKENS
from quire.cli.generation_result import GenerationResult
from quire.cli.remote_server import RemoteServer, add_server_flags, print_stream, server_from_args
from quire.cli.sampling import (
    add_sampling_flags,
    has_max_tokens,
    params_from_args,
    quiet_engine_options,
    request_fields,
)
from quire.config.command_line.option_parser import OptionParser, add_options, options_from
from quire.errors import RequestError

Completer = Callable[[str], GenerationResult]
"""Prints the continuation of a text, and returns it."""


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    server = server_from_args(args)
    complete = _local_completer(args) if server is None else _remote_completer(server, args)
    if args.quick is not None:
        return _complete_one(complete, args.quick, args.stats)
    if sys.stdin.isatty():
        enable_line_editing()
        print("Type the beginning of a text; Ctrl-D quits.", file=sys.stderr)
    while True:
        try:
            text = read_message()
            if text.strip():
                _complete_one(complete, text, args.stats)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except RequestError as error:
            print(f"error: {error}", file=sys.stderr)


def parser() -> OptionParser:
    """Return the parser of `quire complete`."""
    parser = OptionParser(prog="quire complete", usage="%(prog)s [MODEL] [options]")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub name")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="complete this text and exit")
    parser.add_argument("--stats", action="store_true", help="show the speed after each answer")
    add_server_flags(parser)
    add_sampling_flags(parser)
    add_options(parser)
    return parser


def _complete_one(complete: Completer, text: str, stats: bool) -> int:
    answer = complete(text)
    if stats:
        print(answer.stats.format_line(), file=sys.stderr)
    return 130 if answer.stats.finish_reason == "abort" else 0


def _local_completer(args: argparse.Namespace) -> Completer:
    from quire.cli.stream_output import stream_to_stdout
    from quire.llm import LLM

    llm = LLM.from_engine_args(options_from(args, quiet_engine_options(args)))
    params = params_from_args(args, llm.get_default_sampling_params())
    if not has_max_tokens(args, llm):
        params.max_tokens = MAX_TOKENS
    return lambda text: stream_to_stdout(llm.llm_engine, text, params, request_id="complete")


def _remote_completer(server: RemoteServer, args: argparse.Namespace) -> Completer:
    body: dict[str, Any] = {
        "model": server.resolve_model(args.model_name or args.model_tag),
        "max_tokens": MAX_TOKENS,
        "stream_options": {"include_usage": True},
        **request_fields(args),
    }
    return lambda text: print_stream(server.stream("/completions", {**body, "prompt": text}))
