"""Selects the reasoning and tool-call formats of a model once, and makes a parser for each answer.

The formats are in quire.text.reasoning and quire.text.tools, their chain is in
quire.text.output.parser_chain. The server and LLM.chat both parse through this module.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from quire.errors import ConfigError
from quire.text.output.parsed_text import ParsedPiece, StreamingParser
from quire.text.output.parser_chain import ParserChain, ReasoningTokenCounter, special_token_strings
from quire.text.output.special_strings import SpecialStrings
from quire.text.reasoning import select as reasonings
from quire.text.reasoning.base import ReasoningFormat
from quire.text.reasoning.parser import ReasoningParser
from quire.text.tokenizing.detokenizer import Detokenizer
from quire.text.tokenizing.tokenizer import Tokenizer
from quire.text.tools import select as calls
from quire.text.tools._call_openers import CallOpeners

log = logging.getLogger(__name__)

AUTO = "auto"
_EXAMPLE_TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {}}},)


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """Parser options: names, "auto" or None, and plug-in files."""

    reasoning: str | None = None
    tools: str | None = None
    reasoning_plugin: str | None = None
    tools_plugin: str | None = None
    reasoning_marks: tuple[str, str] = ("", "")
    """The marks that reasoning_config gives; they must be those of the format."""


@dataclass(frozen=True, slots=True)
class PromptTail:
    """The end of a prompt, for the parser of its answer.

    continued_text: the text of its last message, if the answer continues it. variables: of the
    template. literals: spans of the prompt that hold no special tokens (quire.text.media_prompt).
    """

    prompt: str = ""
    continued_text: str = ""
    variables: Mapping[str, object] | None = None
    literals: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class AnswerParserFactory:
    """The reasoning and tool-call formats of one model."""

    tokenizer: Tokenizer
    reasoning: ReasoningFormat | None
    tools: calls.ToolParserFactory | None
    special_strings: SpecialStrings

    def create(
        self,
        prompt_tail: PromptTail,
        calls: StreamingParser | None,
        *,
        openers: CallOpeners = MappingProxyType({}),
        parallel: bool = True,
        reasoning: bool = True,
        special: bool = False,
    ) -> AnswerParser:
        """Make a parser of one answer. calls: the parser of its calls; None: calls are text.

        openers: literals that begin a call, also in reasoning. reasoning=False: reasoning is left
        out. special: special tokens stay in the text.
        """
        machine = None
        if self.reasoning is not None:
            machine = ReasoningParser(
                self.reasoning,
                prompt_tail.prompt,
                prompt_tail.variables,
                continued_text=prompt_tail.continued_text,
                openers=openers,
            )
        reading = ParserChain(
            machine, calls, None if special else self.special_strings, first_call_only=not parallel
        )
        counter = None
        if machine is not None:
            counter = ReasoningTokenCounter(machine, Detokenizer(self.tokenizer, (), False).push)
        return AnswerParser(reading, counter, shows=reasoning)


class AnswerParser:
    """Parses one answer from its text and the tokens of that text, as they come."""

    def __init__(
        self, reading: ParserChain, counter: ReasoningTokenCounter | None, *, shows: bool = True
    ) -> None:
        self._chain = reading
        self._counter = counter
        self._include_reasoning = shows
        self._complete_calls = 0
        self._has_failed_call = False
        self.notes: list[str] = []
        """Diagnostics so far: markup that was no call, and the like."""

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens so far; None if the parser cannot count them."""
        return None if self._counter is None else self._counter.count

    def push(self, text: str, token_ids: Sequence[int], *, last: bool) -> list[ParsedPiece]:
        """The new pieces. Diagnostics go to `notes`."""
        if self._counter is not None:
            self._counter.push(token_ids)
        visible = []
        for piece in self._chain.push(text, last=last):
            if piece.note:
                self.notes.append(piece.note)
            elif piece.reasoning:
                visible += [piece] if self._include_reasoning else []
            else:
                if piece.call is not None and piece.call.outcome is not None:
                    self._complete_calls += piece.call.outcome == "whole"
                    self._has_failed_call |= piece.call.outcome != "whole"
                visible.append(piece)
        if self._counter is not None:
            self._counter.count_pending()
        return visible

    def finish(self, reason: str) -> str:
        """The finish reason to report: tool_calls instead of stop, if all calls are complete."""
        return (
            "tool_calls"
            if reason == "stop" and self._complete_calls and not self._has_failed_call
            else reason
        )


def build_answer_parser_factory(
    declared: ParserOptions, tokenizer: Tokenizer, chat_template: str | None
) -> AnswerParserFactory | None:
    """The formats that the options name; None: text is content. Raises ConfigError."""
    reasoning = None
    if declared.reasoning is not None:
        template = (
            _template_source(tokenizer, chat_template, None) if declared.reasoning == AUTO else None
        )
        reasoning = reasonings.select_reasoning_format(
            declared.reasoning, template, declared.reasoning_plugin
        )
        if reasoning is None:
            log.info("the chat template shows no reasoning: the text of answers holds all there is")
    tools = None
    if declared.tools is not None:
        template = (
            _template_source(tokenizer, chat_template, _EXAMPLE_TOOLS)
            if declared.tools == AUTO
            else None
        )
        tools = calls.select_tool_parser(
            declared.tools, template=template, plugin=declared.tools_plugin
        )
        if reasoning is None and tools.format is not None and tools.format.channels:
            reasoning = reasonings.select_reasoning_format(tools.format.channels)
    reasonings.check_reasoning_marks(reasoning, *declared.reasoning_marks, "reasoning_config")
    if reasoning is None and tools is None:
        return None
    return replace(content_only_factory(tokenizer), reasoning=reasoning, tools=tools)


@lru_cache(maxsize=4)
def content_only_factory(tokenizer: Tokenizer) -> AnswerParserFactory:
    """For a model without reasoning and tool-call format."""
    backend = tokenizer.backend
    hidden = (backend.id_to_token(i) or "" for i in backend.special_ids)
    return AnswerParserFactory(tokenizer, None, None, special_token_strings(hidden))


def _template_source(tokenizer: Tokenizer, chat_template: str | None, tools: object) -> str:
    if chat_template is None and not tokenizer.templates:
        raise ConfigError("there is no chat template to detect the parser from: name the parser")
    return tokenizer.template(chat_template, tools).source


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message that an answer continues."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return next((text for text in reversed(texts) if isinstance(text, str)), "")
