"""Constraint: describes what the output of a request must match; quire.grammar interprets it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constraint:
    """Equal constraints have the same grammar: this is the key of every grammar cache."""

    form: str
    """JSON text of a grammar node (quire.grammar.grammar_ast.dump_node)."""
    backend: str = "auto"
    """Backend that compiles it; "auto": the first that can."""
