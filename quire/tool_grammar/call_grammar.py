"""Grammars of function calls in the format of a model.

    calls      one or more calls, and no other text         tool_choice required, or a function
    among      text in which any call is one of these       strict functions under tool_choice auto
    listed     calls as a JSON list                         where a format has no form for them
    arguments  the arguments of one function, bare JSON     the same, for a function that was named

quire.text.tools and quire.text.output.json_tool_parser parse the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from quire.grammar.grammar_ast import (
    AlternationNode,
    GrammarNode,
    JsonNode,
    LiteralNode,
    RegexNode,
    RepeatNode,
    SequenceNode,
    TaggedTextNode,
    TagNode,
    map_json,
)
from quire.text.output.json_tool_parser import JSON_LIST_FORMAT
from quire.text.tools._render_calls import call_frame, param_frame
from quire.text.tools._schema_coercion import schema_types
from quire.text.tools.base import BranchStep as Fork
from quire.text.tools.base import (
    CallTemplate,
    ElementsStep,
    ParamsStep,
    RepeatStep,
    SyntaxStep,
    Tool,
    ToolFormat,
    closing_literals,
)
from quire.tool_grammar.parameter_schemas import (
    FunctionParameter,
    InexpressibleSchema,
    arguments_schema,
    function_parameters,
)
from quire.tool_grammar.value_grammar import LiteralNotation, TaggedValue, ordered_grammar

_INDEX_PLACEHOLDER = "\0"
_NUMBER = RegexNode("(0|[1-9][0-9]{0,2})")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/\-]*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_ANY_KEY = RegexNode("[A-Za-z_][A-Za-z0-9_]{0,63}")


def calls_grammar(
    dialect: ToolFormat,
    tools: Sequence[Tool],
    *,
    most: int | None = None,
    ends: Collection[str] = (),
) -> GrammarNode:
    """One or more calls. Raises Inexpressible if the dialect has no way to write some of them.

    ends: texts of tokens with which this model ends any text. Where calls end in one, it is not
    part of the form: the end follows anyway, behind one call.
    """
    how = dialect.template
    each = [call_grammar(dialect, tool) for tool in tools]
    if not how.after and call_frame(dialect, "").end in ends:
        return _alternation([SequenceNode(one.parts[:-1]) for one in each])
    return _repeated_calls(dialect, each, most)


def _repeated_calls(
    dialect: ToolFormat,
    each: Sequence[SequenceNode],
    most: int | None,
    lead: Sequence[GrammarNode] = (),
) -> GrammarNode:
    """One or more of them. lead: what may come before the first.

    Text between two is joined to the second, and text before all to the first: lexers
    of backends do not come back from where one mark could have ended to take it for another.
    """
    how = dialect.template
    first = [SequenceNode((*lead, *_literal_nodes(how.before), *one.parts)) for one in each]
    later = [SequenceNode((*_literal_nodes(how.between), *one.parts)) for one in each]
    more = RepeatNode(_alternation(later), "", 0, most and most - 1)
    return SequenceNode(
        (_alternation(first), *([] if most == 1 else [more]), *_literal_nodes(how.after))
    )


def json_list_grammar(tools: Sequence[Tool], *, most: int | None = None) -> GrammarNode:
    """Calls as a JSON list, whatever the model's own way is."""
    return calls_grammar(JSON_LIST_FORMAT, tools, most=most)


def arguments_node(tool: Tool) -> JsonNode:
    """The arguments of a function as JSON."""
    schema = json.dumps(arguments_schema(tool.parameters), ensure_ascii=False)
    return JsonNode(schema, owner=_owner(tool))


def _owner(tool: Tool) -> str:
    return f"the function {tool.name:.64}"


def call_grammar(dialect: ToolFormat, tool: Tool) -> SequenceNode:
    """One call of one function."""
    how = dialect.template
    if not how.name_in_json and not _NAME.fullmatch(tool.name):
        raise InexpressibleSchema(f"the name {tool.name!r:.80}")
    around_it = call_frame(dialect, tool.name, _INDEX_PLACEHOLDER)
    return SequenceNode(
        (
            *_literal_nodes(around_it.begin),
            map_json(
                _arguments_grammar(dialect, tool), lambda one: replace(one, owner=_owner(tool))
            ),
            *_literal_nodes(around_it.end),
        )
    )


def _literal_nodes(text: str) -> Iterator[GrammarNode]:
    """The text, with a number where the place of a call belongs."""
    for i, part in enumerate(text.split(_INDEX_PLACEHOLDER)):
        if i:
            yield _NUMBER
        if part:
            yield LiteralNode(part)


def _alternation(parts: Sequence[GrammarNode]) -> GrammarNode:
    return parts[0] if len(parts) == 1 else AlternationNode(tuple(parts))


# -- arguments ------------------------------------------------------------------------------------


