"""Renders chat templates in Jinja's immutable sandbox, with limits.

Limits: characters of the result; loop iterations and macro calls together (`MAX_LOOP_ITERATIONS`);
the time they take (`MAX_SECONDS`); the length of `range`, of strings and lists made by `+`, `*`,
`~` and `%`; the size of powers. A passed limit raises RequestError. Values are plain data, so no
method of a rich object can be called. A caller that must not block sets a deadline
(`render_deadline`) and gets an exception when it has passed.

This limits what a user can do with a template that the operator chose: each iteration passes over
the request once. It does not limit what a template's author can do: time and memory inside one
filter or method (`|center`, `.format` with a huge width). A template from a request is therefore
rendered in a process that can be killed (quire.text.templates.render_pool).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quire.errors import RequestError

MAX_CHARS = 32 * 1024 * 1024
MAX_LOOP_ITERATIONS = 500_000
MAX_SECONDS = 3.0
"""Of processor time. A hundred thousand short messages take two of them."""
ITERATIONS_PER_CLOCK_CHECK = 16
"""Asking for the time is a call of the system."""
_METER = "_quire_meter"
_CHECK = "_quire_check"


@runtime_checkable
class SupportsModelDump(Protocol):
    """A pydantic object, as clients of the openai package send them."""

    def model_dump(self, *, exclude_none: bool) -> dict[str, Any]: ...


class RenderDeadlineExceeded(Exception):
    """A rendering exceeded the deadline of render_deadline(); it continues in another process."""


_deadline: ContextVar[float | None] = ContextVar("quire_hurry", default=None)
"""When a rendering is given up, by the clock of its thread."""


@contextmanager
def render_deadline(seconds: float) -> Iterator[None]:
    """All that is rendered within may take so much processor time together.

    Raises RenderDeadlineExceeded after that: it can be rendered once more, elsewhere.
    """
    token = _deadline.set(time.thread_time() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def _template_error(what: str) -> RequestError:
    return RequestError(f"the chat template {what}", param="chat_template")


def raise_exception(message: str) -> None:
    """For templates: refuse the conversation."""
    raise jinja2.TemplateError(str(message))


def strftime_now(pattern: str) -> str:
    """For templates: the local date and time."""
    return datetime.now().strftime(pattern)


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes that Jinja's own filter makes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def to_plain_data(value: object, depth: int = 0) -> Any:
    """A copy made of dict, list, str, int, float, bool and None only.

    Anything else becomes "<its type>": templates test for the presence of media only.
    """
    if depth > 200:
        raise RequestError("messages or tools are nested deeper than 200 levels", param="messages")
    if value is None or type(value) in (str, int, float, bool):
        return value
    for base in (str, int, float):
        if isinstance(value, base):
            return base.__str__(value) if base is str else base(value)  # drop the subclass
    if isinstance(value, Mapping):
        return {to_plain_data(k, depth + 1): to_plain_data(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_data(one, depth + 1) for one in value]
    if isinstance(value, SupportsModelDump):
        return to_plain_data(value.model_dump(exclude_none=True), depth + 1)
    return f"<{type(value).__name__}>"


class GenerationTagExtension(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text; here it is just text."""

    tags = {"generation"}  # noqa: RUF012  Jinja's name

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _GuardedNamespace(Namespace):
    """Jinja's namespace() without underscore names, which lead into Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.TemplateError(f"a namespace cannot have an attribute {name!r}")
        super().__setitem__(name, value)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with meters built into every loop and macro."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTagExtension, "jinja2.ext.loopcontrols"],
        )
        self.filters["tojson"] = tojson
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        self.globals["namespace"] = _GuardedNamespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if _METER in source or _CHECK in source:
            raise jinja2.TemplateSyntaxError("a reserved name is used", 1)
        tree = super()._parse(source, name, filename)
        _insert_meters(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and _power_bits(left, right) > 4096:
            raise _template_error("computes a power that is too large")
        if operator == "*" and _repeat_size(left, right) > MAX_CHARS:
            raise _template_error(f"repeats a value to more than {MAX_CHARS} items")
        if operator == "%" and isinstance(left, str) and _has_wide_field(left):
            raise _template_error("formats with a field width above 9999")
        return check_size(super().call_binop(context, operator, left, right))


def check_size(value: Any) -> Any:
    """The value, unless it is longer than a prompt may be."""
    if isinstance(value, str | list | tuple) and len(value) > MAX_CHARS:
        raise _template_error(f"makes a value of more than {MAX_CHARS} characters or items")
    return value


def _power_bits(base: object, exponent: object) -> float:
    if not isinstance(base, int) or not isinstance(exponent, int):
        return 0
    return base.bit_length() * max(exponent, 0)


def _repeat_size(left: object, right: object) -> int:
    for one, count in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(count, int):
            return len(one) * count
    return 0


def _has_wide_field(pattern: str) -> bool:
    digits = 0
    for char in pattern:
        digits = digits + 1 if char.isdigit() else 0
        if digits > 4:
            return True
    return "*" in pattern  # a width given as an argument


def _insert_meters(tree: nodes.Template) -> None:
    """Count every loop turn and macro call; check the size of results of `~`."""
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock), node
        node.body.insert(0, nodes.ExprStmt(_call_node(_METER), lineno=node.lineno))
    for concat in list(tree.find_all(nodes.Concat)):
        inner = nodes.Concat(concat.nodes, lineno=concat.lineno)
        concat.nodes = [_call_node(_CHECK, inner)]


def _call_node(name: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)


def make_fuel_meter(
    fuel: int = MAX_LOOP_ITERATIONS, seconds: float = MAX_SECONDS
) -> Callable[[], None]:
    """A function that may be called `fuel` times, for so long."""
    left = fuel
    end = time.thread_time() + seconds
    hurry = _deadline.get()
    first_deadline = end if hurry is None else min(end, hurry)

    def burn() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _template_error(f"loops more than {fuel} times")
        if left % ITERATIONS_PER_CLOCK_CHECK == 0 and time.thread_time() > first_deadline:
            if first_deadline < end:
                raise RenderDeadlineExceeded
            raise _template_error(
                f"takes more than {seconds:g} s of processor time for these messages"
            )

    return burn


def render_template(template: jinja2.Template, values: Mapping[str, object]) -> str:
    """Render. Errors of the template become RequestError with Jinja's message."""
    given = {name: to_plain_data(value) for name, value in values.items()}
    given |= {_METER: make_fuel_meter(), _CHECK: check_size}
    try:
        return _collect(template.generate(given))
    except (RequestError, MemoryError, RenderDeadlineExceeded):
        raise
    except RecursionError:
        raise _template_error("calls itself without end") from None
    except Exception as e:  # the template's own code: anything may come out of it
        message = str(e) or type(e).__name__
        raise _template_error(f"refuses these messages or is wrong: {message}") from e


def _collect(pieces: Iterable[str]) -> str:
    kept: list[str] = []
    size = 0
    for piece in pieces:
        kept.append(piece)
        size += len(piece)
        if size > MAX_CHARS:
            raise _template_error(f"makes more than {MAX_CHARS} characters")
    return "".join(kept)
