"""Puts the grammar of an answer after its reasoning.

the prompt ends in <think>       reasoning </think> grammar
the prompt has no such mark      grammar, or <think> reasoning </think> grammar
the prompt ends in </think>      grammar

A tool call may follow reasoning that is not closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from quire.core.types import CallOpener, ThinkingBudget
from quire.grammar.grammar_ast import (
    AlternationNode,
    GrammarNode,
    LiteralNode,
    RegexNode,
    RepeatNode,
    SequenceNode,
    TaggedTextNode,
    TagNode,
    UntilNode,
)
from quire.text.reasoning.base import (
    ChannelMarkup,
    ModeKind,
    ModeTransition,
    ParserMode,
    ReasoningFormat,
)
from quire.text.reasoning.parser import ReasoningParser
from quire.tool_grammar.call_grammar import starts_with_literal, strip_prefix_literal

ANY_TEXT = RegexNode(r"[\s\S]*")
_BREAK = RegexNode(r"\n{0,2}")
"""Between reasoning and the answer; parsers drop it."""


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """Grammar of an answer without reasoning: of its content, or of its calls."""

    content: GrammarNode | None = None
    calls: GrammarNode | None = None
    is_unconstrained: bool = False
    """Calls are in text that has no grammar."""
    openers: tuple[str, ...] = ()
    """Literals that begin a call for the parser, also in reasoning."""
    functions: tuple[str, ...] = ()
    """Names of the declared functions."""

    def combined(self) -> GrammarNode:
        """Content or calls."""
        return _alternation([one for one in (self.content, self.calls) if one is not None])


def answer_with_reasoning(
    answer: AnswerGrammar,
    reasoning_format: ReasoningFormat,
    prompt: str = "",
    variables: Mapping[str, object] | None = None,
    *,
    continued_text: str = "",
) -> GrammarNode:
    """The whole answer to this prompt. continued_text: of the message that it continues."""
    mode = ReasoningParser(reasoning_format, prompt, variables, continued_text=continued_text).mode
    if reasoning_format.channels is not None:
        return _channel_messages(
            answer, reasoning_format.channels, mode, continues=bool(continued_text)
        )
    if reasoning_format.prefix:
        return SequenceNode(
            (UntilNode("</" + reasoning_format.prefix.removeprefix("<")), _BREAK, answer.combined())
        )
    if mode.kind is ModeKind.REASONING:
        return _rest_of_reasoning(answer, reasoning_format, mode)
    if continued_text or mode is reasoning_format.modes.get(
        reasoning_format.mode_from_prompt(prompt) or ""
    ):
        return _alternation([_without_reasoning(answer, mode)])
    ways = [_optionally_wrapped(answer, reasoning_format, mode)]
    for mark, turn in {**mode.initial_transitions, **mode.transitions}.items():
        inner = _target_mode(reasoning_format, turn)
        if inner is not None and inner.kind is ModeKind.REASONING:
            ways.append(
                SequenceNode(
                    (LiteralNode(mark), _rest_of_reasoning(answer, reasoning_format, inner))
                )
            )
    return _alternation(ways)


def _target_mode(reasoning_format: ReasoningFormat, turn: ModeTransition) -> ParserMode | None:
    return reasoning_format.modes[turn.target] if isinstance(turn.target, str) else None


def _rest_of_reasoning(
    answer: AnswerGrammar, reasoning_format: ReasoningFormat, mode: ParserMode
) -> GrammarNode:
    """The rest of the reasoning, and the answer."""
    ways = {
        mark: _after_marker(answer, reasoning_format, mark, turn)
        for mark, turn in mode.transitions.items()
    }
    for mark in answer.openers:
        turn = ModeTransition("content", "after")
        ways.setdefault(mark, _after_marker(answer, reasoning_format, mark, turn))
    if len(ways) == 1:
        ((mark, way),) = ways.items()
        assert way is not None, f"nothing may follow {mark}"
        return SequenceNode((UntilNode(mark), way))
    tags = [TagNode(mark, way, "") for mark, way in ways.items() if way is not None]
    return TaggedTextNode(tuple(ways), tuple(tags), min_tags=1, only_first=True)


def _after_marker(
    answer: AnswerGrammar, reasoning_format: ReasoningFormat, mark: str, turn: ModeTransition
) -> GrammarNode | None:
    """The grammar after a mark that ends reasoning; None: the mark is not allowed there."""
    into = _target_mode(reasoning_format, turn)
    if turn.keep != "after":
        return _optionally_wrapped(answer, reasoning_format, into, spaced=True)
    calls = answer.calls
    return (
        strip_prefix_literal(calls, mark)
        if calls is not None and starts_with_literal(calls, mark)
        else None
    )


def _optionally_wrapped(
    answer: AnswerGrammar,
    reasoning_format: ReasoningFormat,
    mode: ParserMode | None,
    *,
    spaced: bool = False,
) -> GrammarNode:
    """The answer, its content with or without the marks that a model writes around it."""
    lead = (_BREAK,) if spaced else ()
    ways: list[GrammarNode] = [
        SequenceNode((*lead, answer.combined())) if spaced else answer.combined()
    ]
    if answer.content is not None and mode is not None:
        for mark, turn in mode.initial_transitions.items():
            inner = _target_mode(reasoning_format, turn)
            if inner is not None and inner.kind is ModeKind.CONTENT:
                ways.append(
                    SequenceNode(
                        (*lead, LiteralNode(mark), _wrapped_content(answer.content, inner))
                    )
                )
    return _alternation(ways)


def _wrapped_content(content: GrammarNode, mode: ParserMode) -> GrammarNode:
    """Content up to the mark that closes what was opened around it."""
    return SequenceNode(
        (_BREAK, content, _BREAK, _alternation([LiteralNode(mark) for mark in mode.transitions]))
    )


def _without_reasoning(answer: AnswerGrammar, mode: ParserMode) -> GrammarNode:
    """After a prompt that excludes reasoning. It may have opened marks around the content."""
    wraps = [mark for mark, turn in mode.transitions.items() if turn.target == "rest"]
    if answer.content is None or not wraps:
        return answer.combined()
    end = RepeatNode(
        SequenceNode((_BREAK, _alternation([LiteralNode(mark) for mark in wraps]))),
        min_count=0,
        max_count=1,
    )
    content = SequenceNode((answer.content, end))
    return content if answer.calls is None else AlternationNode((content, answer.calls))


def _channel_messages(
    answer: AnswerGrammar, markup: ChannelMarkup, mode: ParserMode, *, continues: bool
) -> GrammarNode:
    """An answer of several messages: reasoning, then one of content or calls."""
    content = None
    if answer.content is not None:
        content = SequenceNode((LiteralNode(markup.content), answer.content))
    calls = answer.calls
    if calls is not None and markup.call[0]:
        before, after = markup.call
        headers = [LiteralNode(f"{before}{name}{after}") for name in answer.functions]
        calls = SequenceNode((_alternation(headers), calls))
    last = AnswerGrammar(content, calls).combined()
    thought = SequenceNode(
        (LiteralNode(markup.reasoning), UntilNode(markup.end), LiteralNode(markup.next_message))
    )
    messages = SequenceNode((RepeatNode(thought, min_count=0), last))
    if mode.kind is ModeKind.REASONING:
        return SequenceNode((UntilNode(markup.end), LiteralNode(markup.next_message), messages))
    if continues and answer.content is not None:
        return answer.content
    return messages


def _alternation(parts: Sequence[GrammarNode]) -> GrammarNode:
    return parts[0] if len(parts) == 1 else AlternationNode(tuple(parts))


# -- budgets --------------------------------------------------------------------------------------


def thinking_budget(
    budget: int,
    reasoning_format: ReasoningFormat,
    encode: Callable[[str], Sequence[int]],
    prompt: str = "",
    variables: Mapping[str, object] | None = None,
    *,
    continued_text: str = "",
    openers: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    whitespace_ids: tuple[int, ...] = (),
) -> ThinkingBudget | None:
    """The budget with this model's tokens. None: the format has no marks of reasoning.

    openers: literals that begin a call, with the tokens of which one must follow for the parser to
    end the reasoning there, after whitespace (whitespace_ids).
    """
    mode = ReasoningParser(reasoning_format, prompt, variables, continued_text=continued_text).mode
    inner = mode
    if reasoning_format.channels is not None:
        begin, end = reasoning_format.channels.reasoning, reasoning_format.channels.end
        inner = _reasoning_mode(reasoning_format)
        openers = {}
    elif reasoning_format.prefix:
        begin, end = reasoning_format.prefix, "</" + reasoning_format.prefix.removeprefix("<")
        return ThinkingBudget(budget, tuple(encode(end)), None)
    elif mode.kind is ModeKind.REASONING:
        begin, end = "", _end_marker(mode)
    else:
        found = _reasoning_markers(reasoning_format, mode)
        if not found:
            return None
        begin, inner = min(found, key=lambda pair: len(encode(pair[0])))
        end = _end_marker(inner)
    within = mode.kind is ModeKind.REASONING
    marks = inner.transitions
    return ThinkingBudget(
        budget,
        tuple(encode(end)),
        None if within else tuple(encode(begin)),
        tuple(one for one in _spellings(encode, marks) if one != tuple(encode(end))),
        tuple(
            CallOpener(spelling, openers[mark])
            for mark in openers
            if not any(mark.startswith(one) or one.startswith(mark) for one in marks)
            for spelling in _spellings(encode, (mark,))
        ),
        whitespace_ids if openers else (),
    )


def _spellings(
    encode: Callable[[str], Sequence[int]], marks: Iterable[str]
) -> list[tuple[int, ...]]:
    """The tokens of marks, also of those whose last token takes in the end of the line."""
    found: list[tuple[int, ...]] = []
    for mark in marks:
        for text in (mark, f"{mark}\n", f"{mark}\n\n"):
            ids = tuple(encode(text))
            if not any(ids[: len(one)] == one for one in found):
                found.append(ids)
    return found


def _reasoning_mode(reasoning_format: ReasoningFormat) -> ParserMode:
    modes = reasoning_format.modes.values()
    return next(one for one in modes if one.kind is ModeKind.REASONING)


def _reasoning_markers(
    reasoning_format: ReasoningFormat, mode: ParserMode
) -> list[tuple[str, ParserMode]]:
    """The marks that open reasoning, and the mode that each opens."""
    found = []
    for mark, turn in {**mode.initial_transitions, **mode.transitions}.items():
        inner = _target_mode(reasoning_format, turn)
        if inner is not None and inner.kind is ModeKind.REASONING:
            found.append((mark, inner))
    return found


def _end_marker(mode: ParserMode) -> str:
    """The mark that ends reasoning."""
    return next(mark for mark, turn in mode.transitions.items() if turn.keep != "after")
