"""Which backend compiles a form, and why.

    chosen(name)                  -> Chosen: the backend's name, and the reason
    compiler(name, vocabulary)    -> Compiler: the backend over a vocabulary

"auto" is llguidance: it compiles every form, in milliseconds, and bounds the work of each step.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import cast

from quire.errors import ConfigError
from quire.grammar.base import Compiler
from quire.grammar.vocabulary import Vocabulary

_BACKENDS = {
    "llguidance": ("quire.grammar.llguidance", "LLGuidance", "llguidance"),
    "xgrammar": ("quire.grammar.xgrammar", "XGrammar", "xgrammar"),
    "outlines": ("quire.grammar.outlines", "Outlines", "outlines_core"),
    "lm-format-enforcer": (
        "quire.grammar.lm_format_enforcer",
        "LMFormatEnforcer",
        "lm-format-enforcer",
    ),
}
"""name -> (module, class, package that it needs)."""
_OLDER = {"guidance": "llguidance", "lm_format_enforcer": "lm-format-enforcer"}
NAMES = ("auto", *_BACKENDS)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A backend, and why it is this one."""

    backend: str
    why: str


def chosen(name: str) -> Chosen:
    """The backend that a name means. Raises ConfigError for a name that none has."""
    known = _OLDER.get(name, name)
    if known == "auto":
        return Chosen("llguidance", "auto: it compiles every form, and bounds the work of a step")
    if known not in _BACKENDS:
        raise ConfigError(
            f"no backend of structured output is called {name!r:.40}; there are {', '.join(NAMES)}"
        )
    return Chosen(known, "it was asked for by name")


def compiler(name: str, vocabulary: Vocabulary) -> Compiler:
    """A backend by its name. Raises ConfigError: no such name, or its package is not here."""
    backend = chosen(name).backend
    module, kind, package = _BACKENDS[backend]
    try:
        made = getattr(importlib.import_module(module), kind)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("quire"):
            raise
        raise ConfigError(
            f"the backend {backend} of structured output needs the package {package}: "
            f"pip install {package}"
        ) from None
    return cast(Compiler, made(vocabulary))
