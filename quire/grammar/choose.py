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

from quire.config.backends import NAMES, REFUSED, our_name
from quire.errors import ConfigError
from quire.grammar.base import Compiler, Grammar, Matcher, Words
from quire.grammar.forms import Form
from quire.grammar.open_ends import goes_on_behind_open_text
from quire.grammar.vocabulary import Vocabulary

_BACKENDS = {
    "llguidance": ("quire.grammar.llguidance", "LLGuidance", "llguidance"),
    "xgrammar": ("quire.grammar.xgrammar", "XGrammar", "xgrammar"),
}
"""name -> (module, class, package that it imports)."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A backend, and why it is this one."""

    backend: str
    why: str


def chosen(name: str, form: Form) -> Chosen:
    """The backend for a form. Raises ConfigError for a name that none has."""
    known = _known(name)
    if known != "auto":
        return Chosen(known, "it was asked for by name")
    if goes_on_behind_open_text(form):
        return Chosen("xgrammar", "auto: more stands behind text without a clear end")
    return Chosen("llguidance", "auto: it compiles in milliseconds and bounds the work of a step")


def check(name: str) -> None:
    """Raises ConfigError: no backend has this name, or its package is not installed."""
    known = _known(name)
    if known == "auto":
        return
    package = _BACKENDS[known][2]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"the backend {known} of structured output is not installed: pip install {package}"
        )


def compiler(name: str, vocabulary: Vocabulary) -> Compiler:
    """A backend by its name. Raises ConfigError, as check does."""
    check(name)
    if _known(name) == "auto":
        return Auto(vocabulary)
    module, kind, _ = _BACKENDS[_known(name)]
    return cast(Compiler, getattr(importlib.import_module(module), kind)(vocabulary))


def _known(name: str) -> str:
    known = our_name(name)
    if known in REFUSED:
        raise ConfigError(
            f"the backend {known} of structured output is not supported: {REFUSED[known]}; "
            f"take one of {', '.join(NAMES)}, which compile every form"
        )
    if known not in NAMES:
        raise ConfigError(
            f"no backend of structured output is called {name!r:.40}; there are {', '.join(NAMES)}"
        )
    return known


class Auto:
    """A Compiler that hands each form to the backend that is chosen for it.

    Its grammars are those of that backend, whose compiler they name; load them there.
    """

    name = "auto"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._made: dict[str, Compiler] = {}

    def compile(self, form: Form) -> Grammar:
        return self._backend(chosen("auto", form).backend).compile(form)

    def load(self, dumped: bytes) -> Grammar:
        is_lark = dumped.startswith(b'{"grammars"')
        return self._backend("llguidance" if is_lark else "xgrammar").load(dumped)

    def fill_all(self, matchers: Sequence[tuple[int, Matcher]], words: Words) -> None:
        for row, matcher in matchers:
            matcher.fill(words[row])

    def _backend(self, name: str) -> Compiler:
        if name not in self._made:
            self._made[name] = compiler(name, self.vocabulary)
        return self._made[name]
