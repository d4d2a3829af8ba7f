"""What a JSON Schema may ask: rewritten exactly into what the backends honour, or refused.

    rewritten(text, closed) -> text    of a few keywords (quire.grammar.schemas.emit says which)
    strict(schema) -> schema           checked by the rules that go with `strict: true`

Nothing is ignored in silence: a keyword is honoured, says something to people only, or is refused
with its place. Every value that the result allows is one that the schema allows; where a schema
says more than a grammar can, the result is narrower, never wider. Read in schemas.document.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from quire.grammar.schemas import emit, for_xgrammar
from quire.grammar.schemas.document import Document, Node, Refused, refuse
from quire.grammar.schemas.graph import Graph
from quire.grammar.schemas.tableau import Tableau

__all__ = ["Refused", "check_strict", "rewrite_schema"]

CACHE_SIZE = 64
"""Schemas whose rewriting is remembered: requests bring the same ones again and again."""
MAX_CACHED_CHARS = 32_768
"""Of such a schema."""


def rewrite_schema(text: str, closed: bool = False, backend: str = "auto") -> str:
    """The schema in keywords that the backend honours. Raises Refused, with the place.

    closed: as in quire.grammar.grammar_ast.JsonNode.
    """
    make = _cached_rewrite if len(text) <= MAX_CACHED_CHARS else _rewrite
    return make(text, closed, backend == "xgrammar")


def _rewrite(text: str, closed: bool, xgrammar: bool = False) -> str:
    document = Document(text)
    tableau = Tableau(document, closed)
    root = tableau.key([(document.root, True)])
    graph = Graph(tableau, root)
    return for_xgrammar.text(graph) if xgrammar else emit.text(graph)


_cached_rewrite = functools.lru_cache(maxsize=CACHE_SIZE)(_rewrite)


def check_strict(schema: Any) -> Any:
    """The schema, if it keeps the rules of strict mode: every object names its properties,
    requires all of them and allows no others. Raises Refused, with the place.

    Only what the schema uses is looked at, and only where an object can be.
    """
    try:
        document = Document(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, Refused):
            raise
        refuse("", f"it is no JSON: {error}")
    seen: set[Node] = set()
    todo = [document.root]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        _check_strict_object(node)
        todo += reversed(list(_iter_nodes(document, node)))
    return schema


def _check_strict_object(node: Node) -> None:
    """The rules, at one object."""
    properties = node.named.get("properties", {})
    if not properties and "object" not in node.words.get("type", ()):
        return
    if "patternProperties" in node.named:
        refuse(node.at("patternProperties"), "strict mode has no patternProperties", STRICT_HINT)
    more = node.one.get("additionalProperties")
    if more is None or not more.false:
        place = node.place if more is None else node.at("additionalProperties")
        refuse(place, "strict mode needs additionalProperties to be false", STRICT_HINT)
    required = set(node.words.get("required", ()))
    missing = [name for name in properties if name not in required]
    if missing:
        refuse(
            node.at("required") if "required" in node.words else node.place,
            f"strict mode needs all properties to be required, and {missing[0]!r} is not",
            "an optional one may be of a type and null",
        )
    unnamed = [name for name in node.words.get("required", ()) if name not in properties]
    if unnamed:
        refuse(node.at("required"), f"it requires {unnamed[0]!r}, which is no property")


STRICT_HINT = "name all properties of the object"


def _iter_nodes(document: Document, node: Node) -> Iterator[Node]:
    if "$ref" in node.words:
        yield document.target(node)
    for several in node.several.values():
        yield from several
    for named in node.named.values():
        yield from named.values()
    yield from node.one.values()
