"""Structured output parameters of one request, under vLLM's names. Plain data.

quire.grammar.frontends.from_params makes the grammar (quire.grammar.grammar_ast) of them, and
quire.grammar.frontends.validate checks that a schema can be enforced.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from quire.core.param_checks import check_strings, shown_json
from quire.errors import RequestError

MAX_SCHEMA_DEPTH = 64
MAX_TAG_DEPTH = MAX_SCHEMA_DEPTH + 16
"""Limit for a structural tag, which contains schemas."""


class StructureKind(str, Enum):
    """Kind of constraint that a StructuredOutputsParams describes."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    JSON_OBJECT = "json_object"
    STRUCTURAL_TAG = "structural_tag"


KINDS = ", ".join(kind.value for kind in StructureKind)
_BACKEND_SETTINGS = {
    "no-fallback": "disable_fallback",
    "disable-any-whitespace": "disable_any_whitespace",
    "no-additional-properties": "disable_additional_properties",
}
"""Suffixes that the name of a backend may have, and the field that each sets."""


@runtime_checkable
class _PydanticModel(Protocol):
    """A class of pydantic."""

    def model_json_schema(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class StructuredOutputsParams:
    """One constraint on the text, with options of its interpretation."""

    json: str | dict[str, Any] | None = None
    """A JSON schema, as text or as a dict; a pydantic class is replaced by its schema."""
    regex: str | None = None
    """A regular expression that matches the whole text."""
    choice: list[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A grammar in EBNF or Lark form."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without white space between its tokens."""
    disable_additional_properties: bool = False
    """Objects have only the properties that the schema names, unless it allows others."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between JSON tokens."""
    structural_tag: str | None = None
    """JSON text: schemas that begin at given markers."""
    backend: str | None = None
    """The backend that compiles it. None: the engine chooses."""
    disable_fallback: bool = False
    """Accepted without effect: a named backend is never replaced by another."""

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Normalize the fields. Raises RequestError for invalid values."""
        given = [k.value for k in StructureKind if getattr(self, k.value) is not None]
        if len(given) != 1:
            what = f"got {' and '.join(given)}" if given else "got none"
            raise RequestError(f"give exactly one of {KINDS}; {what}", param="structured_outputs")
        if isinstance(self.json, _PydanticModel):
            self.json = self.json.model_json_schema()
        self._check(StructureKind(given[0]))
        self._check_options()
        self._read_backend()

    def _read_backend(self) -> None:
        """Split the settings of older releases off the name: "xgrammar:disable-any-whitespace"."""
        name, _, settings = (self.backend or "").partition(":")
        self.backend = name or None
        for one in filter(None, settings.split(",")):
            if one not in _BACKEND_SETTINGS:
                message = f"structured_outputs.backend has no setting {one!r:.40}"
                known = ", ".join(_BACKEND_SETTINGS)
                raise RequestError(
                    f"{message}; known are {known}", param="structured_outputs.backend"
                )
            setattr(self, _BACKEND_SETTINGS[one], True)

    @classmethod
    def from_mapping(
        cls, given: Mapping[str, Any], param: str = "structured_outputs"
    ) -> StructuredOutputsParams:
        """Make one from fields by name. Raises RequestError, also for unknown names."""
        known = [one.name for one in fields(cls)]
        for name in given:
            if name not in known:
                matches = difflib.get_close_matches(str(name), known, n=1)
                hint = (
                    f"; did you mean {matches[0]}?"
                    if matches
                    else f"; known are {', '.join(known)}"
                )
                raise RequestError(f"{param} has no {name!r:.40}{hint}", param=param)
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def kind(self) -> StructureKind:
        """The kind of the given constraint."""
        return next(k for k in StructureKind if getattr(self, k.value) is not None)

    def _check(self, kind: StructureKind) -> None:
        param, given = f"structured_outputs.{kind.value}", getattr(self, kind.value)
        if kind is StructureKind.JSON_OBJECT:
            if given is not True:
                raise _fail(param, given, "true, or left out")
        elif kind is StructureKind.CHOICE:
            if not given:
                raise _fail(param, given, "a non-empty list of strings")
            check_strings(param, given)
            _check_encodable(param, "".join(given))
        elif kind is StructureKind.JSON:
            _check_json(param, given, MAX_SCHEMA_DEPTH)
        elif not isinstance(given, str) or not given:
            raise _fail(param, given, "non-empty text")
        else:
            _check_encodable(param, given)
            if kind is StructureKind.REGEX and "\0" in given:
                raise RequestError(f"{param} must not hold a NUL character", param=param)
            if kind is StructureKind.STRUCTURAL_TAG:
                _check_json(param, given, MAX_TAG_DEPTH)

    def _check_options(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties", "disable_fallback"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(f"structured_outputs.{name}", getattr(self, name), "true or false")
        for name in ("whitespace_pattern", "backend"):
            given = getattr(self, name)
            if given is not None and (not isinstance(given, str) or not given):
                raise _fail(f"structured_outputs.{name}", given, "non-empty text")


GuidedDecodingParams = StructuredOutputsParams
"""The name in older releases."""


def _fail(param: str, given: object, allowed: str) -> RequestError:
    return RequestError(f"{param} must be {allowed}, got {shown_json(given)}", param=param)


def _check_encodable(param: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"{param} holds half a character (a lone surrogate)", param=param
        ) from None


def _check_json(param: str, given: object, most: int) -> None:
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given, parse_constant=_reject_non_json_number)
        except (ValueError, RecursionError) as e:
            raise RequestError(f"{param} is not JSON: {e}", param=param) from None
    if not isinstance(value, (dict, bool)):
        raise _fail(param, given, "a JSON schema: an object, as text or as a dict")
    if json_depth(value, most) > most:
        raise RequestError(f"{param} is nested deeper than {most} levels", param=param)


def _reject_non_json_number(name: str) -> None:
    """Reject NaN and Infinity, which Python's parser accepts."""
    raise ValueError(f"{name} is not JSON")


def json_depth(value: object, most: int) -> int:
    """Return the nesting of a JSON value, 0 for a scalar; counting stops at `most` + 1."""
    deepest, layer = 0, [value]  # not recursive: schemas are untrusted
    while layer and deepest <= most:
        children: list[object] = []
        for one in layer:
            if isinstance(one, dict):
                children.extend(one.values())
            elif isinstance(one, (list, tuple)):
                children.extend(one)
        deepest += any(isinstance(one, (dict, list, tuple)) for one in layer)
        layer = children
    return deepest


_GUIDED_CONSTRAINTS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "structural_tag": "structural_tag",
}
GUIDED_OPTIONS = {
    "guided_whitespace_pattern": "whitespace_pattern",
    "guided_decoding_backend": "backend",
}
GUIDED_FIELDS = {**_GUIDED_CONSTRAINTS, **GUIDED_OPTIONS}
"""Names of older releases -> current names."""


def parse_guided_fields(given: Mapping[str, Any]) -> tuple[StructuredOutputsParams, str] | None:
    """Read the guided_* fields of older releases: the parameters, and the name of the constraint.

    Returns None if there is none. Raises RequestError under those names.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    if settings.get("guided_json_object") is False:
        del settings["guided_json_object"]
    constraints = [name for name in _GUIDED_CONSTRAINTS if name in settings]
    if not constraints:
        return None
    if len(constraints) > 1:
        message = f"give one of {' and '.join(constraints)}: a text can have only one constraint"
        raise RequestError(message, param=constraints[1])
    names = {current: name for name, current in GUIDED_FIELDS.items()}
    with translate_error_param(names):
        params = StructuredOutputsParams(
            **{GUIDED_FIELDS[name]: value for name, value in settings.items()}
        )
    return params, constraints[0]


@contextmanager
def translate_error_param(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field in errors about StructuredOutputsParams to the caller's name for it."""
    try:
        yield
    except RequestError as error:
        field = (error.param or "").removeprefix("structured_outputs.")
        name = names.get(field)
        if name is None or error.param is None:
            raise
        message = str(error).replace(error.param, name, 1)
        raise type(error)(message, param=name) from None
