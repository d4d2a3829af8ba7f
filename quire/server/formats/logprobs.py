"""Logprobs in the two shapes that OpenAI's routes have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from quire.outputs import Logprob, PromptLogprobs

MIN_LOGPROB = -9999.0
"""JSON has no -inf."""
REPLACEMENT_CHAR = "\ufffd"
"""In the text of a token that is part of a character."""

TokenCandidates = dict[int, Logprob] | None


def format_token_name(token_id: int, one: Logprob, as_ids: bool) -> str:
    """Return a token as answers show it."""
    return f"token_id:{token_id}" if as_ids else one.decoded_token or ""


class LogprobFormatter(NamedTuple):
    """Formats the tokens of a chat. bytes_of: bytes that a token adds to a text."""

    as_ids: bool
    token_bytes: Callable[[int], bytes]

    def format_token(self, token_id: int, one: Logprob) -> dict[str, Any]:
        token = format_token_name(token_id, one, self.as_ids)
        in_part = REPLACEMENT_CHAR in token
        value = one.logprob
        return {
            "token": token,
            "logprob": value if value > MIN_LOGPROB else MIN_LOGPROB,
            "bytes": list(
                self.token_bytes(token_id) if in_part else token.encode("utf-8", "replace")
            ),
        }


def _top_candidates(step: dict[int, Logprob], most: int) -> list[tuple[int, Logprob]]:
    """The likeliest first; the chosen one is among them only if it is that likely."""
    ranked = sorted(step.items(), key=lambda item: -item[1].logprob)
    return ranked if most < 0 else ranked[:most]


def format_chat_logprobs(
    token_ids: Sequence[int], steps: Iterable[TokenCandidates], most: int, shown: LogprobFormatter
) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs}]}, one entry for each token."""
    content = []
    for token_id, step in zip(token_ids, steps):
        assert step is not None, "a generated token has logprobs"
        entry = shown.format_token(token_id, step[token_id])
        entry["top_logprobs"] = [
            shown.format_token(i, one) for i, one in _top_candidates(step, most)
        ]
        content.append(entry)
    return {"content": content}


class CompletionLogprobFormatter:
    """{tokens, token_logprobs, top_logprobs, text_offset}; offsets continue across chunks."""

    def __init__(self, as_ids: bool, decode: Callable[[int], str]) -> None:
        self._as_ids = as_ids
        self._decode = decode
        self._offset = 0

    def format_next(
        self, token_ids: Sequence[int], steps: Iterable[TokenCandidates]
    ) -> dict[str, Any]:
        """The next tokens. A step of None is the first of a prompt, which nothing predicts."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, step in zip(token_ids, steps):
            offsets.append(self._offset)
            if step is None:
                text = self._decode(token_id)
                tokens.append(f"token_id:{token_id}" if self._as_ids else text)
                logprobs.append(None)
                tops.append(None)
                self._offset += len(text)
                continue
            tokens.append(format_token_name(token_id, step[token_id], self._as_ids))
            logprobs.append(max(step[token_id].logprob, MIN_LOGPROB))
            tops.append(self._by_name(step))
            self._offset += len(step[token_id].decoded_token or "")
        return {
            "text_offset": offsets,
            "token_logprobs": logprobs,
            "tokens": tokens,
            "top_logprobs": tops,
        }

    def _by_name(self, step: dict[int, Logprob]) -> dict[str, float]:
        """Parts of characters may look alike; the chosen token, which is first, keeps its name."""
        found: dict[str, float] = {}
        for token_id, one in step.items():
            found.setdefault(
                format_token_name(token_id, one, self._as_ids), max(one.logprob, MIN_LOGPROB)
            )
        return found


def format_prompt_logprobs(steps: PromptLogprobs) -> list[dict[str, dict[str, Any]] | None]:
    """The `prompt_logprobs` field: {id: {logprob, rank, decoded_token}} for each position."""
    shown: list[dict[str, dict[str, Any]] | None] = []
    for step in steps:
        if step is None or not step:
            shown.append(None)
            continue
        shown.append(
            {
                str(i): {
                    "logprob": max(one.logprob, MIN_LOGPROB),
                    "rank": one.rank,
                    "decoded_token": one.decoded_token,
                }
                for i, one in step.items()
            }
        )
    return shown
