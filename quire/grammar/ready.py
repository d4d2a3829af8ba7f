"""Compiling and building over one vocabulary: what a worker does, and what is done with it here."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property

import msgspec

from quire.errors import ConfigError, RequestError
from quire.grammar import choose, forms
from quire.grammar.base import Compiler, Grammar
from quire.grammar.closer import Closer, Least, closer_of, plan
from quire.grammar.closing import FillAll, Guide
from quire.grammar.spelling import Spelling
from quire.grammar.vocabulary import Vocabulary
from quire.grammar.worker import Done


class Ready:
    """A grammar that is built, with what closes its texts. Shared by all who are bound to it."""

    def __init__(self, grammar: Grammar, closer: Closer | None, least: Least) -> None:
        self.grammar = grammar
        self.least = least.least or 0
        self.size = grammar.size
        self.fill_all: FillAll = grammar.compiler.fill_all
        self._closer = closer

    def guide(self) -> Guide:
        """A fresh one, for one sequence."""
        return Guide(self.grammar.matcher(), self._closer)


class Workshop:
    """Everything that belongs to a vocabulary, made once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._compilers: dict[str, Compiler] = {}

    @cached_property
    def spelling(self) -> Spelling:
        """What closing knows of the tokens."""
        return Spelling(self.vocabulary)

    def prepare(self) -> None:
        """Make now what every grammar needs: a second of work with 150,000 tokens."""
        assert self.spelling
        with suppress(RequestError):  # there may be no such token
            self.compiler("auto").compile(forms.Text("a"))

    def compiler(self, name: str) -> Compiler:
        """A backend. Raises RequestError for one that is not there."""
        if name not in self._compilers:
            try:
                self._compilers[name] = choose.compiler(name, self.vocabulary)
            except ConfigError as error:
                raise RequestError(str(error)) from None
        return self._compilers[name]

    def compile(self, form: str, backend: str) -> Done:
        """All that is slow. Raises RequestError."""
        wanted = forms.load(form)
        grammar = self.compiler(backend).compile(wanted)
        least = plan(wanted, grammar.matcher(), self.spelling)
        if least.least is None and not forms.has_grammar(wanted):
            raise RequestError(
                f"{grammar.compiler.name} comes to no end of the form that is surely reached, so "
                "that its texts could be cut off: ask for a simpler one, or for another backend"
            )
        return Done(grammar.compiler.name, grammar.dump(), msgspec.to_builtins(least), 0.0)

    def load(self, done: Done) -> Ready:
        """All that is quick, of what was compiled elsewhere. Raises RequestError."""
        grammar = self.compiler(done.backend).load(done.dumped)
        least = msgspec.convert(done.least, Least)
        return Ready(grammar, closer_of(least, self.spelling), least)
