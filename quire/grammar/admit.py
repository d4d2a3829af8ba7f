"""Whether a form may be asked for, decided at the edge: before a request costs anything.

    constraint(form) -> Constraint   or RequestError: where, why, and what would do instead

Pure Python, from microseconds to a few milliseconds; no backend is imported. Schemas are rewritten
into keywords that the backends honour (quire.grammar.schema). Not here: compiling, which may still
find a form too much (quire.grammar.pool).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from quire.core.constraint import Constraint
from quire.errors import RequestError
from quire.grammar import forms, schema
from quire.grammar.forms import Form, Json

BACKENDS = ("auto", "llguidance", "xgrammar", "outlines", "lm_format_enforcer")
OTHER_NAMES = {"guidance": "llguidance", "lm-format-enforcer": "lm_format_enforcer"}
"""What other servers call them."""

MOST_FORM_BYTES = 2 * 2**20
"""Of a whole form as it travels."""
MOST_FORM_DEPTH = 32
MOST_FORM_PARTS = 10_000
MOST_REGEX_CHARS = 16_384
MOST_CHOICES = 10_000
MOST_CHOICE_CHARS = 262_144
"""Of all choices together."""
MOST_GRAMMAR_CHARS = 262_144
MOST_TEXT_CHARS = 65_536
MOST_REPEATS = 10_000


@dataclass(frozen=True, slots=True)
class JsonOptions:
    """How JSON is written, and how open its objects are. Fields as in forms.Json."""

    whitespace: bool = True
    closed: bool = False
    spacing: str | None = None


def json_form(
    schema: str | bool | dict[str, object],
    options: JsonOptions = JsonOptions(),
    param: str | None = None,
) -> Json:
    """The form of a schema as a caller gives it, parsed or as text. constraint() checks it."""
    text = schema if isinstance(schema, str) else _text(schema, param)
    return Json(text, options.whitespace, options.closed, options.spacing)


def constraint(form: Form, backend: str = "auto", *, param: str | None = None) -> Constraint:
    """The form, rewritten for the backends, with the one that is to compile it.

    param: the caller's word for the field that the form came from. Raises RequestError.
    """
    name = OTHER_NAMES.get(backend, backend)
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise RequestError(f"no grammar backend {backend!r}; known: {known}", param=param)
    try:
        text = forms.dump(_checked(form, 0))
    except RequestError as error:
        raise _with_param(error, param) from None
    return Constraint(text, name)


def _checked(form: Form, depth: int) -> Form:
    """The form with its schemas rewritten."""
    if depth > MOST_FORM_DEPTH:
        raise RequestError(f"forms are nested over {MOST_FORM_DEPTH} deep")
    if isinstance(form, Json):
        return dataclasses.replace(form, schema=schema.rewritten(form.schema, form.closed))
    return form


def _text(value: object, param: str | None) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the schema is no JSON: {error}", param=param) from None


def _with_param(error: RequestError, param: str | None) -> RequestError:
    if error.param is None:
        error.param = param
    return error
