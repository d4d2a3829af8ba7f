"""Grammars of function calls in the format of a model.

    calls      one or more calls, and no other text         tool_choice required, or a function
    among      text in which any call is one of these       strict functions under tool_choice auto
    listed     calls as a JSON list                         where a format cannot express them
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
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    *,
    max_calls: int | None = None,
    eos_texts: Collection[str] = (),
) -> GrammarNode:
    """One or more calls. Raises InexpressibleSchema if the format cannot express some of them.

    eos_texts: texts of this model's end tokens. Where calls end in one, it is not part of the
    grammar: the end of the answer follows in any case, after one call.
    """
    template = tool_format.template
    each = [call_grammar(tool_format, tool) for tool in tools]
    if not template.after and call_frame(tool_format, "").end in eos_texts:
        return _alternation([SequenceNode(one.parts[:-1]) for one in each])
    return _repeated_calls(tool_format, each, max_calls)


def _repeated_calls(
    tool_format: ToolFormat,
    each: Sequence[SequenceNode],
    max_calls: int | None,
    lead: Sequence[GrammarNode] = (),
) -> GrammarNode:
    """One or more of them. lead: what may come before the first.

    Text between two is joined to the second, and text before all to the first: lexers
    of backends do not come back from where one mark could have ended to take it for another.
    """
    template = tool_format.template
    first = [SequenceNode((*lead, *_literal_nodes(template.before), *one.parts)) for one in each]
    later = [SequenceNode((*_literal_nodes(template.between), *one.parts)) for one in each]
    more = RepeatNode(_alternation(later), "", 0, max_calls and max_calls - 1)
    return SequenceNode(
        (_alternation(first), *([] if max_calls == 1 else [more]), *_literal_nodes(template.after))
    )


def json_list_grammar(tools: Sequence[Tool], *, max_calls: int | None = None) -> GrammarNode:
    """Calls as a JSON list, regardless of the model's own format."""
    return calls_grammar(JSON_LIST_FORMAT, tools, max_calls=max_calls)


def arguments_node(tool: Tool) -> JsonNode:
    """The arguments of a function as JSON."""
    schema = json.dumps(arguments_schema(tool.parameters), ensure_ascii=False)
    return JsonNode(schema, owner=_owner(tool))


def _owner(tool: Tool) -> str:
    return f"the function {tool.name:.64}"


def call_grammar(tool_format: ToolFormat, tool: Tool) -> SequenceNode:
    """One call of one function."""
    template = tool_format.template
    if not template.name_in_json and not _NAME.fullmatch(tool.name):
        raise InexpressibleSchema(f"the name {tool.name!r:.80}")
    around_it = call_frame(tool_format, tool.name, _INDEX_PLACEHOLDER)
    return SequenceNode(
        (
            *_literal_nodes(around_it.begin),
            map_json(
                _arguments_grammar(tool_format, tool), lambda one: replace(one, owner=_owner(tool))
            ),
            *_literal_nodes(around_it.end),
        )
    )


def _literal_nodes(text: str) -> Iterator[GrammarNode]:
    """The text, with a number in place of the index of a call."""
    for i, part in enumerate(text.split(_INDEX_PLACEHOLDER)):
        if i:
            yield _NUMBER
        if part:
            yield LiteralNode(part)


def _alternation(parts: Sequence[GrammarNode]) -> GrammarNode:
    return parts[0] if len(parts) == 1 else AlternationNode(tuple(parts))


# -- arguments ------------------------------------------------------------------------------------


def _arguments_grammar(tool_format: ToolFormat, tool: Tool) -> GrammarNode:
    template = tool_format.template
    if template.notation == "json":
        return arguments_node(tool)
    if template.notation in ("params", "elements"):
        return _tagged_arguments(tool_format, tool)
    literals = LiteralNotation(template, tool.parameters)
    if template.notation == "braces":
        return literals.to_grammar(arguments_schema(tool.parameters))
    return _keyword_arguments(tool, template, literals)


