"""Count the hops of one chat request: which files the calls visit before the engine client takes it.

usage: python tools/hops.py [--tools] [--trace]

Sends one chat request to the app in this process and records each call of a function of quire,
from the route to EngineClient.generate(). A stay is a maximal run of calls inside one file. A
return is a stay in a file that was visited before. A climb is a step from one stay to the next
that leads into a higher layer of pyproject.toml.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import pathlib
import random
import re
import sys
import tempfile
from types import FrameType

ROOT = pathlib.Path.cwd()
sys.path.insert(0, str(ROOT))

from quire.errors import ShuttingDown  # noqa: E402
from tests.server.harness import Server, make_tokenizer  # noqa: E402

ROUTE = "create_chat_completion"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def layers(text: str) -> dict[str, int]:
    """Height of each package, by the layers of pyproject.toml; the lowest has 0."""
    found = re.search(r"^layers = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert found is not None, "pyproject.toml has no layers"
    rows = [row.split(" | ") for row in re.findall(r'"([^"]+)"', found[1])]
    return {name: len(rows) - place for place, row in enumerate(rows) for name in row}


def trace_request(body: dict[str, object]) -> list[tuple[str, str]]:
    """(file, function) of each call, from the route until the engine client has the request."""
    calls: list[tuple[str, str]] = []
    started: set[FrameType] = set()  # a frame that is resumed is no new call
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(make_tokenizer(pathlib.Path(folder)))

    async def generate(*_: object) -> None:
        sys.setprofile(None)
        raise ShuttingDown("the request has arrived")

    def record(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        name = frame.f_code.co_name
        if event != "call" or name.startswith("<") or not file.startswith(f"{ROOT}/quire/"):
            return
        if frame in started or is_property(frame):
            return
        started.add(frame)
        if calls or name == ROUTE:
            calls.append((file[len(f"{ROOT}/quire/") :], name))

    async def send_request() -> None:
        for _ in range(2):  # the first one compiles templates and fills caches
            calls.clear()
            sys.setprofile(record)
            await server.app(*_connection(body))

    vars(server.client)["generate"] = generate
    asyncio.run(send_request())
    assert calls, f"{ROUTE} was not called"
    return calls


def is_property(frame: FrameType) -> bool:
    """Whether the function of this frame is read like an attribute."""
    owner = frame.f_locals.get("self")
    found = getattr(type(owner), frame.f_code.co_name, None)
    return isinstance(found, property)


def _connection(body: dict[str, object]):
    """Scope, receive and send of an ASGI request."""
    sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, object]:
        return sent.pop() if sent else await asyncio.Event().wait()

    async def send(message: dict[str, object]) -> None:
        pass

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    return scope, receive, send


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the hops of one chat request.")
    parser.add_argument("--tools", action="store_true", help="send a function with the request")
    parser.add_argument("--trace", action="store_true", help="print each call")
    options = parser.parse_args()
    calls = trace_request(BODY | ({"tools": [TOOL]} if options.tools else {}))
    if options.trace:
        print("\n".join(f"{file}: {name}" for file, name in calls))
    files = [file for file, _ in calls]
    stays = [file for place, file in enumerate(files) if files[place - 1 : place] != [file]]
    height = layers((ROOT / "pyproject.toml").read_text())
    heights = [height[file.removesuffix(".py").partition("/")[0]] for file in stays]
    climbs = sum(low < high for low, high in itertools.pairwise(heights))
    visited = len(set(stays))
    print(
        f"{len(calls)} calls, {len(stays)} stays in {visited} files, "
        f"{len(stays) - visited} returns, {climbs} climbs"
    )


if __name__ == "__main__":
    main()
