"""Whether a form may be asked for, decided at the edge: before a request costs anything.

    constraint(form) -> Constraint   or RequestError: where, why, and what would do instead

Pure Python, from microseconds to a few milliseconds; no backend is imported. Schemas are rewritten
into keywords that the backends honour (quire.grammar.schema). Not here: compiling, which may still
find a form too much (quire.grammar.pool).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.config.backends import KNOWN, our_name
from quire.core.constraint import Constraint
from quire.errors import ConfigError, RequestError
from quire.grammar import choose, forms, regex, schema, texts
from quire.grammar.forms import (
    Choice,
    Either,
    Form,
    Grammar,
    Json,
    Regex,
    Repeat,
    Seq,
    Tag,
    Tags,
    Text,
    Until,
)

MOST_DEPTH = 64
"""Forms within forms."""
MOST_PARTS = 10_000
"""Forms in all."""
MOST_CHOICES = 10_000
MOST_CHOICE_CHARS = 262_144
"""Of all choices together."""
MOST_GRAMMAR_CHARS = 262_144
MOST_GRAMMAR_LINES = 10_000
MOST_GRAMMAR_BRACKETS = 200
"""Brackets within brackets."""
MOST_TEXT_CHARS = 262_144
"""Of a text, mark or trigger that a form holds."""
MOST_REPEATS = 10_000
MOST_SPACING_CHARS = 256
KEPT = 64
"""Grammars whose check is remembered."""

_SPACES = regex.Repeat(regex.Chars(((9, 10), (13, 13), (32, 32))), 0, None)


@dataclass(frozen=True, slots=True)
class JsonOptions:
    """How JSON is written, and how open its objects are. Fields as in forms.Json."""

    whitespace: bool = True
    closed: bool = False
    spacing: str | None = None


def json_form(
    schema: str | bool | Mapping[str, object],
    options: JsonOptions = JsonOptions(),
    param: str | None = None,
) -> Json:
    """The form of a schema as a caller gives it, parsed or as text. constraint() checks it."""
    text = schema if isinstance(schema, str) else _dumped(schema, param)
    return Json(text, options.whitespace, options.closed, options.spacing)


def constraint(form: Form, backend: str = "auto", *, param: str | None = None) -> Constraint:
    """The form, rewritten for the backends, with the one that is to compile it.

    param: the caller's word for the field that the form came from. Raises RequestError.
    """
    try:
        name = _backend(backend)
        return Constraint(forms.dump(_Checker(name).of(form)), name)
    except RequestError as error:
        error.param = error.param or param
        raise


def _backend(given: str) -> str:
    name = our_name(given)
    if name not in KNOWN:
        known = ", ".join(KNOWN)
        raise RequestError(
            f"no backend of structured output is called {given!r:.40}; known: {known}"
        )
    if fault := _lacking(name):
        raise RequestError(fault)
    return name


@functools.cache
def _lacking(name: str) -> str | None:
    """Why a backend cannot be had here, if so."""
    try:
        choose.check(name)
    except ConfigError as error:
        return str(error)
    return None


def _dumped(given: object, param: str | None) -> str:
    try:
        return json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the schema is no JSON: {error}", param=param) from None


class _Checker:
    """One walk over one form."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.parts = 0

    def of(self, form: Form, depth: int = 0) -> Form:
        """The form with its schemas rewritten. Raises RequestError."""
        self.parts += 1
        if self.parts > MOST_PARTS:
            raise RequestError(f"a form of over {MOST_PARTS} parts")
        if depth > MOST_DEPTH:
            raise RequestError(f"forms are nested over {MOST_DEPTH} deep")
        if isinstance(form, Json):
            return _json(form, self.backend)
        if isinstance(form, Seq | Either):
            return self._several(form, depth)
        if isinstance(form, Repeat):
            _check_counts(form)
            return dataclasses.replace(form, part=self.of(form.part, depth + 1))
        if isinstance(form, Tag):
            return self._tag(form, depth)
        if isinstance(form, Tags):
            _check_tags(form)
            tags = tuple(self._tag(tag, depth + 1) for tag in form.tags)
            return dataclasses.replace(form, tags=tags)
        _check_leaf(form)
        return form

    def _several(self, form: Seq | Either, depth: int) -> Form:
        if isinstance(form, Either) and not form.parts:
            raise RequestError("a choice between forms needs one at least")
        parts = tuple(self.of(part, depth + 1) for part in form.parts)
        return dataclasses.replace(form, parts=parts)

    def _tag(self, form: Tag, depth: int) -> Tag:
        _check_text(form.begin, "the begin of a tag")
        _check_text(form.end, "the end of a tag")
        return dataclasses.replace(form, content=self.of(form.content, depth + 1))


