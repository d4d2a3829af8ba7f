"""Declarations of tool-call formats, which quire.text.tools.parser executes.

A format is a few syntaxes; a syntax begins with a literal in the text, and steps follow. Whitespace
between steps is skipped. Steps and formats are data without code.

    hermes      <tool_call>  Object  </tool_call>
    qwen3       <tool_call>  Many( <function=  Name  Params )  </tool_call>
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from quire.text.tools._value_parsers import JSON, PYTHON, ValueSyntax


@dataclass(frozen=True, slots=True)
class LiteralStep:
    """Expects one of these literals."""

    texts: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class CloseStep:
    """One of these literals ends the call. The end of the text does so too, without an error."""

    texts: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class SkipStep:
    """Text up to a literal; it is skipped."""

    end: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NameStep:
    """The function's name, up to one of `end`, or up to one of `before`, which is not consumed.

    With neither it is a run of letters, digits and the like.
    """

    end: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    id_after: str = ""
    """The one of `end` after which an id comes, up to another."""
    numbered: bool = False
    """functions.NAME:IDX, which is also the call's id."""


@dataclass(frozen=True, slots=True)
class ArgumentsStep:
    """The arguments as one object."""

    language: ValueSyntax = JSON


@dataclass(frozen=True, slots=True)
class ObjectStep:
    """A JSON object that is a call, or (`many`) a JSON list of calls, or several in a row."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: tuple[str, ...] = ()
    many: bool = False
    keyed: bool = False
    """{"f": {...}}: the key is the name."""


@dataclass(frozen=True, slots=True)
class ParamsStep:
    """Arguments one by one: key_open KEY key_close, attributes, value_open VALUE value_close."""

    key_open: str
    key_close: str
    value_close: str
    close: tuple[str, ...]
    """What ends the parameters, and the call."""
    value_open: str = ""
    """After the key; the text before it holds attributes."""
    outer: tuple[str, ...] = ()
    """What comes after `close`: ends the parameters too if `close` was forgotten."""
    trim: bool = False
    """One newline after the opening and one before the closing tag belong to the layout."""
    text_mark: str = ""
    """The attribute of a value that is text, regardless of the schema's type."""
    json_mark: str = ""
    """The attribute of a value that is JSON."""
    key_variants: tuple[str, ...] = ()
    """Other spellings of key_open."""
    cdata: bool = False
    """A value may be in <![CDATA[ ]]>, where tags are text."""


@dataclass(frozen=True, slots=True)
class ElementsStep:
    """Arguments as elements, each tag after `prefix`: <key>value</key>. Elements inside an element
    are an object or a list."""

    prefix: str
    close: tuple[str, ...]
    """What ends the arguments, and the call."""


@dataclass(frozen=True, slots=True)
class PythonCallsStep:
    """f(k='v', n=1), g(): in brackets, or (`lines`) one below the other."""

    lines: bool = False
    language: ValueSyntax = PYTHON


@dataclass(frozen=True, slots=True)
class HarmonyMessageStep:
    """A message of the harmony format: its recipient decides what its body is."""

    body: str
    """Ends the header."""
    ends: tuple[str, ...]
    before: tuple[str, ...]
    """Begins the next message, if nothing ended this one."""
    header: str = ""
    """The part of the header that the form began with."""


@dataclass(frozen=True, slots=True)
class RepeatStep:
    """The steps, one or more times. Without separators the first step must be a LiteralStep."""

    steps: tuple[SyntaxStep, ...]
    separators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BranchStep:
    """Runs the first steps if one of these literals is next, else the others."""

    lookahead: tuple[str, ...]
    then: tuple[SyntaxStep, ...]
    otherwise: tuple[SyntaxStep, ...]


SyntaxStep = (
    LiteralStep
    | CloseStep
    | SkipStep
    | NameStep
    | ArgumentsStep
    | ObjectStep
    | ParamsStep
    | ElementsStep
    | PythonCallsStep
    | HarmonyMessageStep
    | RepeatStep
    | BranchStep
)


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """One way to begin a call, or several, in the text."""

    begin: tuple[str, ...]
    steps: tuple[SyntaxStep, ...]
    reread_chars: int = 0
    """Characters at the end of `begin` that the first step reads again."""
    bare: bool = False
    """Only `begin` marks it: it is looked for at the beginning of a line only, only a declared
    function is a call, and other text is content without a note."""
    inline: bool = False
    """A bare syntax that is looked for anywhere, if functions are declared."""
    declared_only: bool = False
    """Only a declared function is a call."""


ArgumentNotation = Literal["json", "params", "python", "braces", "elements"]


