"""What the output of a request is bound to, as it travels. What it means: quire.grammar."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constraint:
    """Equal constraints have one grammar: this is the key of every cache of them."""

    form: str
    """JSON text of a form (quire.grammar.grammar_ast.dump_node)."""
    backend: str = "auto"
    """Which backend is to compile it; "auto": the one that can."""