def _arguments_grammar(dialect: ToolFormat, tool: Tool) -> GrammarNode:
    how = dialect.template
    if how.notation == "json":
        return arguments_node(tool)
    if how.notation in ("params", "elements"):
        return _tagged_arguments(dialect, tool)
    literals = LiteralNotation(how, tool.parameters)
    if how.notation == "braces":
        return literals.to_grammar(arguments_schema(tool.parameters))
    return _keyword_arguments(tool, how, literals)


def _keyword_arguments(tool: Tool, how: CallTemplate, literals: LiteralNotation) -> GrammarNode:
    """Arguments as Python has them: k='v', n=1."""
    if not _IDENTIFIER.fullmatch(tool.name):
        raise InexpressibleSchema(f"the name {tool.name!r:.80}")
    wanted = function_parameters(tool.parameters)
    items = []
    for one in wanted.named:
        if not _IDENTIFIER.fullmatch(one.name):
            raise InexpressibleSchema(f"the parameter {one.name!r:.80}")
        begin, end = param_frame(how, one.name, text=False)
        items.append(
            (
                SequenceNode(
                    (LiteralNode(begin), literals.to_grammar(one.schema), *_literal_nodes(end))
                ),
                one.required,
            )
        )
    if items or wanted.additional is None:
        return ordered_grammar(items, how.param_between)
    begin, end = param_frame(how, _INDEX_PLACEHOLDER, text=False)
    any_one = _with_key(begin, literals.to_grammar(wanted.additional), end)
    return RepeatNode(any_one, how.param_between, 0)


def _with_key(begin: str, value: GrammarNode, end: str) -> GrammarNode:
    before, _, after = begin.partition(_INDEX_PLACEHOLDER)
    return SequenceNode(
        (*_literal_nodes(before), _ANY_KEY, *_literal_nodes(after), value, *_literal_nodes(end))
    )


def _tagged_arguments(dialect: ToolFormat, tool: Tool) -> GrammarNode:
    """Arguments between tags, in the order in which they are declared."""
    how, ends = dialect.template, _value_ends(dialect)
    wanted = function_parameters(tool.parameters)
    items = [(_param(how, ends, tool, one), one.required) for one in wanted.named]
    if items or wanted.additional is None:
        return ordered_grammar(items, how.param_between)
    return RepeatNode(_any_param(how, ends, tool, wanted.additional), how.param_between, 0)


def _any_param(how: CallTemplate, ends: _ValueEnds, tool: Tool, schema: object) -> GrammarNode:
    place = _value_slot(how, ends, tool, _INDEX_PLACEHOLDER)
    if place.after.count(_INDEX_PLACEHOLDER):
        raise InexpressibleSchema("parameters of any name")
    head, before = place.before.split(_INDEX_PLACEHOLDER)
    typed = place.json and (place.json[0].split(_INDEX_PLACEHOLDER)[1], place.json[1])
    value = replace(place, before=before, json=typed).to_grammar(schema, tool.parameters)
    return SequenceNode((LiteralNode(head), _ANY_KEY, value))


def _param(how: CallTemplate, ends: _ValueEnds, tool: Tool, one: FunctionParameter) -> GrammarNode:
    if one.name != one.name.strip().strip("\"'") or re.search(r'[<>"\s]', one.name):
        raise InexpressibleSchema(f"the parameter {one.name!r:.80}")
    try:
        return _value_slot(how, ends, tool, one.name).to_grammar(one.schema, tool.parameters)
    except InexpressibleSchema as error:
        raise InexpressibleSchema(f"the parameter {one.name!r}: {error}") from None


def _value_slot(how: CallTemplate, ends: _ValueEnds, tool: Tool, key: str) -> TaggedValue:
    """The place of a parameter's value."""
    begin, end = param_frame(how, key, text=True)
    typed = param_frame(how, key, text=False) if how.json_attribute else None
    return TaggedValue(begin, end, ends.close, ends.barred, schema_types(tool, key), typed)


@dataclass(frozen=True, slots=True)
class _ValueEnds:
    """The literals that end a value between tags for the parser."""

    close: str
    barred: tuple[str, ...]
    """Those that must not be in a text, because the parser takes them for a forgotten `close`."""


def _value_ends(dialect: ToolFormat) -> _ValueEnds:
    end = dialect.template.param.partition("«value»")[2]
    for form in dialect.syntaxes:
        for step in _steps(form.steps):
            if isinstance(step, ElementsStep):
                return _ValueEnds(f"{step.prefix}<", ())
            if isinstance(step, ParamsStep) and step.value_close in end:
                return _ValueEnds(
                    step.value_close, (step.key_open, *(step.close if step.outer else ()))
                )
    raise InexpressibleSchema("parameters that it does not read")


def _steps(steps: Sequence[SyntaxStep]) -> Iterator[SyntaxStep]:
    for step in steps:
        yield step
        if isinstance(step, RepeatStep):
            yield from _steps(step.steps)
        elif isinstance(step, Fork):
            yield from _steps((*step.then, *step.otherwise))


# -- calls in a text ------------------------------------------------------------------------------