def _keyword_arguments(
    tool: Tool, template: CallTemplate, literals: LiteralNotation
) -> GrammarNode:
    """Arguments in Python's notation: k='v', n=1."""
    if not _IDENTIFIER.fullmatch(tool.name):
        raise InexpressibleSchema(f"the name {tool.name!r:.80}")
    wanted = function_parameters(tool.parameters)
    items = []
    for one in wanted.named:
        if not _IDENTIFIER.fullmatch(one.name):
            raise InexpressibleSchema(f"the parameter {one.name!r:.80}")
        begin, end = param_frame(template, one.name, text=False)
        items.append(
            (
                SequenceNode(
                    (LiteralNode(begin), literals.to_grammar(one.schema), *_literal_nodes(end))
                ),
                one.required,
            )
        )
    if items or wanted.additional is None:
        return ordered_grammar(items, template.param_between)
    begin, end = param_frame(template, _INDEX_PLACEHOLDER, text=False)
    any_one = _with_key(begin, literals.to_grammar(wanted.additional), end)
    return RepeatNode(any_one, template.param_between, 0)


def _with_key(begin: str, value: GrammarNode, end: str) -> GrammarNode:
    before, _, after = begin.partition(_INDEX_PLACEHOLDER)
    return SequenceNode(
        (*_literal_nodes(before), _ANY_KEY, *_literal_nodes(after), value, *_literal_nodes(end))
    )


def _tagged_arguments(tool_format: ToolFormat, tool: Tool) -> GrammarNode:
    """Arguments between tags, in the order in which they are declared."""
    template, ends = tool_format.template, _value_ends(tool_format)
    wanted = function_parameters(tool.parameters)
    items = [(_param(template, ends, tool, one), one.required) for one in wanted.named]
    if items or wanted.additional is None:
        return ordered_grammar(items, template.param_between)
    return RepeatNode(
        _any_param(template, ends, tool, wanted.additional), template.param_between, 0
    )


def _any_param(template: CallTemplate, ends: _ValueEnds, tool: Tool, schema: object) -> GrammarNode:
    place = _value_slot(template, ends, tool, _INDEX_PLACEHOLDER)
    if place.after.count(_INDEX_PLACEHOLDER):
        raise InexpressibleSchema("parameters of any name")
    head, before = place.before.split(_INDEX_PLACEHOLDER)
    typed = place.json and (place.json[0].split(_INDEX_PLACEHOLDER)[1], place.json[1])
    value = replace(place, before=before, json=typed).to_grammar(schema, tool.parameters)
    return SequenceNode((LiteralNode(head), _ANY_KEY, value))


def _param(
    template: CallTemplate, ends: _ValueEnds, tool: Tool, one: FunctionParameter
) -> GrammarNode:
    if one.name != one.name.strip().strip("\"'") or re.search(r'[<>"\s]', one.name):
        raise InexpressibleSchema(f"the parameter {one.name!r:.80}")
    try:
        return _value_slot(template, ends, tool, one.name).to_grammar(one.schema, tool.parameters)
    except InexpressibleSchema as error:
        raise InexpressibleSchema(f"the parameter {one.name!r}: {error}") from None


def _value_slot(template: CallTemplate, ends: _ValueEnds, tool: Tool, key: str) -> TaggedValue:
    """The place of a parameter's value."""
    begin, end = param_frame(template, key, text=True)
    typed = param_frame(template, key, text=False) if template.json_attribute else None
    return TaggedValue(begin, end, ends.close, ends.barred, schema_types(tool, key), typed)


@dataclass(frozen=True, slots=True)
class _ValueEnds:
    """The literals that end a value between tags for the parser."""

    close: str
    barred: tuple[str, ...]
    """Those that must not be in a text, because the parser takes them for a forgotten `close`."""