@dataclass(frozen=True, slots=True)
class CallTemplate:
    """The text of calls as a model writes it. «name» «arguments» «params» «key» «value» «id» are
    placeholders; «begin» is CallTemplate.begin of the next message where calls are messages."""

    call: str
    before: str = ""
    after: str = ""
    between: str = ""
    param: str = ""
    """One of «params»."""
    param_between: str = ""
    notation: ArgumentNotation = "json"
    quote: str = ""
    """Around strings of `braces`."""
    text_attribute: str = ""
    json_attribute: str = ""
    """«type» of a text and of another value."""
    name_in_json: bool = False
    """The name is inside a JSON string."""


@dataclass(frozen=True)
class ToolFormat:
    """The format of tool calls of one family of models."""

    name: str
    syntaxes: tuple[CallSyntax, ...]
    template: CallTemplate
    template_markers: tuple[tuple[str, ...], ...] = ()
    """A chat template that contains all texts of one of these has this format ..."""
    excluded_markers: tuple[str, ...] = ()
    """... unless it contains one of these."""
    id_style: Literal["hex", "nine", "numbered"] = "hex"
    """chatcmpl-tool-<hex>, nine letters and digits, functions.NAME:IDX."""
    ignored: tuple[str, ...] = ()
    """Literals that have no meaning on their own."""
    declared_only: bool = False
    """Only declared functions are calls, in every syntax; other formats emit any function's call
    whose syntax is marked, so that the client can answer it with an error."""
    channels: str = ""
    """The reasoning format of the messages that hold the calls."""

    def detect(self, template: str) -> bool:
        """Whether a chat template uses this format."""
        if any(text in template for text in self.excluded_markers):
            return False
        return any(all(text in template for text in texts) for texts in self.template_markers)

    @cached_property
    def openers(self) -> dict[str, CallSyntax]:
        """Literals that begin a form."""
        return {text: syntax for syntax in self.syntaxes for text in syntax.begin}

    @cached_property
    def closers(self) -> tuple[str, ...]:
        """Literals that end one."""
        return tuple(text for syntax in self.syntaxes for text in closing_literals(syntax.steps))


def closing_literals(steps: Iterable[SyntaxStep]) -> tuple[str, ...]:
    """All literals with which these steps can end."""
    found: list[str] = []
    for step in steps:
        if isinstance(step, CloseStep):
            found += step.texts
        elif isinstance(step, ParamsStep | ElementsStep):
            found += step.close
        elif isinstance(step, RepeatStep):
            found += closing_literals(step.steps)
        elif isinstance(step, BranchStep):
            found += closing_literals(step.then) + closing_literals(step.otherwise)
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Tool:
    """A declared function."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    """JSON Schema of its arguments; empty if none was given."""

    @property
    def has_required(self) -> bool:
        """Whether a call without arguments would be wrong."""
        return bool(self.parameters.get("required"))


def tools_by_name(tools: Sequence[Mapping[str, object]]) -> dict[str, Tool]:
    """Tools in the form of the API ({"type": "function", "function": {...}}), by name."""
    found: dict[str, Tool] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            continue
        name, parameters = function.get("name"), function.get("parameters")
        if isinstance(name, str):
            schema = parameters if isinstance(parameters, Mapping) else {}
            found[name] = Tool(name, with_standard_types(schema))
    return found


MAX_SCHEMA_DEPTH = 64
_TYPE_NAMES = {
    "integer": "int int8 int16 int32 int64 uint uint8 uint16 uint32 uint64 long short unsigned",
    "number": "float float32 float64 double decimal numeric num",
    "boolean": "bool",
    "string": "str text varchar char",
    "object": "dict map mapping struct",
    "array": "list tuple set arr",
    "null": "none nonetype nil",
}
_STANDARD_TYPES = {name: kind for kind, names in _TYPE_NAMES.items() for name in names.split()}
_VALUE_KEYWORDS = frozenset({"enum", "const", "default", "examples", "example"})


def with_standard_types(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The schema with JSON Schema's types in place of programming languages' ("float", "dict").

    Clients send such types, and models write values for them.
    """
    return _standard_schema(schema, 0)


def _standard_schema(schema: Mapping[str, object], depth: int) -> Mapping[str, object]:
    if depth > MAX_SCHEMA_DEPTH:
        return schema
    made = {key: _standard_value(key, value, depth + 1) for key, value in schema.items()}
    return made if made != schema else schema


def _standard_value(key: str, value: object, depth: int) -> object:
    if key == "type":
        if isinstance(value, str):
            return _STANDARD_TYPES.get(value.lower(), value)
        if isinstance(value, list):
            return [_standard_value(key, one, depth) for one in value]
    if key in _VALUE_KEYWORDS:
        return value
    if isinstance(value, Mapping):
        return _standard_schema(value, depth)
    if isinstance(value, list):
        return [_standard_schema(one, depth) if isinstance(one, Mapping) else one for one in value]
    return value


IdSource = Callable[[], str]
"""A source of fresh hex texts."""
