"""Calls of functions as forms: what a model of a dialect writes when it calls, and nothing else.

    calls      one or more calls, and no other text         tool_choice required, or a function
    among      text in which any call is one of these       strict functions under tool_choice auto
    listed     calls as a JSON list                         where a dialect has no form for them
    arguments  the arguments of one function, bare JSON     the same, for a function that was named

How the text is read again: quire.text.tools, quire.text.forced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from quire.binding.schemas import Inexpressible, Parameter, arguments_schema, parameters
from quire.binding.values import Literals, Tagged, in_order
from quire.grammar.forms import Either, Form, Json, Regex, Repeat, Seq, Tag, Tags, Text
from quire.text.forced import LIST
from quire.text.tools._typed import kinds_of
from quire.text.tools._write import around, frame
from quire.text.tools.base import (
    Dialect,
    Many,
    Params,
    Step,
    Tool,
    Written,
    closes,
)
from quire.text.tools.base import Either as Fork

_PLACE = "\0"
_NUMBER = Regex("(0|[1-9][0-9]{0,2})")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/\-]*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_ANY_KEY = Regex("[A-Za-z_][A-Za-z0-9_]{0,63}")


def calls(
    dialect: Dialect,
    tools: Sequence[Tool],
    *,
    most: int | None = None,
    ends: Collection[str] = (),
) -> Form:
    """One or more calls. Raises Inexpressible if the dialect has no way to write some of them.

    ends: texts of tokens with which this model ends any text. Where calls end in one, it is not
    part of the form: the end follows anyway, behind one call.
    """
    how = dialect.written
    each = [call(dialect, tool) for tool in tools]
    if not how.after and frame(dialect, "").end in ends:
        return _either([Seq(one.parts[:-1]) for one in each])
    return _several(dialect, each, most)


def _several(
    dialect: Dialect, each: Sequence[Seq], most: int | None, lead: Sequence[Form] = ()
) -> Form:
    """One or more of them. lead: what may stand before the first.

    What stands between two is joined to the second, and what stands before all to the first: lexers
    of backends do not come back from where one mark could have ended to take it for another.
    """
    how = dialect.written
    first = [Seq((*lead, *_text(how.before), *one.parts)) for one in each]
    later = [Seq((*_text(how.between), *one.parts)) for one in each]
    more = Repeat(_either(later), "", 0, most and most - 1)
    return Seq((_either(first), *([] if most == 1 else [more]), *_text(how.after)))


def listed(tools: Sequence[Tool], *, most: int | None = None) -> Form:
    """Calls as a JSON list, whatever the model's own way is."""
    return calls(LIST, tools, most=most)


def arguments(tool: Tool) -> Json:
    """The arguments of a function as JSON."""
    return Json(json.dumps(arguments_schema(tool.parameters), ensure_ascii=False))


def call(dialect: Dialect, tool: Tool) -> Seq:
    """One call of one function."""
    how = dialect.written
    if not how.name_in_json and not _NAME.fullmatch(tool.name):
        raise Inexpressible(f"the name {tool.name!r:.80}")
    around_it = frame(dialect, tool.name, _PLACE)
    return Seq((*_text(around_it.begin), _arguments(dialect, tool), *_text(around_it.end)))


def _text(text: str) -> Iterator[Form]:
    """The text, with a number where the place of a call belongs."""
    for i, part in enumerate(text.split(_PLACE)):
        if i:
            yield _NUMBER
        if part:
            yield Text(part)


def _either(parts: Sequence[Form]) -> Form:
    return parts[0] if len(parts) == 1 else Either(tuple(parts))


# -- arguments ------------------------------------------------------------------------------------


def _arguments(dialect: Dialect, tool: Tool) -> Form:
    how = dialect.written
    if how.values == "json":
        return arguments(tool)
    if how.values == "params":
        return _tagged(dialect, tool)
    literals = Literals(how, tool.parameters)
    if how.values == "braces":
        return literals.form(arguments_schema(tool.parameters))
    return _keywords(tool, how, literals)


def _keywords(tool: Tool, how: Written, literals: Literals) -> Form:
    """Arguments as Python has them: k='v', n=1."""
    if not _IDENTIFIER.fullmatch(tool.name):
        raise Inexpressible(f"the name {tool.name!r:.80}")
    wanted = parameters(tool.parameters)
    items = []
    for one in wanted.named:
        if not _IDENTIFIER.fullmatch(one.name):
            raise Inexpressible(f"the parameter {one.name!r:.80}")
        begin, end = around(how, one.name, text=False)
        items.append((Seq((Text(begin), literals.form(one.schema), *_text(end))), one.required))
    if items or wanted.rest is None:
        return in_order(items, how.param_between)
    begin, end = around(how, _PLACE, text=False)
    any_one = _with_key(begin, literals.form(wanted.rest), end)
    return Repeat(any_one, how.param_between, 0)


def _with_key(begin: str, value: Form, end: str) -> Form:
    before, _, after = begin.partition(_PLACE)
    return Seq((*_text(before), _ANY_KEY, *_text(after), value, *_text(end)))


def _tagged(dialect: Dialect, tool: Tool) -> Form:
    """Arguments between tags, in the order in which they are declared."""
    how, step = dialect.written, _params(dialect)
    wanted = parameters(tool.parameters)
    items = [(_param(how, step, tool, one), one.required) for one in wanted.named]
    if items or wanted.rest is None:
        return in_order(items, how.param_between)
    return Repeat(_any_param(how, step, tool, wanted.rest), how.param_between, 0)


