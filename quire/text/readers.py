"""How answers of one model are read: which dialects, chosen once, and a reader for each answer.

Not here: dialects (quire.text.reasoning, quire.text.tools), how they are chained
(quire.text.reading). A server and LLM.chat read alike because both come through here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from quire.errors import ConfigError
from quire.text.detokenizer import Detokenizer
from quire.text.marks import Marks
from quire.text.reading import Reading, ReasoningTokens, hidden_marks
from quire.text.reasoning import choose as reasonings
from quire.text.reasoning import openai_gptoss
from quire.text.reasoning.base import Dialect
from quire.text.reasoning.machine import Machine
from quire.text.speech import Piece, Reader
from quire.text.tokenizer import Tokenizer
from quire.text.tools import choose as calls
from quire.text.tools import openai

log = logging.getLogger(__name__)

AUTO = "auto"
_SOME_TOOL = ({"type": "function", "function": {"name": "f", "parameters": {}}},)


@dataclass(frozen=True, slots=True)
class Parsers:
    """What is said of parsers: names, "auto" or None, and plug-in files."""

    reasoning: str | None = None
    tools: str | None = None
    reasoning_plugin: str | None = None
    tools_plugin: str | None = None


@dataclass(frozen=True, slots=True)
class Began:
    """How a prompt ends, for the reader of its answer.

    begun: the text of its last message, if the answer goes on with it. variables: of the template.
    """

    prompt: str = ""
    begun: str = ""
    variables: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Readers:
    """The dialects of one model."""

    tokenizer: Tokenizer
    reasoning: Dialect | None
    tools: calls.Chosen | None
    hidden: Marks

    def answer(
        self,
        began: Began,
        calls: Reader | None,
        *,
        parallel: bool = True,
        reasoning: bool = True,
        special: bool = False,
    ) -> AnswerReader:
        """The reader of one answer. calls: what reads calls; None if none are to be read.

        reasoning=False: what is reasoning is left out. special: special tokens stay in the text.
        """
        machine = None
        if self.reasoning is not None:
            machine = Machine(self.reasoning, began.prompt, began.variables, begun=began.begun)
        reading = Reading(
            machine, calls, None if special else self.hidden, first_call_only=not parallel
        )
        counter = None
        if machine is not None:
            counter = ReasoningTokens(machine, Detokenizer(self.tokenizer, (), False).push)
        return AnswerReader(reading, counter, shows=reasoning)


class AnswerReader:
    """Reads one answer: text and the tokens it was made of, as they come."""

    def __init__(
        self, reading: Reading, counter: ReasoningTokens | None, *, shows: bool = True
    ) -> None:
        self._reading = reading
        self._counter = counter
        self._shows = shows
        self._whole_calls = 0
        self._broken = False
        self.notes: list[str] = []
        """Diagnostics so far: markup that was no call, and the like."""

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of reasoning so far; None where nothing tells them apart."""
        return None if self._counter is None else self._counter.count

    def push(self, text: str, token_ids: Sequence[int], *, last: bool) -> list[Piece]:
        """What is new, without notes."""
        if self._counter is not None:
            self._counter.push(token_ids)
        told = []
        for piece in self._reading.push(text, last=last):
            if piece.note:
                self.notes.append(piece.note)
            elif piece.reasoning:
                told += [piece] if self._shows else []
            else:
                if piece.call is not None and piece.call.end is not None:
                    self._whole_calls += piece.call.end == "whole"
                    self._broken |= piece.call.end != "whole"
                told.append(piece)
        if self._counter is not None:
            self._counter.settle()
        return told

    def finish(self, reason: str) -> str:
        """The finish reason to tell: tool_calls in place of stop, if all its calls are whole."""
        return (
            "tool_calls" if reason == "stop" and self._whole_calls and not self._broken else reason
        )


def readers(said: Parsers, tokenizer: Tokenizer, chat_template: str | None) -> Readers | None:
    """The dialects that are meant; None: text is content. Raises ConfigError."""
    reasoning = None
    if said.reasoning is not None:
        template = _source(tokenizer, chat_template, None) if said.reasoning == AUTO else None
        reasoning = reasonings.choose(said.reasoning, template, said.reasoning_plugin)
        if reasoning is None:
            log.info("the chat template shows no reasoning: the text of answers holds all there is")
    tools = None
    if said.tools is not None:
        template = _source(tokenizer, chat_template, _SOME_TOOL) if said.tools == AUTO else None
        tools = calls.choose(said.tools, template=template, plugin=said.tools_plugin)
        if reasoning is None and tools.dialect is openai.DIALECT:
            reasoning = openai_gptoss.DIALECT  # the channels are one format
    if reasoning is None and tools is None:
        return None
    return replace(plain(tokenizer), reasoning=reasoning, tools=tools)


@lru_cache(maxsize=4)
def plain(tokenizer: Tokenizer) -> Readers:
    """Of a model of which nobody said how it writes reasoning and calls."""
    backend = tokenizer.backend
    hidden = (backend.id_to_token(i) or "" for i in backend.special_ids)
    return Readers(tokenizer, None, None, hidden_marks(hidden))


def _source(tokenizer: Tokenizer, chat_template: str | None, tools: object) -> str:
    if chat_template is None and not tokenizer.templates:
        raise ConfigError("no chat template to tell the parser from: name the parser")
    return tokenizer.template(chat_template, tools).source


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message that an answer goes on with."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return next((text for text in reversed(texts) if isinstance(text, str)), "")
