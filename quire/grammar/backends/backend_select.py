"""Which backend compiles a form, and why.

    chosen(name, form)            -> Chosen: the backend's name, and the reason
    compiler(name, vocabulary)    -> Compiler: one backend; of "auto" each form finds its own

"auto" is llguidance: it compiles in milliseconds and bounds the work of each step. Forms that have
no clear place where a part of them ends, it reads by lexemes too long; those are xgrammar's.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from quire.config.structured_backends import NAMES, UNSUPPORTED, canonical_name
from quire.errors import ConfigError
from quire.grammar.backends.base import CompiledGrammar, GrammarCompiler, MaskWords, Matcher
from quire.grammar.backends.trailing_text import continues_after_trailing_text
from quire.grammar.grammar_ast import GrammarNode
from quire.grammar.vocabulary import Vocabulary

_BACKENDS = {
    "llguidance": ("quire.grammar.backends.llguidance_backend", "LLGuidanceCompiler", "llguidance"),
    "xgrammar": ("quire.grammar.backends.xgrammar_backend", "XGrammarCompiler", "xgrammar"),
}
"""name -> (module, class, package that it imports)."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend, and why it is this one."""

    backend: str
    reason: str


def select_backend(name: str, form: GrammarNode) -> BackendChoice:
    """The backend for a form. Raises ConfigError for a name that none has."""
    known = _canonical_name(name)
    if known != "auto":
        return BackendChoice(known, "it was asked for by name")
    if continues_after_trailing_text(form):
        return BackendChoice("xgrammar", "auto: more stands behind text without a clear end")
    return BackendChoice(
        "llguidance", "auto: it compiles in milliseconds and bounds the work of a step"
    )


def check_backend(name: str) -> None:
    """Raises ConfigError: no backend has this name, or its package is not installed."""
    known = _canonical_name(name)
    if known == "auto":
        return
    package = _BACKENDS[known][2]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"the backend {known} of structured output is not installed: pip install {package}"
        )


def build_compiler(name: str, vocabulary: Vocabulary) -> GrammarCompiler:
    """A backend by its name. Raises ConfigError, as check does."""
    check_backend(name)
    if _canonical_name(name) == "auto":
        return AutoCompiler(vocabulary)
    module, kind, _ = _BACKENDS[_canonical_name(name)]
    return cast(GrammarCompiler, getattr(importlib.import_module(module), kind)(vocabulary))


def _canonical_name(name: str) -> str:
    known = canonical_name(name)
    if known in UNSUPPORTED:
        raise ConfigError(
            f"the backend {known} of structured output is not supported: {UNSUPPORTED[known]}; "
            f"take one of {', '.join(NAMES)}, which compile every form"
        )
    if known not in NAMES:
        raise ConfigError(
            f"no backend of structured output is called {name!r:.40}; there are {', '.join(NAMES)}"
        )
    return known


class AutoCompiler:
    """A Compiler that hands each form to the backend that is chosen for it.

    Its grammars are those of that backend, whose compiler they name; load them there.
    """

    name = "auto"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._compilers: dict[str, GrammarCompiler] = {}

    def compile(self, form: GrammarNode) -> CompiledGrammar:
        return self._compiler(select_backend("auto", form).backend).compile(form)

    def load(self, dumped: bytes) -> CompiledGrammar:
        is_lark = dumped.startswith(b'{"grammars"')
        return self._compiler("llguidance" if is_lark else "xgrammar").load(dumped)

    def fill_bitmasks(self, matchers: Sequence[tuple[int, Matcher]], words: MaskWords) -> None:
        for row, matcher in matchers:
            matcher.fill_bitmask(words[row])

    def _compiler(self, name: str) -> GrammarCompiler:
        if name not in self._compilers:
            self._compilers[name] = build_compiler(name, self.vocabulary)
        return self._compilers[name]
