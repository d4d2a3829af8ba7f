"""Normalizes the arguments of a caller: one prompt or many, one conversation or many.

quire.text.prompts parses a single prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypedDict

from quire.errors import RequestError
from quire.text.prompts import Prompt

PromptType = Prompt


class _TextPromptBase(TypedDict):
    prompt: str


class TextPrompt(_TextPromptBase, total=False):
    """A prompt as text. Two with different salts share no cached prefix."""

    cache_salt: str


class _TokensPromptBase(TypedDict):
    prompt_token_ids: list[int]


class TokensPrompt(_TokensPromptBase, total=False):
    """A prompt as token ids; its text is only shown."""

    prompt: str
    cache_salt: str


class _EmbedsPromptBase(TypedDict):
    prompt_embeds: Any


class EmbedsPrompt(_EmbedsPromptBase, total=False):
    """A prompt as vectors [tokens, hidden size]; positions with prompt_is_token_ids have ids."""

    prompt: str
    prompt_token_ids: list[int]
    prompt_is_token_ids: list[bool]
    cache_salt: str


def normalize_prompts(prompts: Any, prompt_token_ids: Any = None) -> list[Prompt]:
    """Return all prompts, each in its own form.

    prompt_token_ids: how older releases passed ids, beside or instead of texts.
    """
    if prompt_token_ids is None:
        if prompts is None:
            raise RequestError(
                "prompts are missing: give a text, token ids, or a list", param="prompts"
            )
        if not hasattr(prompts, "__iter__"):
            message = "prompts must be text, token ids, a dict, or a list of those"
            raise RequestError(f"{message}; got a {type(prompts).__name__}", param="prompts")
        return [prompts] if is_single_prompt(prompts) else list(prompts)
    ids = [prompt_token_ids] if is_single_prompt(prompt_token_ids) else list(prompt_token_ids)
    if prompts is None:
        return [{"prompt_token_ids": one} for one in ids]
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if len(texts) != len(ids):
        message = "prompts and prompt_token_ids must be equally many"
        raise RequestError(f"{message}, got {len(texts)} and {len(ids)}", param="prompt_token_ids")
    return [{"prompt": text, "prompt_token_ids": one} for text, one in zip(texts, ids)]


def is_single_prompt(given: Any) -> bool:
    """Whether this is a single prompt: text, a dict, or a vector of ids; not a list of prompts."""
    if isinstance(given, (str, bytes, Mapping)):
        return True
    if not isinstance(given, Sequence):
        return len(getattr(given, "shape", (0, 0))) == 1  # a tensor of ids, not an iterator
    return len(given) > 0 and all(isinstance(one, Integral) for one in given)


def normalize_conversations(messages: Any) -> list[Sequence[Any]]:
    """A list of conversations, each a list of messages."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        message = "messages must be a list of messages (dicts with role and content), or of lists"
        raise RequestError(f"{message}, got a {type(messages).__name__}", param="messages")
    if not messages:
        raise RequestError("messages is empty: give at least one message", param="messages")
    nested = [isinstance(one, (list, tuple)) for one in messages]
    if all(nested):
        return list(messages)
    if any(nested):
        raise RequestError("messages mixes messages and lists of messages", param="messages")
    return [messages]
