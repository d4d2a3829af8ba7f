"""What LLM.chat reads in its answers: reasoning and tool calls, as the server does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.params import SamplingParams
from quire.errors import RequestError
from quire.outputs import CompletionOutput, FunctionCall, RequestOutput, ToolCall
from quire.text.readers import Began, Parsers, Readers, readers, text_of
from quire.text.speech import gather
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reads:
    """How the answers of one chat() are to be read."""

    readers: Readers
    tools: Sequence[Any] | None
    variables: Mapping[str, object] | None
    goes_on: bool
    """The answers go on with the last message of their conversation."""

    def params(self, given: Sequence[SamplingParams]) -> list[SamplingParams]:
        """As asked for, but the text of the engine has its special tokens: they are marks."""
        made = []
        for one in given:
            if not one.detokenize:
                message = "detokenize=False leaves no text to read reasoning or tool calls in"
                raise RequestError(message, param="detokenize")
            made.append(one.clone())
            made[-1].skip_special_tokens = False
        return made

    def read(self, output: RequestOutput, messages: Sequence[Any], params: SamplingParams) -> None:
        """Fill in reasoning and tool calls of all answers; their text is what is left."""
        begun = text_of(messages[-1]) if self.goes_on else ""
        began = Began(output.prompt or "", begun, self.variables)
        for one in output.outputs:
            self._read(one, began, special=not params.skip_special_tokens)

    def _read(self, one: CompletionOutput, began: Began, *, special: bool) -> None:
        reader = self.readers.answer(began, self.tools, special=special)
        speech = gather(reader.push(one.text, one.token_ids, last=True))
        one.text = speech.text
        one.reasoning = speech.reasoning or None
        one.tool_calls = [
            ToolCall(call.id or "", FunctionCall(call.name or "", call.arguments))
            for call in speech.calls
        ]
        one.notes = reader.notes
        if one.finish_reason is not None:
            one.finish_reason = reader.finish(one.finish_reason)


def reads(
    said: Parsers,
    tokenizer: Tokenizer,
    chat_template: str | None,
    *,
    tools: Sequence[Any] | None,
    variables: Mapping[str, object] | None,
    goes_on: bool,
) -> Reads | None:
    """None: nothing is to be read. Raises ConfigError for parsers nobody knows."""
    made = readers(said, tokenizer, chat_template)
    return None if made is None else Reads(made, tools or None, variables, goes_on)