def _any_param(how: Written, step: Params, tool: Tool, schema: object) -> Form:
    place = _place(how, step, tool, _PLACE)
    head, before = place.before.split(_PLACE)
    typed = place.json and (place.json[0].split(_PLACE)[1], place.json[1])
    value = replace(place, before=before, json=typed).form(schema, tool.parameters)
    return Seq((Text(head), _ANY_KEY, value))


def _param(how: Written, step: Params, tool: Tool, one: Parameter) -> Form:
    if one.name != one.name.strip().strip("\"'") or re.search(r'[<>"\s]', one.name):
        raise Inexpressible(f"the parameter {one.name!r:.80}")
    try:
        return _place(how, step, tool, one.name).form(one.schema, tool.parameters)
    except Inexpressible as error:
        raise Inexpressible(f"the parameter {one.name!r}: {error}") from None


def _place(how: Written, step: Params, tool: Tool, key: str) -> Tagged:
    """Where the value of a parameter stands."""
    begin, end = around(how, key, text=True)
    typed = around(how, key, text=False) if how.json_attribute else None
    return Tagged(begin, end, step.value_close, kinds_of(tool, key), typed)


def _params(dialect: Dialect) -> Params:
    """How the dialect reads what it writes between tags."""
    end = dialect.written.param.partition("«value»")[2]
    for form in dialect.forms:
        for step in _steps(form.steps):
            if isinstance(step, Params) and step.value_close in end:
                return step
    raise Inexpressible("parameters that it does not read")


def _steps(steps: Sequence[Step]) -> Iterator[Step]:
    for step in steps:
        yield step
        if isinstance(step, Many):
            yield from _steps(step.steps)
        elif isinstance(step, Fork):
            yield from _steps((*step.then, *step.other))


# -- calls in a text ------------------------------------------------------------------------------


def among(dialect: Dialect, tools: Sequence[Tool], *, only_first: bool = False) -> Form:
    """Any text; where a call begins in it, it is one of these, as its function declares it.

    only_first: one call, and nothing follows it. Raises Inexpressible.
    """
    marks = [mark for form in dialect.forms if not form.bare for mark in form.begin]
    bare = [mark for form in dialect.forms if form.bare for mark in form.begin]
    if bare:
        lines, text = _lines(bare, marks)
        each = [call(dialect, tool) for tool in tools]
        return Either((text, _several(dialect, each, 1 if only_first else None, [lines])))
    begin = _beginning(dialect, tools[0])
    mark = next((one for one in marks if begin.startswith(one)), None)
    if mark is None:
        raise Inexpressible("calls that no mark begins")
    last = only_first or not _has_end(dialect)
    inner: Form = _either([call(dialect, tool) for tool in tools])
    if dialect.written.before or last:
        inner = calls(dialect, tools, most=1 if only_first else None)
    return Tags(tuple(marks), (Tag(mark, without(inner, mark), ""),), only_first=last)


def _has_end(dialect: Dialect) -> bool:
    """Calls end in a mark. Where they do not, what follows could be read as more of them."""
    end = (frame(dialect, "").end + dialect.written.after).rstrip()
    return any(end.endswith(mark) for form in dialect.forms for mark in closes(form.steps))


def _beginning(dialect: Dialect, tool: Tool) -> str:
    return dialect.written.before + frame(dialect, tool.name, _PLACE).begin


def begins_with(form: Form, mark: str) -> bool:
    """Whether all that the form allows begins with this text."""
    match form:
        case Text():
            return form.text.startswith(mark)
        case Seq():
            return bool(form.parts) and begins_with(form.parts[0], mark)
        case Either():
            return all(begins_with(part, mark) for part in form.parts)
        case Repeat():
            return form.least == form.most == 1 and begins_with(form.part, mark)
    return False


def without(form: Form, mark: str) -> Form:
    """The form behind a text that it begins with."""
    match form:
        case Text() if form.text.startswith(mark):
            return Text(form.text[len(mark) :]) if form.text != mark else Seq(())
        case Seq():
            return Seq((without(form.parts[0], mark), *form.parts[1:]))
        case Either():
            return Either(tuple(without(part, mark) for part in form.parts))
        case Repeat() if form.least == form.most == 1:
            return without(form.part, mark)
    raise AssertionError(f"{form} does not begin with {mark!r}")


def _lines(bare: Sequence[str], marks: Sequence[str]) -> tuple[Regex, Regex]:
    """Lines of which none begins as calls do: some that a call may follow, and a whole text.

    bare: what begins calls at the beginning of a line. marks: what begins them anywhere; of such
    not even two characters may stand in the text.
    """
    starts, firsts = _set(mark[0] for mark in bare), _set(mark[0] for mark in marks)
    seconds = _set(mark[1] for mark in marks)
    run = f"[{firsts}]*" if firsts else ""
    char = rf"([^\n{firsts}]|[{firsts}]+[^\n{firsts}{seconds}])" if firsts else r"[^\n]"
    first = rf"[^ \t\r\n{firsts}{starts}]"
    begun = _set(mark[0] for mark in marks if mark[0] not in {one[0] for one in bare})
    if begun:
        first = rf"({first}|[{begun}]{run}[^\n{firsts}{seconds}])"
    line = rf"[ \t\r]*({first}{char}*{run})?"
    return Regex(rf"({line}\n)*"), Regex(rf"({line}\n)*{line}")


def _set(chars: Iterable[str]) -> str:
    """As they stand in a class of characters."""
    return "".join(re.escape(char) for char in sorted(set(chars)))
