"""Which backend compiles a form, and why.

"auto" is llguidance, unless the form has what only another one compiles.
"""

from __future__ import annotations

from quire.errors import ConfigError
from quire.grammar.base import Compiler
from quire.grammar.llguidance import LLGuidance
from quire.grammar.vocabulary import Vocabulary

NAMES = ("auto", "llguidance")


def compiler(name: str, vocabulary: Vocabulary) -> Compiler:
    """A backend by its name. Raises ConfigError."""
    if name in ("auto", "llguidance", "guidance"):
        return LLGuidance(vocabulary)
    if name == "xgrammar":
        from quire.grammar.xgrammar import XGrammar

        return XGrammar(vocabulary)
    raise ConfigError(f"no backend of structured output is called {name!r:.40}")
