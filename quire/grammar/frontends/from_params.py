"""Converts StructuredOutputsParams into grammar nodes and constraints."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quire.core.constraint import Constraint
from quire.core.structured_output_params import StructuredOutputsParams
from quire.errors import RequestError
from quire.grammar.frontends import structural_tags, validate
from quire.grammar.grammar_ast import ChoiceNode, GrammarNode, JsonNode, RegexNode, UserGrammarNode

log = logging.getLogger(__name__)

ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class StructuredDefaults:
    """The engine's options, for what a request leaves open."""

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False
    """What is thought is bound, too: the form does not wait for its end."""


def params_to_node(asked: StructuredOutputsParams, house: StructuredDefaults) -> GrammarNode:
    """The text that is allowed. Raises RequestError, by fields of `structured_outputs`."""
    if asked.json is not None:
        return _json_node(asked, house, _schema_text(asked.json))
    if asked.json_object:
        return _json_node(asked, house, ANY_OBJECT)
    if asked.whitespace_pattern is not None:
        message = f"whitespace_pattern goes with JSON, not with {asked.kind.value}"
        raise RequestError(message, param="structured_outputs.whitespace_pattern")
    if asked.structural_tag is not None:
        style = _json_node(asked, house, "")
        return structural_tags.structural_tag_to_node(json.loads(asked.structural_tag), style)
    return _non_json_node(asked)


def params_to_constraint(
    asked: StructuredOutputsParams, house: StructuredDefaults, param: str | None = None
) -> Constraint:
    """The form as a request carries it, checked. param: the caller's word for it.

    Logs the keywords of its schema that are not enforced.
    """
    where = f"structured_outputs.{asked.kind.value}" if param is None else param
    form = params_to_node(asked, house)
    made = validated_constraint(form, requested_backend(asked, house), where)
    log_ignored(where, validate.ignored_keywords(form))
    return made


def log_ignored(param: str, keywords: Iterable[str]) -> None:
    """Log, once each, keywords and formats of a schema that are not enforced."""
    for keyword in keywords:
        _log_ignored_once(param, keyword)


@functools.lru_cache(maxsize=256)
def _log_ignored_once(param: str, keyword: str) -> None:
    log.warning("%s: %.64r of the JSON schema is not enforced", param, keyword)


def validated_constraint(form: GrammarNode, backend: str, param: str) -> Constraint:
    """The form, checked. Raises RequestError, which begins with the caller's word for it."""
    try:
        return validate.build_constraint(form, backend, param=param)
    except RequestError as error:
        raise RequestError(f"{param}: {error}", param=param) from None


def requested_backend(asked: StructuredOutputsParams, house: StructuredDefaults) -> str:
    """Which backend is to compile it."""
    return asked.backend or house.backend


def _json_node(asked: StructuredOutputsParams, house: StructuredDefaults, schema: str) -> JsonNode:
    return JsonNode(
        schema,
        whitespace=not (asked.disable_any_whitespace or house.disable_any_whitespace),
        closed=asked.disable_additional_properties or house.disable_additional_properties,
        whitespace_pattern=asked.whitespace_pattern,
    )


def _non_json_node(asked: StructuredOutputsParams) -> GrammarNode:
    if asked.regex is not None:
        return RegexNode(asked.regex)
    if asked.choice is not None:
        return ChoiceNode(tuple(dict.fromkeys(asked.choice)))
    assert asked.grammar is not None
    return UserGrammarNode(asked.grammar)


def _schema_text(given: str | dict[str, Any]) -> str:
    """As text. Equal schemas in other words stay apart; the order of properties is kept."""
    if isinstance(given, str):
        given = json.loads(given)
    try:
        made = json.dumps(given, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        made.encode()
    except (TypeError, ValueError) as error:
        message = f"structured_outputs.json is not JSON: {error}"
        raise RequestError(message, param="structured_outputs.json") from None
    return made
