"""What the answers of a request are bound to: the form that was asked for, checked and composed.

    Asked.structure ─▶ Form ─▶ behind reasoning, beside calls (quire.server.forcing) ─▶ Constraint

Not here: the words (quire.server.protocol.structure), what a form may ask (quire.grammar.admit).
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.constraint import Constraint
from quire.core.structured import in_words_of
from quire.grammar import words
from quire.grammar.forms import Form
from quire.server.asked import Asked
from quire.server.services import Services


@dataclass(frozen=True, slots=True)
class Bound:
    """The form of a body, and what it is by itself."""

    form: Form | None = None
    constraint: Constraint | None = None
    backend: str = "auto"


def bound(to: Services, asked: Asked) -> Bound:
    """Check the form that is asked for. Raises RequestError in the client's words."""
    structure = asked.structure
    if structure is None:
        return Bound(backend=to.house.backend)
    with in_words_of(structure.words):
        form = words.form(structure.wanted, to.house)
    backend = words.backend(structure.wanted, to.house)
    constraint = words.admitted(form, backend, structure.param)
    if asked.prompt_only:
        return Bound(backend=backend)  # nothing is generated that could have the form
    return Bound(form, constraint, backend)