# -- leaves -------------------------------------------------------------------------------------


def _json(form: Json, backend: str) -> Json:
    rewritten = schema.rewritten(form.schema, form.closed, backend)
    if form.spacing is not None:
        _check_spacing(form.spacing)
    return dataclasses.replace(form, schema=rewritten, closed=False)


def _check_leaf(form: Regex | Choice | Grammar | Text | Until) -> None:
    if isinstance(form, Regex):
        _check_regex(form.pattern)
    elif isinstance(form, Choice):
        _check_choice(form.options)
    elif isinstance(form, Grammar):
        _check_grammar(form.text)
    elif isinstance(form, Text):
        _check_text(form.text, "a text of a form")
    else:
        _check_text(form.mark, "a mark that ends a text")
        if not form.mark:
            raise RequestError("any text needs a mark that ends it, and this one is empty")


@functools.lru_cache(maxsize=KEPT)
def _check_regex(pattern: str) -> None:
    if not pattern:
        raise RequestError("the regular expression is empty")
    _encoded(pattern, "the regular expression")
    if regex.lengths(regex.whole(regex.parse(pattern), search=False)) is None:
        raise RequestError("the regular expression matches no text")


@functools.lru_cache(maxsize=KEPT)
def _check_spacing(pattern: str) -> None:
    if len(pattern) > MOST_SPACING_CHARS:
        raise RequestError(
            f"whitespace_pattern has {len(pattern)} characters; the limit is {MOST_SPACING_CHARS}"
        )
    try:
        node = regex.whole(regex.parse(pattern), search=False)
        fits = texts.Texts([node], [_SPACES]).empty and regex.lengths(node) is not None
    except texts.TooComplex:
        raise RequestError("whitespace_pattern is too complex") from None
    if not fits:
        raise RequestError(
            "whitespace_pattern must match white space of JSON only: space, tab and line breaks"
        )


def _check_choice(options: Sequence[str]) -> None:
    if not options:
        raise RequestError("a choice needs one option at least")
    if len(options) > MOST_CHOICES:
        raise RequestError(f"{len(options)} choices; the limit is {MOST_CHOICES}")
    if (chars := sum(map(len, options))) > MOST_CHOICE_CHARS:
        raise RequestError(f"choices of {chars} characters; the limit is {MOST_CHOICE_CHARS}")
    for option in options:
        _check_text(option, "a choice")


def _check_grammar(text: str) -> None:
    if not text.strip():
        raise RequestError("the grammar is empty")
    if len(text) > MOST_GRAMMAR_CHARS:
        raise RequestError(
            f"the grammar has {len(text)} characters; the limit is {MOST_GRAMMAR_CHARS}"
        )
    if (lines := text.count("\n")) > MOST_GRAMMAR_LINES:
        raise RequestError(f"the grammar has {lines} lines; the limit is {MOST_GRAMMAR_LINES}")
    _encoded(text, "the grammar")
    depth = deepest = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    if deepest > MOST_GRAMMAR_BRACKETS:
        raise RequestError(f"brackets of the grammar are nested over {MOST_GRAMMAR_BRACKETS} deep")


def _check_text(text: str, what: str) -> None:
    if len(text) > MOST_TEXT_CHARS:
        raise RequestError(f"{what} has {len(text)} characters; the limit is {MOST_TEXT_CHARS}")
    _encoded(text, what)


def _encoded(text: str, what: str) -> None:
    if "\0" in text:
        raise RequestError(f"{what} holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{what} holds half a surrogate pair, which is no character") from None


# -- what holds other forms ---------------------------------------------------------------------


def _check_counts(form: Repeat) -> None:
    _check_text(form.between, "what stands between repeated parts")
    most = form.least if form.most is None else form.most
    if not 0 <= form.least <= most:
        raise RequestError(f"a part is repeated from {form.least} to {form.most} times")
    if most > MOST_REPEATS:
        raise RequestError(f"a part is repeated {most} times; the limit is {MOST_REPEATS}")


def _check_tags(form: Tags) -> None:
    if not form.triggers or not all(form.triggers):
        raise RequestError("tags need triggers, and an empty one triggers everywhere")
    if not form.tags:
        raise RequestError("tags need one tag at least")
    if not 0 <= form.least <= MOST_REPEATS:
        raise RequestError(f"{form.least} tags at least; the limit is {MOST_REPEATS}")
    for trigger in form.triggers:
        _check_text(trigger, "a trigger")
    for tag in form.tags:
        if not any(tag.begin.startswith(trigger) for trigger in form.triggers):
            raise RequestError(f"the tag that begins with {tag.begin!r:.60} begins with no trigger")
