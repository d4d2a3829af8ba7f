"""quire run-batch -i FILE -o FILE: answer the requests of an OpenAI batch file.

A model is run in this process, or a server is asked (--url). Each line of the input is
{"custom_id", "method": "POST", "url", "body"}; answers come in the same order, and a line that is
wrong gets an answer that says so. Files may be http(s) addresses: read with GET, written with PUT,
of hosts on the internet, or of those named with --trusted-host.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, BinaryIO

from quire.cli.batch import Ask, answers
from quire.cli.flags import add_server_options, server_options_from
from quire.cli.remote import Remote, Reply, add_remote, remote_of
from quire.config import environment
from quire.config.cli import OptionParser, add_options, options_from
from quire.errors import ConfigError, QuireError, RequestError
from quire.outbound.fetch import Fetcher, Policy
from quire.server.options import GROUPS

log = logging.getLogger(__name__)

AT_ONCE = {"here": 1024, "there": 64}
"""Requests at work: a model here takes what it can; a server has others to serve."""
FILES = Policy(max_bytes=1 << 30, total_s=1800.0, idle_s=60.0)
"""Of files at addresses."""


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    server = remote_of(args)
    if args.max_inflight is not None and args.max_inflight < 1:
        raise ConfigError(f"--max-inflight must be >= 1, got {args.max_inflight}")
    if args.enable_metrics:
        log.info("--enable-metrics has no effect: what a batch did is told at its end")
    with contextlib.ExitStack() as stack:
        fetcher = Fetcher(dataclasses.replace(FILES, own=tuple(args.trusted_host)))
        lines = stack.enter_context(_source(args.input_file, args.output_tmp_dir, fetcher))
        into = stack.enter_context(_target(args.output_file, args.output_tmp_dir, fetcher))
        if server is not None:
            count = asyncio.run(_there(server, lines, into, args))
        else:
            count = asyncio.run(_here(args, lines, into))
    good, bad = count
    print(f"{good} answered, {bad} with an error: {args.output_file}", file=sys.stderr)
    return 0


def parser() -> OptionParser:
    """The flags of `quire run-batch`."""
    parser = OptionParser(prog="quire run-batch", usage="%(prog)s -i FILE -o FILE [options]")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub name")
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="file or address")
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="file or address"
    )
    parser.add_argument(
        "--output-tmp-dir", metavar="FOLDER", help="where files of addresses are kept meanwhile"
    )
    parser.add_argument(
        "--trusted-host",
        action="append",
        default=[],
        metavar="HOST",
        help="a host of your own: files may be there although its address is private",
    )
    parser.add_argument(
        "--max-inflight", type=int, metavar="N", help="requests at work. None: 1024; with --url 64"
    )
    parser.add_argument("--enable-metrics", action="store_true", help="accepted, no effect")
    for flag in ("--host", "--port"):
        parser.add_argument(flag, help="accepted, no effect: nothing listens")
    add_remote(parser)
    add_server_options(parser, only=("answers",))
    add_options(parser)
    return parser


# -- who answers ------------------------------------------------------------------------------


async def _there(
    server: Remote, lines: IO[str], into: IO[str], args: argparse.Namespace
) -> tuple[int, int]:
    at_once = args.max_inflight or AT_ONCE["there"]
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(at_once) as threads:

        def ask(path: str, body: dict[str, Any]) -> Awaitable[Reply]:
            short = path.removeprefix("/v1") if server.has_version else path
            return loop.run_in_executor(threads, server.ask, "POST", short, body)

        return await _all(lines, into, ask, at_once)


async def _here(args: argparse.Namespace, lines: IO[str], into: IO[str]) -> tuple[int, int]:
    from quire.engine.build import build
    from quire.engine.client import EngineClient
    from quire.engine.link import RunServer
    from quire.engine.thread import EngineThread
    from quire.server.app import create_app
    from quire.server.processes import services_of

    said = vars(args)
    own = {name: said[name] for name in GROUPS["answers"] if name in said}
    rest = {name: value for name, value in said.items() if name not in own}
    options = server_options_from(argparse.Namespace(**own))
    built = build(environment.over(options_from(argparse.Namespace(**rest))))
    orders = RunServer(options={}, folder="", index=0, count=1, sockets=[], log_level="INFO")
    client = EngineClient(EngineThread(built.engine))
    services = services_of(built.config, built.tokenizer, options, client, orders=orders)
    app = create_app(dataclasses.replace(services, inputs=built.inputs))
    async with app.router.lifespan_context(app):
        at_once = args.max_inflight or AT_ONCE["here"]
        return await _all(lines, into, lambda path, body: call(app, path, body), at_once)


async def call(app: Callable[..., Awaitable[None]], path: str, body: dict[str, Any]) -> Reply:
    """One request to an ASGI app in this process, as a server would make it."""
    data = json.dumps(body).encode()
    sent: list[Any] = []
    inbox = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await asyncio.Event().wait()  # nobody hangs up here
        raise AssertionError("unreachable")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(_scope(path, len(data)), receive, send)
    text = b"".join(one.get("body", b"") for one in sent if one["type"] == "http.response.body")
    headers = dict(sent[0]["headers"])
    try:
        found = json.loads(text)
    except ValueError:
        found = text.decode(errors="replace")
    return Reply(sent[0]["status"], headers.get(b"x-request-id", b"").decode(), found)


def _scope(path: str, size: int) -> dict[str, Any]:
    headers = {"host": "batch", "content-type": "application/json", "content-length": str(size)}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": {},
    }


async def _all(lines: IO[str], into: IO[str], ask: Ask, at_once: int) -> tuple[int, int]:
    """Write each answer as soon as those before it are written. How many were good, and bad."""
    from tqdm import tqdm

    good = bad = 0
    with tqdm(unit="req", disable=not sys.stderr.isatty()) as bar:
        async for answer in answers(lines, ask, at_once=at_once):
            into.write(json.dumps(answer, ensure_ascii=False) + "\n")
            good, bad = good + (answer["error"] is None), bad + (answer["error"] is not None)
            bar.update()
    return good, bad


# -- files ------------------------------------------------------------------------------------


def _is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


@contextlib.contextmanager
def _source(name: str, folder: str | None, fetcher: Fetcher) -> Iterator[IO[str]]:
    """The lines of a file or of an address. What is no UTF-8 in them stays as lone surrogates."""
    try:
        if _is_address(name):
            with tempfile.NamedTemporaryFile(dir=folder) as fetched:
                file: BinaryIO = fetched  # type: ignore[assignment]  # typeshed's wrapper is none
                asyncio.run(fetcher.get_into(name, file))
                fetched.flush()
                with open(fetched.name, encoding="utf-8", errors="surrogateescape") as lines:
                    yield lines
        else:
            with open(name, encoding="utf-8", errors="surrogateescape") as lines:
                yield lines
    except RequestError as error:
        raise QuireError(f"--input-file: {error}{_hint(error)}") from None
    except OSError as error:
        raise ConfigError(f"--input-file {name}: {error.strerror or error}") from None


@contextlib.contextmanager
def _target(name: str, folder: str | None, fetcher: Fetcher) -> Iterator[IO[str]]:
    """A file to write to; at the end what an address is to have is sent there.

    Of lone surrogates it gets what JSON writes for them.
    """
    encoding: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
    try:
        if not _is_address(name):
            with open(name, "w", buffering=1, **encoding) as lines:
                yield lines
            return
        with tempfile.NamedTemporaryFile("w+", dir=folder, **encoding) as lines:
            yield lines
            lines.flush()
            with open(lines.name, "rb") as file:
                asyncio.run(fetcher.put(name, file, Path(lines.name).stat().st_size))
    except RequestError as error:
        raise QuireError(f"--output-file: {error}{_hint(error)}") from None
    except OSError as error:
        raise ConfigError(f"--output-file {name}: {error.strerror or error}") from None


def _hint(error: RequestError) -> str:
    return " (of your own? --trusted-host HOST)" if "public" in str(error) else ""
