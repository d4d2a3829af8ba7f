"""quire run-batch -i FILE -o FILE: answer the requests of an OpenAI batch file.

A model runs in this process, or a server answers (--url). Each line of the input is
{"custom_id", "method": "POST", "url", "body"}; answers come in the same order, and an
invalid line gets an error as its answer. Files may be http(s) URLs: read with GET, written with
PUT, of public hosts, or of those named with --trusted-host.
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

from quire.cli.batch_lines import SendRequest, run_requests
from quire.cli.remote_server import RemoteServer, ServerReply, add_server_flags, server_from_args
from quire.cli.serve_flags import add_server_options, server_options_from
from quire.config import vllm_environment
from quire.config.command_line.option_parser import OptionParser, add_options, options_from
from quire.errors import ConfigError, QuireError, RequestError
from quire.http_fetch.fetch import FetchPolicy, HttpFetcher
from quire.server.options import GROUPS

log = logging.getLogger(__name__)

MAX_CONCURRENCY = {"here": 1024, "there": 64}
"""Requests that run at once: a local model takes all it can; a server may have other clients."""
FETCH_POLICY = FetchPolicy(max_bytes=1 << 30, total_timeout_s=1800.0, idle_timeout_s=60.0)
"""Schemes of file URLs."""


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    server = server_from_args(args)
    if args.max_inflight is not None and args.max_inflight < 1:
        raise ConfigError(f"--max-inflight must be >= 1, got {args.max_inflight}")
    if args.enable_metrics:
        log.info("--enable-metrics has no effect: the statistics of a batch are logged at its end")
    with contextlib.ExitStack() as stack:
        fetcher = HttpFetcher(
            dataclasses.replace(FETCH_POLICY, private_hosts=tuple(args.trusted_host))
        )
        _check_files_differ(args.input_file, args.output_file)
        lines = stack.enter_context(_open_input(args.input_file, args.output_tmp_dir, fetcher))
        into = stack.enter_context(_open_output(args.output_file, args.output_tmp_dir, fetcher))
        if server is not None:
            count = asyncio.run(_run_on_server(server, lines, into, args))
        else:
            count = asyncio.run(_run_locally(args, lines, into))
    good, bad = count
    print(f"{good} answered, {bad} with an error: {args.output_file}", file=sys.stderr)
    return 0


def parser() -> OptionParser:
    """Return the parser of `quire run-batch`."""
    parser = OptionParser(prog="quire run-batch", usage="%(prog)s -i FILE -o FILE [options]")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub name")
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="file or URL")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="file or URL")
    parser.add_argument(
        "--output-tmp-dir", metavar="FOLDER", help="folder for temporary copies of files at URLs"
    )
    parser.add_argument(
        "--trusted-host",
        action="append",
        default=[],
        metavar="HOST",
        help="allow file URLs of this host although its address is private",
    )
    parser.add_argument(
        "--max-inflight",
        type=int,
        metavar="N",
        help="most requests at once. None: 1024; with --url 64",
    )
    parser.add_argument("--enable-metrics", action="store_true", help="accepted, no effect")
    for flag in ("--host", "--port"):
        parser.add_argument(flag, help="accepted, no effect: a batch has no metrics endpoint")
    add_server_flags(parser)
    add_server_options(parser, only=("answers",))
    add_options(parser)
    return parser


# -- backends ----------------------------------------------------------------------------------


async def _run_on_server(
    server: RemoteServer, lines: IO[str], into: IO[str], args: argparse.Namespace
) -> tuple[int, int]:
    at_once = args.max_inflight or MAX_CONCURRENCY["there"]
    loop = asyncio.get_running_loop()
    root = server.without_version_path()
    with ThreadPoolExecutor(at_once) as threads:

        def ask(path: str, body: dict[str, Any]) -> Awaitable[ServerReply]:
            return loop.run_in_executor(threads, root.request, "POST", path, body)

        return await _run_all(lines, into, ask, at_once)


async def _run_locally(args: argparse.Namespace, lines: IO[str], into: IO[str]) -> tuple[int, int]:
    from quire.engine.build import build_engine
    from quire.engine.client.engine_client import EngineClient
    from quire.engine.client.engine_pool import EnginePool
    from quire.engine.client.thread_transport import ThreadTransport
    from quire.engine.supervise.process_pipe import RunApiProcess
    from quire.server.app import create_app
    from quire.server.process.api_process import build_app_state

    given = vars(args)
    own = {name: given[name] for name in GROUPS["answers"] if name in given}
    rest = {name: value for name, value in given.items() if name not in own}
    options = server_options_from(argparse.Namespace(**own))
    built = build_engine(
        vllm_environment.apply_environment(options_from(argparse.Namespace(**rest)))
    )
    orders = RunApiProcess(options={}, folder="", index=0, count=1, socket_fds=[], log_level="INFO")
    engines = EnginePool([EngineClient(ThreadTransport(built.engine))])
    services = build_app_state(built.config, built.tokenizer, options, engines, orders=orders)
    app = create_app(dataclasses.replace(services, inputs=built.input_processor))
    async with app.router.lifespan_context(app):
        at_once = args.max_inflight or MAX_CONCURRENCY["here"]
        return await _run_all(lines, into, lambda path, body: call_app(app, path, body), at_once)


async def call_app(
    app: Callable[..., Awaitable[None]], path: str, body: dict[str, Any]
) -> ServerReply:
    """Call an ASGI app in this process with one request, as a server would."""
    data = json.dumps(body).encode()
    sent: list[Any] = []
    inbox = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await asyncio.Event().wait()  # there is no client that could disconnect
        raise AssertionError("unreachable")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(_build_scope(path, len(data)), receive, send)
    text = b"".join(one.get("body", b"") for one in sent if one["type"] == "http.response.body")
    headers = dict(sent[0]["headers"])
    try:
        found = json.loads(text)
    except ValueError:
        found = text.decode(errors="replace")
    return ServerReply(sent[0]["status"], headers.get(b"x-request-id", b"").decode(), found)


def _build_scope(path: str, size: int) -> dict[str, Any]:
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


async def _run_all(
    lines: IO[str], into: IO[str], ask: SendRequest, at_once: int
) -> tuple[int, int]:
    """Write each answer when those before it are written. Returns how many succeeded and failed."""
    from tqdm import tqdm

    good = bad = 0
    with tqdm(unit="req", disable=not sys.stderr.isatty()) as bar:
        async for answer in run_requests(lines, ask, at_once=at_once):
            into.write(json.dumps(answer, ensure_ascii=False) + "\n")
            good, bad = good + (answer["error"] is None), bad + (answer["error"] is not None)
            bar.update()
    return good, bad


# -- files ------------------------------------------------------------------------------------


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


@contextlib.contextmanager
def _open_input(name: str, folder: str | None, fetcher: HttpFetcher) -> Iterator[IO[str]]:
    """Read the lines of a file or a URL. Bytes that are not UTF-8 become lone surrogates."""
    try:
        if _is_url(name):
            with tempfile.NamedTemporaryFile(dir=folder) as fetched:
                file: BinaryIO = fetched  # type: ignore[assignment]  # typeshed's wrapper is none
                asyncio.run(fetcher.download(name, file))
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


def _check_files_differ(given: str, out: str) -> None:
    """Raise ConfigError if opening the output would empty the input."""
    if _is_url(given) or _is_url(out) or not (Path(given).is_file() and Path(out).is_file()):
        return
    if Path(given).samefile(out):
        raise ConfigError(f"--output-file {out} is the input file too; name another file")


@contextlib.contextmanager
def _open_output(name: str, folder: str | None, fetcher: HttpFetcher) -> Iterator[IO[str]]:
    """Open a file to write to; a file for a URL is sent there at the end.

    Lone surrogates are written as JSON escapes.
    """
    encoding: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
    try:
        if not _is_url(name):
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
    return " (allow a private host with --trusted-host HOST)" if "public" in str(error) else ""
