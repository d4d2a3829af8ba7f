"""Grammar compilers by the names that options and requests use."""

from __future__ import annotations

from quire.config.structured_backends import NAMES, UNSUPPORTED, canonical_name
from quire.errors import ConfigError
from quire.grammar.backends.base import GrammarCompiler
from quire.grammar.vocabulary import Vocabulary


def check_backend(name: str) -> None:
    """Raise ConfigError for a backend that does not exist or is not supported."""
    known = canonical_name(name)
    if known in UNSUPPORTED:
        raise ConfigError(
            f"the backend {known} of structured output is not supported: {UNSUPPORTED[known]}; "
            f"take one of {', '.join(NAMES)}"
        )
    if known not in NAMES:
        raise ConfigError(
            f"no backend of structured output is called {name!r:.40}; there are {', '.join(NAMES)}"
        )


def build_compiler(name: str, vocabulary: Vocabulary) -> GrammarCompiler:
    """The compiler of a backend. Raises ConfigError, as check_backend does."""
    from quire.grammar.backends.llguidance_backend import LLGuidanceCompiler

    check_backend(name)
    return LLGuidanceCompiler(vocabulary)