def _value_ends(tool_format: ToolFormat) -> _ValueEnds:
    end = tool_format.template.param.partition("«value»")[2]
    for syntax in tool_format.syntaxes:
        for step in _steps(syntax.steps):
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
    tool_format: ToolFormat, tools: Sequence[Tool], *, only_first: bool = False
) -> GrammarNode:
    """Any text, in which every call is one of these, with arguments as declared.

    only_first: one call, and nothing follows it. Raises InexpressibleSchema.
    """
    if any(syntax.reread_chars for syntax in tool_format.syntaxes if syntax.bare):
        lines, text = _non_call_lines(tool_format)
        each = [call_grammar(tool_format, tool) for tool in tools]
        return AlternationNode(
            (text, _repeated_calls(tool_format, each, 1 if only_first else None, [lines]))
        )
    marks = [mark for syntax in tool_format.syntaxes for mark in syntax.begin]
    begin = _call_prefix(tool_format, tools[0])
    mark = next((one for one in marks if begin.startswith(one)), None)
    if mark is None:
        raise InexpressibleSchema("calls that no mark begins")
    last = only_first or not _has_closing_literal(tool_format)
    inner: GrammarNode = _alternation([call_grammar(tool_format, tool) for tool in tools])
    if tool_format.template.before or last:
        inner = calls_grammar(tool_format, tools, max_calls=1 if only_first else None)
    return TaggedTextNode(
        tuple(marks), (TagNode(mark, strip_prefix_literal(inner, mark), ""),), only_first=last
    )


def _has_closing_literal(tool_format: ToolFormat) -> bool:
    """Whether calls end in a literal; else text after one could be parsed as more calls."""
    end = (call_frame(tool_format, "").end + tool_format.template.after).rstrip()
    return any(
        end.endswith(mark)
        for syntax in tool_format.syntaxes
        for mark in closing_literals(syntax.steps)
    )


def _call_prefix(tool_format: ToolFormat, tool: Tool) -> str:
    return (
        tool_format.template.before + call_frame(tool_format, tool.name, _INDEX_PLACEHOLDER).begin
    )


def starts_with_literal(node: GrammarNode, mark: str) -> bool:
    """Whether every text of the grammar begins with this one."""
    match node:
        case LiteralNode():
            return node.text.startswith(mark)
        case SequenceNode():
            return bool(node.parts) and starts_with_literal(node.parts[0], mark)
        case AlternationNode():
            return all(starts_with_literal(part, mark) for part in node.parts)
        case RepeatNode():
            return node.min_count == node.max_count == 1 and starts_with_literal(node.part, mark)
    return False


def strip_prefix_literal(node: GrammarNode, mark: str) -> GrammarNode:
    """The grammar after a text with which it begins."""
    match node:
        case LiteralNode() if node.text.startswith(mark):
            return LiteralNode(node.text[len(mark) :]) if node.text != mark else SequenceNode(())
        case SequenceNode():
            return SequenceNode((strip_prefix_literal(node.parts[0], mark), *node.parts[1:]))
        case AlternationNode():
            return AlternationNode(tuple(strip_prefix_literal(part, mark) for part in node.parts))
        case RepeatNode() if node.min_count == node.max_count == 1:
            return strip_prefix_literal(node.part, mark)
    raise AssertionError(f"{node} does not begin with {mark!r}")


_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_CALL_SECONDS = {"{": "\"' \t\r\n", "[": "{ \t\r\n"}
"""Characters after a bracket with which a call may begin."""


def _non_call_lines(tool_format: ToolFormat) -> tuple[RegexNode, RegexNode]:
    """Lines without the beginning of a call: some that a call may follow, and a whole text.

    Of an opening literal that counts anywhere not even two characters may be in the text; of one
    that counts at the beginning of a line the first may not be there.
    """
    seconds: dict[str, set[str]] = {}
    starts: set[str] = set()
    for syntax in tool_format.syntaxes:
        for mark in syntax.begin:
            if syntax.bare and not syntax.inline:
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
    """The characters, escaped for a character class."""
    return "".join(_CONTROLS.get(char) or re.escape(char) for char in sorted(set(chars)))
