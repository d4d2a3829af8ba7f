"""What a dialect of tool calls is made of: declarations, which quire.text.tools.parser walks.

A dialect is a few forms; a form begins with a literal in the text and goes on with steps. Between
steps whitespace means nothing. No step has code of its own here, and no dialect has any: what a
dialect cannot say, the machine cannot read.

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
    """One of these literals comes next."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CloseStep:
    """One of these literals ends what was told. Where the text ends instead, that is no fault."""

    texts: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class SkipStep:
    """Text up to a literal that says nothing of the call."""

    end: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NameStep:
    """The function's name, up to one of `end`, or to one of `before`, which stays for the next."""

    end: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    id_after: str = ""
    """The one of `end` after which an id comes, up to another."""
    numbered: bool = False
    """functions.NAME:IDX, which is the call's id as well."""


@dataclass(frozen=True, slots=True)
class ArgumentsStep:
    """The arguments as one object."""

    language: ValueSyntax = JSON


@dataclass(frozen=True, slots=True)
class ObjectStep:
    """A JSON object that is a call, or (`many`) a JSON list of them, or some one after another."""

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
    """After the key; what stands before it are attributes."""
    outer: tuple[str, ...] = ()
    """What comes after `close`: ends the parameters too if `close` was forgotten."""
    trim: bool = False
    """One newline after the opening and one before the closing tag belong to the layout."""
    text_mark: str = ""
    """The attribute of a value that is text, whatever the schema says."""
    json_mark: str = ""
    """The attribute of a value that is JSON."""


@dataclass(frozen=True, slots=True)
class PythonCallsStep:
    """f(k='v', n=1), g(): in brackets, or (`lines`) one below the other."""

    lines: bool = False
    language: ValueSyntax = PYTHON


@dataclass(frozen=True, slots=True)
class HarmonyMessageStep:
    """A message of the harmony format: who it is for decides what its body is."""

    body: str
    """Ends the header."""
    ends: tuple[str, ...]
    before: tuple[str, ...]
    """Begins the next message, if nothing ended this one."""
    header: str = ""
    """The part of the header that the form began with."""


@dataclass(frozen=True, slots=True)
class RepeatStep:
    """The steps once or more often. Without separators the first step must be a Mark."""

    steps: tuple[SyntaxStep, ...]
    separators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BranchStep:
    """The first steps if one of these literals comes next, else the others."""

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
    """Nothing but `begin` marks it: only at the beginning of a line is it looked for, only a
    declared function is a call, and what is no call is content without a note."""


ArgumentNotation = Literal["json", "params", "python", "braces"]


@dataclass(frozen=True, slots=True)
class CallTemplate:
    """How a model writes calls. «name» «arguments» «params» «key» «value» «id» stand for
    themselves; «begin» is Written.begin of the next message where calls are messages."""

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
    """The name stands in a JSON string."""


@dataclass(frozen=True)
class ToolFormat:
    """How one family of models writes tool calls."""

    name: str
    syntaxes: tuple[CallSyntax, ...]
    template: CallTemplate
    template_markers: tuple[tuple[str, ...], ...] = ()
    """A chat template with all texts of one of these is of this dialect ..."""
    excluded_markers: tuple[str, ...] = ()
    """... unless it has one of these."""
    id_style: Literal["hex", "nine", "numbered"] = "hex"
    """chatcmpl-tool-<hex>, nine letters and digits, functions.NAME:IDX."""
    ignored: tuple[str, ...] = ()
    """Literals that mean nothing where they stand alone."""

    def detect(self, template: str) -> bool:
        """Whether a chat template teaches this dialect."""
        if any(text in template for text in self.excluded_markers):
            return False
        return any(all(text in template for text in texts) for texts in self.template_markers)

    @cached_property
    def openers(self) -> dict[str, CallSyntax]:
        """Literals that begin a form."""
        return {text: form for form in self.syntaxes for text in form.begin}

    @cached_property
    def closers(self) -> tuple[str, ...]:
        """Literals that end one."""
        return tuple(text for form in self.syntaxes for text in closing_literals(form.steps))


def closing_literals(steps: Iterable[SyntaxStep]) -> tuple[str, ...]:
    """All literals by which these steps can end."""
    found: list[str] = []
    for step in steps:
        if isinstance(step, CloseStep):
            found += step.texts
        elif isinstance(step, ParamsStep):
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
    """Tools as callers write them ({"type": "function", "function": {...}}), by name."""
    found: dict[str, Tool] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            continue
        name, parameters = function.get("name"), function.get("parameters")
        if isinstance(name, str):
            found[name] = Tool(name, parameters if isinstance(parameters, Mapping) else {})
    return found


IdSource = Callable[[], str]
"""A source of fresh hex texts."""
