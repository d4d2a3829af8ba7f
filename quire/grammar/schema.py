"""What a JSON Schema may ask: rewritten exactly into what the backends honour, or refused.

    rewritten(text, closed) -> text    of a few keywords (quire.grammar.schemas.emit says which)
    strict(schema) -> schema           checked by the rules that go with `strict: true`

Nothing is ignored in silence: a keyword is honoured, says something to people only, or is refused
with its place. Every value that the result allows is one that the schema allows; where a schema
says more than a grammar can, the result is narrower, never wider. Read in schemas.document.
"""

from __future__ import annotations

import functools
from typing import Any

from quire.grammar.schemas import emit
from quire.grammar.schemas.document import Document, Refused, refuse
from quire.grammar.schemas.graph import Graph
from quire.grammar.schemas.tableau import Tableau

__all__ = ["Refused", "rewritten", "strict"]

KEPT = 256
"""Schemas whose rewriting is remembered: requests bring the same ones again and again."""


@functools.lru_cache(maxsize=KEPT)
def rewritten(text: str, closed: bool = False) -> str:
    """The schema in keywords that every backend honours. Raises Refused, with the place.

    closed: as in quire.grammar.forms.Json.
    """
    document = Document(text)
    tableau = Tableau(document, closed)
    root = tableau.key([(document.root, True)])
    return emit.text(Graph(tableau, root))


def strict(schema: Any) -> Any:
    """The schema, if it keeps the rules of strict mode: each object names all of its properties,
    requires all of them and allows no others. Raises Refused, with the place."""
    refuse("", "not written yet")
