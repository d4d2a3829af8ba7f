"""What the answers of a request are bound to: the form that was asked for, checked and composed.

    Asked.structure ─▶ Form ─▶ behind reasoning, beside calls (quire.server.generation.tool_choice)
    ─▶ Constraint

Not here: the words (quire.server.formats.structured_output), what a form may ask
(quire.grammar.frontends.validate).
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.constraint import Constraint
from quire.core.structured_output_params import translate_error_param
from quire.grammar.frontends import from_params
from quire.grammar.grammar_ast import GrammarNode
from quire.server.app_state import AppState
from quire.server.generation.generation_request import GenerationRequest


@dataclass(frozen=True, slots=True)
class ContentConstraint:
    """The form of a body, and what it is by itself."""

    grammar: GrammarNode | None = None
    constraint: Constraint | None = None
    backend: str = "auto"


def build_content_constraint(to: AppState, asked: GenerationRequest) -> ContentConstraint:
    """Check the form that is asked for. Raises RequestError in the client's words."""
    structure = asked.structure
    if structure is None:
        return ContentConstraint(backend=to.structured_defaults.backend)
    with translate_error_param(structure.field_names):
        form = from_params.params_to_node(structure.params, to.structured_defaults)
    backend = from_params.requested_backend(structure.params, to.structured_defaults)
    constraint = from_params.validated_constraint(form, backend, structure.param)
    if asked.prompt_only:
        return ContentConstraint(backend=backend)  # nothing is generated that could have the form
    return ContentConstraint(form, constraint, backend)
