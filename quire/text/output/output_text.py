"""Text of one sequence: built as its tokens arrive and cut at a stop string, or built at the end.

Detokenization is in quire.text.tokenizing.detokenizer; quire.text.output.output_processor selects
the class for a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.core.params import SamplingParams
from quire.text.output.stop_strings import StopWindow
from quire.text.tokenizing.detokenizer import Detokenizer
from quire.text.tokenizing.tokenizer import Tokenizer


class OutputText(Protocol):
    """Tokens -> the text of a sequence. take() and whole() are not to be mixed."""

    stop: str | None
    """The stop string that ended it."""

    def push(self, ids: Sequence[int], *, last: bool, ended: bool) -> int:
        """Add tokens; how many of them belong to the answer (the rest is behind a stop string).

        last: nothing follows. ended: the last of them is what ended the sequence, and no text.
        """
        ...

    def take(self) -> str:
        """Return the text that is new since the last call."""
        ...

    def full_text(self) -> str: ...


class NoText:
    """No text: the request has detokenize=False."""

    stop: str | None = None

    def push(self, ids: Sequence[int], *, last: bool, ended: bool) -> int:
        return len(ids)

    def take(self) -> str:
        return ""

    def full_text(self) -> str:
        return ""


class StreamingText:
    """Tokens become text as they come."""

    stop: str | None = None

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        made = Detokenizer(
            tokenizer, prompt, params.skip_special_tokens, params.spaces_between_special_tokens
        )
        self.decode, self._finish_decoding = made.push, made.finish
        self._include = params.include_stop_str_in_output
        self._pending = ""
        self._whole = ""

    def push(self, ids: Sequence[int], *, last: bool, ended: bool) -> int:
        if not last:
            self._pending += self.decode(ids)
        else:
            # the token that ended the sequence is no text, unless the request includes it
            shown = ids[:-1] if ended and not self._include else ids
            self._pending += self.decode(shown) + self._finish_decoding()
        return len(ids)

    def take(self) -> str:
        new, self._pending = self._pending, ""
        return new

    def full_text(self) -> str:
        if self._pending:
            self._whole += self._pending
            self._pending = ""
        return self._whole


class FinalText(StreamingText):
    """Tokens are gathered and become text at the end, all at once."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        super().__init__(tokenizer, prompt, params)
        self._ids: list[int] = []

    def push(self, ids: Sequence[int], *, last: bool, ended: bool) -> int:
        self._ids.extend(ids)
        if last:
            super().push(self._ids, last=True, ended=ended)
        return len(ids)


class StopStringText(StreamingText):
    """Text that is cut at a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        super().__init__(tokenizer, prompt, params)
        self._window = StopWindow(params.stop_strings, self._include)
        self._min_tokens_left = params.min_tokens  # tokens in which no stop string may end

    def push(self, ids: Sequence[int], *, last: bool, ended: bool) -> int:
        shown = ids[:-1] if ended and not self._include else ids
        # token by token, to find the one that completes a stop string
        for count, token_id in enumerate(shown, 1):
            self._min_tokens_left -= 1
            if self._search(self.decode((token_id,)), self._min_tokens_left < 0):
                return count
        if last and not self._search(self._finish_decoding(), self._min_tokens_left <= 0):
            self._pending += self._window.finish()
        return len(ids)

    def _search(self, text: str, search: bool) -> bool:
        piece = self._window.push(text, search)
        self._pending += piece.text
        self.stop = piece.stop
        return piece.stop is not None
