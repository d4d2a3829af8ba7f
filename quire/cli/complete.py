"""quire complete [MODEL]: complete lines of text, in this process or with --url at a server.

A line that ends in \\ goes on in the next. Ctrl-C ends an answer, Ctrl-D all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from quire.cli.answer import Answer
from quire.cli.chat import line_editing, read_message
from quire.cli.generate import MAX_TOKENS
from quire.cli.remote import Remote, add_remote, remote_of, show
from quire.cli.sampling import add_sampling, body_of, params_of, quiet, says_max_tokens
from quire.config.cli import OptionParser, add_options, options_from
from quire.errors import RequestError

Completer = Callable[[str], Answer]
"""Prints what follows a text, and returns it."""


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    server = remote_of(args)
    complete = _near(args) if server is None else _far(server, args)
    if args.quick is not None:
        return _one(complete, args.quick, args.stats)
    if sys.stdin.isatty():
        line_editing()
        print("Begin a text; Ctrl-D leaves.", file=sys.stderr)
    while True:
        try:
            text = read_message()
            if text.strip():
                _one(complete, text, args.stats)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except RequestError as error:
            print(f"error: {error}", file=sys.stderr)


def parser() -> OptionParser:
    """The flags of `quire complete`."""
    parser = OptionParser(prog="quire complete", usage="%(prog)s [MODEL] [options]")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub name")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="complete this, and leave")
    parser.add_argument("--stats", action="store_true", help="say how fast each answer was")
    add_remote(parser)
    add_sampling(parser)
    add_options(parser)
    return parser


def _one(complete: Completer, text: str, stats: bool) -> int:
    answer = complete(text)
    if stats:
        print(answer.stats.line(), file=sys.stderr)
    return 130 if answer.stats.finish == "abort" else 0


def _near(args: argparse.Namespace) -> Completer:
    from quire.cli.stream import stream
    from quire.llm import LLM

    llm = LLM.from_engine_args(options_from(args, quiet(args)))
    params = params_of(args, llm.get_default_sampling_params())
    if not says_max_tokens(args, llm):
        params.max_tokens = MAX_TOKENS
    return lambda text: stream(llm.llm_engine, text, params, request_id="complete")


def _far(server: Remote, args: argparse.Namespace) -> Completer:
    body: dict[str, Any] = {
        "model": server.model(args.model_name or args.model_tag),
        "max_tokens": MAX_TOKENS,
        "stream_options": {"include_usage": True},
        **body_of(args),
    }
    return lambda text: show(server.stream("/completions", {**body, "prompt": text}))