def text_with_calls_grammar(
    dialect: ToolFormat, tools: Sequence[Tool], *, only_first: bool = False
) -> GrammarNode:
    """Any text; where a call begins in it, it is one of these, as its function declares it.

    only_first: one call, and nothing follows it. Raises Inexpressible.
    """
    if any(form.reread_chars for form in dialect.syntaxes if form.bare):
        lines, text = _non_call_lines(dialect)
        each = [call_grammar(dialect, tool) for tool in tools]
        return AlternationNode(
            (text, _repeated_calls(dialect, each, 1 if only_first else None, [lines]))
        )
    marks = [mark for form in dialect.syntaxes for mark in form.begin]
    begin = _call_prefix(dialect, tools[0])
    mark = next((one for one in marks if begin.startswith(one)), None)
    if mark is None:
        raise InexpressibleSchema("calls that no mark begins")
    last = only_first or not _has_closing_literal(dialect)
    inner: GrammarNode = _alternation([call_grammar(dialect, tool) for tool in tools])
    if dialect.template.before or last:
        inner = calls_grammar(dialect, tools, most=1 if only_first else None)
    return TaggedTextNode(
        tuple(marks), (TagNode(mark, strip_prefix_literal(inner, mark), ""),), only_first=last
    )


def _has_closing_literal(dialect: ToolFormat) -> bool:
    """Calls end in a mark. Where they do not, what follows could be read as more of them."""
    end = (call_frame(dialect, "").end + dialect.template.after).rstrip()
    return any(
        end.endswith(mark) for form in dialect.syntaxes for mark in closing_literals(form.steps)
    )


def _call_prefix(dialect: ToolFormat, tool: Tool) -> str:
    return dialect.template.before + call_frame(dialect, tool.name, _INDEX_PLACEHOLDER).begin


def starts_with_literal(form: GrammarNode, mark: str) -> bool:
    """Whether all that the form allows begins with this text."""
    match form:
        case LiteralNode():
            return form.text.startswith(mark)
        case SequenceNode():
            return bool(form.parts) and starts_with_literal(form.parts[0], mark)
        case AlternationNode():
            return all(starts_with_literal(part, mark) for part in form.parts)
        case RepeatNode():
            return form.min_count == form.max_count == 1 and starts_with_literal(form.part, mark)
    return False


def strip_prefix_literal(form: GrammarNode, mark: str) -> GrammarNode:
    """The form behind a text that it begins with."""
    match form:
        case LiteralNode() if form.text.startswith(mark):
            return LiteralNode(form.text[len(mark) :]) if form.text != mark else SequenceNode(())
        case SequenceNode():
            return SequenceNode((strip_prefix_literal(form.parts[0], mark), *form.parts[1:]))
        case AlternationNode():
            return AlternationNode(tuple(strip_prefix_literal(part, mark) for part in form.parts))
        case RepeatNode() if form.min_count == form.max_count == 1:
            return strip_prefix_literal(form.part, mark)
    raise AssertionError(f"{form} does not begin with {mark!r}")


_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_CALL_SECONDS = {"{": "\"' \t\r\n", "[": "{ \t\r\n"}
"""Characters after a bracket with which a call may begin."""


def _non_call_lines(dialect: ToolFormat) -> tuple[RegexNode, RegexNode]:
    """Lines without the beginning of a call: some that a call may follow, and a whole text.

    Of an opening literal that counts anywhere not even two characters may be in the text; of one
    that counts at the beginning of a line the first may not be there.
    """
    seconds: dict[str, set[str]] = {}
    starts: set[str] = set()
    for form in dialect.syntaxes:
        for mark in form.begin:
            if form.bare and not form.inline:
                starts.add(mark[0])
            else:
                after = mark[1] if len(mark) > 1 else _CALL_SECONDS[mark]
                seconds.setdefault(mark[0], set()).update(after)
    firsts, begun = _char_set(seconds), _char_set(seconds.keys() - starts)
    any_first = f"[{firsts}]*" if firsts else ""
    ends = {
        first: f"{re.escape(first)}[^\\n{firsts}{_char_set(seconds[first])}]" for first in seconds
    }
    char = "|".join((rf"[^\n{firsts}]", *(any_first + end for end in ends.values())))
    first_char = "|".join(
        (
            rf"[^ \t\r\n{firsts}{_char_set(starts)}]",
            *(end for first, end in ends.items() if first not in starts),
            *(f"[{begun}]{any_first}{end}" for end in ends.values() if begun),
        )
    )
    last = _char_set(first for first, after in seconds.items() if "\n" not in after)
    run = f"({any_first}[{last}])?" if last else ""
    line = rf"[ \t\r]*(({first_char})({char})*{run})?"
    return RegexNode(rf"({line}\n)*"), RegexNode(rf"({line}\n)*{line}")


def _char_set(chars: Iterable[str]) -> str:
    """As they are written in a class of characters."""
    return "".join(_CONTROLS.get(char) or re.escape(char) for char in sorted(set(chars)))
