"""Sends one streamed request to an OpenAI-compatible server and records each chunk's arrival
time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from quire import env
from quire.cli.bench.workload import SampleRequest
from quire.errors import ConfigError


@dataclass(slots=True)
class RequestResult:
    """Times are seconds on one clock. error: why the answer is incomplete."""

    sent_at: float
    chunks_at: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    text: str = ""
    scheduled_at: float = 0.0

    def metric_values(self, metric: str) -> list[float]:
        """Return seconds of one metric; of itl one per gap, of others one or none."""
        at = self.chunks_at
        if not at:
            return []
        if metric == "ttft":
            return [at[0] - self.sent_at]
        if metric == "e2el":
            return [at[-1] - self.sent_at]
        if metric == "itl":
            return [b - a for a, b in pairwise(at)]
        return [(at[-1] - at[0]) / (self.output_tokens - 1)] if self.output_tokens > 1 else []


@dataclass(frozen=True, slots=True)
class BenchEndpoint:
    """The server, and the fields of each request body."""

    http: Any
    url: str
    model: str
    extra: dict[str, Any]


def open_session(
    api_key: str | None, headers: Sequence[str] = (), *, insecure: bool = False
) -> Any:
    """Open a client session without limits of its own. Raises ConfigError without aiohttp."""
    try:
        import aiohttp
    except ImportError:
        raise ConfigError(
            "quire bench serve needs aiohttp: pip install 'quire-llm[bench]'"
        ) from None
    key = api_key or env.client_api_key()
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    for word in headers:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--header takes NAME=VALUE, got {word!r}")
        sent[name] = value
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=not insecure),
        timeout=aiohttp.ClientTimeout(total=None),
        headers=sent,
    )


async def wait_ready(http: Any, base: str, seconds: float) -> None:
    """Wait until the server answers /health, at most so long. Raises ConfigError."""
    import aiohttp

    deadline = time.perf_counter() + seconds
    while seconds > 0:
        try:
            async with http.get(f"{base}/health") as response:
                if response.status == 200:
                    return
                why = f"status {response.status}"
        except (aiohttp.ClientError, OSError) as error:
            why = str(error) or type(error).__name__
        if time.perf_counter() > deadline:
            raise ConfigError(f"{base} is not ready after {seconds:g} s: {why}")
        await asyncio.sleep(0.1)


class ServedModel(NamedTuple):
    """A model that a server lists. vocab_size: None if the server does not state it."""

    name: str
    vocab_size: int | None


async def find_model(http: Any, base: str, wanted: str | None) -> ServedModel:
    """Return the model with the wanted name, or the first that the server lists.

    Raises ConfigError if there is no list and no name.
    """
    import aiohttp

    try:
        async with http.get(f"{base}/v1/models") as response:
            response.raise_for_status()
            listed = (await response.json())["data"]
        one = next((one for one in listed if one["id"] == wanted), listed[0])
        return ServedModel(wanted or str(one["id"]), one.get("vocab_size"))
    except (aiohttp.ClientError, OSError, LookupError, ValueError) as error:
        if wanted is not None:
            return ServedModel(wanted, None)
        advice = "give --model"
        if isinstance(error, aiohttp.ClientConnectionError):
            advice = "is the server running? --host, --port and --base-url give its address"
        raise ConfigError(f"{base}/v1/models does not answer: {error}; {advice}") from None


async def post_command(http: Any, url: str) -> None:
    """Call a route of the server. Raises ConfigError if it refuses."""
    async with http.post(url) as response:
        if response.status != 200:
            text = (await response.text())[:300]
            raise ConfigError(f"{url}: {response.status}: {text}")


async def send_request(target: BenchEndpoint, item: SampleRequest, due_at: float) -> RequestResult:
    """Send a request and read its stream to the end. Failures are recorded in the answer."""
    import aiohttp

    answer = RequestResult(time.perf_counter(), scheduled_at=due_at)
    try:
        async with target.http.post(target.url, json=_build_body(target, item)) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:300]}"
                return answer
            async for line in response.content:
                _read_chunk(answer, line)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.error is None and not answer.chunks_at:
        answer.error = "the stream had no text"
    return answer


def _build_body(target: BenchEndpoint, item: SampleRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": item.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
    if not target.url.endswith("/chat/completions"):
        prompt = item.prompt
        return {**body, "prompt": prompt if isinstance(prompt, str) else list(prompt)}
    text = item.prompt if isinstance(item.prompt, str) else " ".join(map(str, item.prompt))
    return {**body, "messages": [{"role": "user", "content": text}]}


def _read_chunk(answer: RequestResult, line: bytes) -> None:
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return
    now = time.perf_counter()
    chunk = json.loads(line[6:])
    if "error" in chunk:
        answer.error = str(chunk["error"])[:300]
        return
    usage = chunk.get("usage")
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.output_tokens = usage["completion_tokens"]
    choices = chunk.get("choices") or ()
    if any(_has_text(choice) for choice in choices):
        answer.chunks_at.append(now)
        answer.text += "".join(_chunk_text(choice) for choice in choices)


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a chunk carries tokens: the first of a chat has a role only."""
    delta = choice.get("delta")
    if delta is None:
        return True
    return any(
        delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls")
    )


def _chunk_text(choice: dict[str, Any]) -> str:
    return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
