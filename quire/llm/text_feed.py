"""Texts of offline prompts: tokenized many at a time, by all cores, ahead of their requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from quire.core.params import SamplingParams
from quire.errors import RequestError
from quire.text.input_processor import InputProcessor
from quire.text.prompts import Prompt

BATCH_CHARS = 1 << 20
"""Characters that are tokenized at a time: some 25 MB of tokens, and a step of a progress bar."""


class TextFeed:
    """The token ids of the texts of one call's prompts. Its owner asks for them in order."""

    def __init__(
        self,
        inputs: InputProcessor,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        add_special_tokens: bool,
    ) -> None:
        """params: of each prompt, not checked."""
        cut = any(getattr(one, "truncate_prompt_tokens", None) is not None for one in params)
        self._inputs, self._add_special_tokens = inputs, add_special_tokens
        self._prompts = () if cut or inputs.has_encoder else prompts
        self._ids: dict[int, list[int]] = {}
        self._end = 0  # of the prompts that were looked at

    def ids(self, i: int) -> list[int] | None:
        """Return the ids of a prompt's text. None: its request is to tokenize what it has."""
        if i == self._end:
            self._tokenize_batch()
        return self._ids.pop(i, None)

    def _tokenize_batch(self) -> None:
        tokenizer, texts, size = self._inputs.tokenizer, dict[int, str](), 0
        if tokenizer is None:
            return
        while self._end < len(self._prompts) and size < BATCH_CHARS:
            text = _text_of(self._prompts[self._end])
            if text is not None and not self._is_too_long(text):
                texts[self._end] = text
                size += len(text)
            self._end += 1
        if len(texts) > 1:
            with suppress(RequestError):  # for one of them, whose request raises it
                made = tokenizer.encode_batch([*texts.values()], self._add_special_tokens)
                self._ids.update(zip(texts, made, strict=True))

    def _is_too_long(self, text: str) -> bool:
        """Whether its request is refused for its length, before it is tokenized."""
        bound = self._inputs.char_bound(text, self._inputs.max_model_len)
        return bound is not None and len(text) > bound


def _text_of(prompt: Prompt) -> str | None:
    """Return the text of a prompt that is nothing else."""
    text: object = prompt
    if isinstance(prompt, Mapping) and prompt.keys() <= {"prompt", "cache_salt"}:
        text = prompt.get("prompt")
    return text if isinstance(text, str) else None
