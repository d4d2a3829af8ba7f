"""One streamed request to an OpenAI-compatible server, and when each chunk of it came."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from quire.cli.bench.workload import Item
from quire.errors import ConfigError


@dataclass(slots=True)
class Answer:
    """Times are seconds on one clock. error: why there is no whole answer."""

    sent_at: float
    chunks_at: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    def times(self, metric: str) -> list[float]:
        """Seconds of one metric; of itl one per gap, of others one or none."""
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


def session(api_key: str | None) -> Any:
    """A client session without limits of its own. Raises ConfigError without aiohttp."""
    try:
        import aiohttp
    except ImportError:
        raise ConfigError("quire bench serve needs aiohttp: pip install 'quire[bench]'") from None
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers=headers,
    )


async def ask(http: Any, url: str, model: str, item: Item, args: argparse.Namespace) -> Answer:
    """Send a request and read its stream to the end. Failures are in the answer."""
    import aiohttp

    answer = Answer(time.perf_counter())
    try:
        async with http.post(url, json=_body(url, model, item, args)) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:300]}"
                return answer
            async for line in response.content:
                _take(answer, line)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.error is None and not answer.chunks_at:
        answer.error = "the stream had no text"
    return answer


def _body(url: str, model: str, item: Item, args: argparse.Namespace) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": item.output_len,
        "temperature": args.temperature,
        "ignore_eos": args.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not url.endswith("/chat/completions"):
        prompt = item.prompt
        return {**body, "prompt": prompt if isinstance(prompt, str) else list(prompt)}
    text = item.prompt if isinstance(item.prompt, str) else " ".join(map(str, item.prompt))
    return {**body, "messages": [{"role": "user", "content": text}]}


def _take(answer: Answer, line: bytes) -> None:
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
    if any(_has_text(choice) for choice in chunk.get("choices") or ()):
        answer.chunks_at.append(now)


def _has_text(choice: dict[str, Any]) -> bool:
    """A chunk that carries tokens: the first of a chat has a role only."""
    delta = choice.get("delta")
    if delta is None:
        return True
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))
