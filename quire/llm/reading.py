"""What LLM.chat binds its answers to and reads in them: reasoning and calls, as the server does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.binding.choice import Choice, choice
from quire.binding.plan import Plan, plan, strict_names, wanted
from quire.binding.rules import Rules, budget, check_arguments, whole_form
from quire.core.params import SamplingParams
from quire.errors import RequestError
from quire.grammar import admit, words
from quire.grammar.forms import Form
from quire.grammar.words import House
from quire.outputs import CompletionOutput, FunctionCall, RequestOutput, ToolCall
from quire.text.readers import Began, Parsers, Readers, plain, readers, text_of
from quire.text.speech import gather
from quire.text.tokenizer import Tokenizer
from quire.text.tools.base import declared


@dataclass(frozen=True, slots=True)
class Reads:
    """How the answers of one chat() are to be bound and read."""

    readers: Readers
    tools: Sequence[Any]
    variables: Mapping[str, object] | None
    goes_on: bool
    """The answers go on with the last message of their conversation."""
    choice: Choice
    parallel: bool
    house: House
    ends: frozenset[str]

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

    def each(
        self,
        prompts: Sequence[str],
        conversations: Sequence[Sequence[Any]],
        params: Sequence[SamplingParams],
    ) -> list[Rules]:
        """For the answers to each of them. Raises RequestError."""
        return [self._rules(*one) for one in zip(prompts, conversations, params)]

    def _rules(self, prompt: str, messages: Sequence[Any], params: SamplingParams) -> Rules:
        began, asked = self._began(prompt, messages), params.structured_outputs
        content = None if asked is None else words.form(asked, self.house)
        backend = self.house.backend if asked is None else words.backend(asked, self.house)
        bound = self._plan(content).bound
        form = whole_form(bound, self.readers, began, self.house)
        constraint = None
        if form is not None:
            param = "structured_outputs" if asked is not None else "tools"
            constraint = admit.constraint(form, backend, param=param)
        return Rules(constraint, budget(params.thinking_token_budget, self.readers, began))

    def read(self, output: RequestOutput, messages: Sequence[Any], params: SamplingParams) -> None:
        """Fill in reasoning and tool calls of all answers; their text is what is left."""
        began = self._began(output.prompt or "", messages)
        for one in output.outputs:
            self._read(one, began, special=not params.skip_special_tokens)

    def _began(self, prompt: str, messages: Sequence[Any]) -> Began:
        return Began(prompt, text_of(messages[-1]) if self.goes_on else "", self.variables)

    def _plan(self, content: Form | None = None) -> Plan:
        return plan(
            self.readers.tools,
            self.tools,
            self.choice,
            parallel=self.parallel,
            ends=self.ends,
            content=content,
        )

    def _read(self, one: CompletionOutput, began: Began, *, special: bool) -> None:
        calls = self._plan().reader()
        reader = self.readers.answer(began, calls, parallel=self.parallel, special=special)
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


@dataclass(frozen=True, slots=True)
class Talk:
    """What chat() was asked of tools and thoughts."""

    parsers: Parsers
    tools: Sequence[Any] | None
    tool_choice: object
    parallel: bool
    variables: Mapping[str, object] | None
    goes_on: bool


def reads(
    talk: Talk,
    tokenizer: Tokenizer,
    chat_template: str | None,
    house: House,
    eos_ids: frozenset[int],
) -> Reads | None:
    """None: nothing is bound or read. Raises ConfigError for parsers nobody knows, RequestError."""
    tools = talk.tools or ()
    asked = choice(talk.tool_choice, list(declared(tools)))
    made = readers(talk.parsers, tokenizer, chat_template)
    if asked.said and asked.mode == "auto" and tools and (made is None or made.tools is None):
        message = "tool_choice 'auto' needs to know how the model writes calls: give tool_parser"
        raise RequestError(message, param="tool_choice")
    if made is None and not asked.forces:
        return None
    made = made or plain(tokenizer)
    _check_schemas(tools, asked, strict=made.tools is not None)
    ends = frozenset(tokenizer.backend.id_to_token(i) or "" for i in eos_ids)
    return Reads(made, tools, talk.variables, talk.goes_on, asked, talk.parallel, house, ends)


def _check_schemas(tools: Sequence[Any], asked: Choice, *, strict: bool) -> None:
    """Each schema that calls will be bound to."""
    names = strict_names(tools) if strict and asked.mode == "auto" else frozenset()
    for place, tool in enumerate(wanted(tools, asked) if tools else ()):
        if asked.forces or tool.name in names:
            check_arguments(tool, f"tools[{place}].function.parameters")
