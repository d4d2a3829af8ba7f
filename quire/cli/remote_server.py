"""Client of an OpenAI-compatible server, for the commands `chat`, `complete` and `run-batch`.

Uses the standard library only, so that these commands need no other packages.
"""

from __future__ import annotations

import argparse
import http.client
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from quire import env
from quire.cli.generation_result import AnswerPrinter, GenerationResult, GenerationStats
from quire.errors import ConfigError, QuireError, RequestError

DEFAULT_URL = "http://localhost:8000/v1"
"""Default URL of a server."""


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a server."""
    group = parser.add_argument_group("remote options", "Use a server instead of a local model.")
    group.add_argument(
        "--url",
        nargs="?",
        const=DEFAULT_URL,
        help=f"URL of the server. --url alone: {DEFAULT_URL}.",
    )
    group.add_argument("--model-name", metavar="NAME", help="Model name on the server.")
    group.add_argument("--api-key", metavar="KEY", help="Key for the server. None: OPENAI_API_KEY.")


def server_from_args(args: argparse.Namespace) -> RemoteServer | None:
    """Return the server that the flags name; None: none. Raises ConfigError."""
    if args.url is None:
        if args.model_name or args.api_key:
            raise ConfigError("--model-name and --api-key need --url URL")
        return None
    given = set(vars(args)) & _engine_flag_names()
    if given:
        flag = f"--{min(given).replace('_', '-')}"
        raise ConfigError(f"{flag} is for a local model; with --url the server sets it")
    return RemoteServer(args.url, args.api_key or env.client_api_key())


def _engine_flag_names() -> set[str]:
    from quire.config import vllm_options
    from quire.config.options import option_specs

    return {*option_specs(), *vllm_options.option_names()} - {"model_tag"}


@dataclass(frozen=True, slots=True)
class ServerReply:
    """A complete answer of a server."""

    status: int
    request_id: str
    body: Any


class RemoteServer:
    """One server."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/")
        parts = urlsplit(self._url if "//" in self._url else f"http://{self._url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must be like {DEFAULT_URL}, got {url!r}")
        self._url_parts = parts
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def without_version_path(self) -> RemoteServer:
        """Return the same server by a base URL without /v1, with which paths may begin."""
        key = self._headers.get("Authorization", "").removeprefix("Bearer ")
        return RemoteServer(self._url.removesuffix("/v1"), key or None)

    def resolve_model(self, wanted: str | None) -> str:
        """Return the model's name in requests: the given one, or the server's first."""
        if wanted:
            return wanted
        reply = self.request("GET", "/models")
        if reply.status != 200:
            raise RequestError(f"{self._url}: {error_message(reply.body) or reply.status}")
        return str(reply.body["data"][0]["id"])

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> ServerReply:
        """Send one request; return the answer, whatever its status. Raises QuireError without
        one."""
        connection = self._connection()
        try:
            response = self._send(connection, method, path, body)
            text = response.read()
            found = _parse_json(text)
            return ServerReply(response.status, response.getheader("X-Request-Id", ""), found)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable_error(error) from None
        finally:
            connection.close()

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed answer. Raises RequestError if the server refuses."""
        connection = self._connection()
        try:
            response = self._send(connection, "POST", path, {**body, "stream": True})
            if response.status != 200:
                found = _parse_json(response.read())
                raise RequestError(error_message(found) or f"status {response.status}")
            yield from read_sse(response)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable_error(error) from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        assert self._url_parts.hostname is not None, self._url
        if self._url_parts.scheme == "https":
            return http.client.HTTPSConnection(self._url_parts.hostname, self._url_parts.port)
        return http.client.HTTPConnection(self._url_parts.hostname, self._url_parts.port)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body)
        connection.request(method, self._url_parts.path + path, data, self._headers)
        return connection.getresponse()

    def _unreachable_error(self, error: Exception) -> QuireError:
        return QuireError(f"{self._url} does not answer: {error or type(error).__name__}")


def _parse_json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")


def error_message(body: Any) -> str:
    """Return the message of an error body of any known form."""
    if isinstance(body, dict):
        inner = body.get("error", body)
        return str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    return str(body)[:300]


def read_sse(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the data of server-sent events, up to [DONE]."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise RequestError(error_message(chunk))
        yield chunk


def print_stream(chunks: Iterator[dict[str, Any]]) -> GenerationResult:
    """Print an answer as it arrives. Ctrl-C ends it early, as "abort"."""
    began = time.perf_counter()
    stats, printer = GenerationStats(), AnswerPrinter()
    try:
        for chunk in chunks:
            _add_usage(stats, chunk.get("usage"))
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or choice
                reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
                content = delta.get("content") or delta.get("text") or ""
                if (reasoning or content) and not stats.first_s:
                    stats.first_s = time.perf_counter() - began
                printer.write(content, reasoning)
                stats.finish_reason = choice.get("finish_reason") or stats.finish_reason
    except KeyboardInterrupt:
        stats.finish_reason = "abort"
    stats.total_s = time.perf_counter() - began
    return GenerationResult(printer.finish(), stats)


def _add_usage(stats: GenerationStats, usage: Mapping[str, Any] | None) -> None:
    if usage:
        stats.prompt_tokens = usage["prompt_tokens"]
        stats.output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        stats.cached_tokens = details.get("cached_tokens") or 0
