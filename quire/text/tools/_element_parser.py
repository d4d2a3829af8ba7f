"""Parses arguments that are written as nested elements, with the types of the declared schema.

    <city>Rome</city><tags><item>a</item><item>b</item></tags>
    {"city": "Rome", "tags": ["a", "b"]}

Elements inside an element are an object; they are a list where the schema has one, or where all
are <item>; elements of one name are a list too. An argument is emitted when it is complete.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from quire.text.tools._call_emitter import MAX_NAME_CHARS, CallEmitter
from quire.text.tools._schema_coercion import coerce_to_json, inner_schema, kinds_of_schema
from quire.text.tools._text_cursor import MalformedMarkup, ParserCoroutine, TextCursor
from quire.text.tools._value_parsers import MAX_DEPTH, escape_json
from quire.text.tools.base import ElementsStep


@dataclass(slots=True)
class _Element:
    """An element that is open."""

    name: str
    schema: object
    text: list[str] = field(default_factory=list)
    children: list[tuple[str, str]] = field(default_factory=list)
    """Names, and values as JSON."""


def parse_elements(
    src: TextCursor, calls: CallEmitter, step: ElementsStep
) -> ParserCoroutine[None]:
    """Parse the arguments of a call whose name is known, and the literal that ends them."""
    tool = calls.declared_tool
    root = {} if tool is None else tool.parameters
    opener = f"{step.prefix}<"
    before = "{"
    while True:
        yield from src.skip_space()
        if (yield from src.expect((opener, *step.close))) != opener:
            break
        key, _ = yield from src.read_bounded((">",), "a key", MAX_NAME_CHARS)
        if not key.strip():
            raise MalformedMarkup("an element without a name")
        if not calls.open:
            calls.begin_call()
        top = _Element(key, inner_schema(root, key, root))
        value = yield from _parse_element(src, top, opener, root)
        calls.emit_arguments(f'{before}"{escape_json(key)}": {value}')
        before = ", "
    if not calls.open:
        calls.begin_call()
        calls.emit_arguments("{")
    calls.emit_arguments("}")
    calls.complete_call()


def _parse_element(
    src: TextCursor, top: _Element, opener: str, root: object
) -> ParserCoroutine[str]:
    """The rest of an element, as JSON."""
    stack = [top]
    while True:
        here = stack[-1]
        yield from src.read_until((opener,), here.text.append)
        name, _ = yield from src.read_bounded((">",), "a tag", MAX_NAME_CHARS)
        if not name.startswith("/"):
            if len(stack) >= MAX_DEPTH:
                raise MalformedMarkup(f"nested more than {MAX_DEPTH} deep")
            stack.append(_Element(name, inner_schema(here.schema, name, root)))
            continue
        if name[1:] != here.name:
            raise MalformedMarkup(f"{name!r} where {'/' + here.name!r} belongs")
        value = _element_value(stack.pop(), root)
        if not stack:
            return value
        stack[-1].children.append((here.name, value))


def _element_value(element: _Element, root: object) -> str:
    """The value of a complete element, as JSON."""
    kinds = kinds_of_schema(element.schema, root)
    if not element.children:
        text = "".join(element.text)
        return coerce_to_json(text, kinds - {"string"})
    names = [name for name, _ in element.children]
    if ("array" in kinds and "object" not in kinds) or set(names) == {"item"}:
        return f"[{', '.join(value for _, value in element.children)}]"
    grouped: dict[str, list[str]] = {}
    for name, value in element.children:
        grouped.setdefault(name, []).append(value)
    return (
        "{"
        + ", ".join(
            f"{json.dumps(name, ensure_ascii=False)}: {_one_or_list(values)}"
            for name, values in grouped.items()
        )
        + "}"
    )


def _one_or_list(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"
