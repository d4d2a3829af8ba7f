"""CompileService compiles grammars over one vocabulary and loads what a worker compiled."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property

import msgspec

from quire.config.structured_backends import canonical_name
from quire.errors import ConfigError, RequestError
from quire.grammar import grammar_ast
from quire.grammar.backends import backend_select
from quire.grammar.backends.base import CompiledGrammar, GrammarCompiler
from quire.grammar.compilation.compile_worker import CompileResult
from quire.grammar.frontends import ebnf
from quire.grammar.json_schema.rewrite import rewrite_node
from quire.grammar.length_closing.budgeted_matcher import BudgetedMatcher, FillBitmasks
from quire.grammar.length_closing.completion_plan import (
    CompletionPlan,
    MinCompletion,
    build_completion_plan,
    find_min_completion,
)
from quire.grammar.length_closing.token_classes import TokenClasses
from quire.grammar.vocabulary import Vocabulary


class GrammarWithCompletion:
    """A built grammar with its completion plan, shared by all sequences that use it."""

    def __init__(
        self, grammar: CompiledGrammar, closer: CompletionPlan | None, least: MinCompletion
    ) -> None:
        self.grammar = grammar
        self.min_tokens = least.min_tokens or 0
        self.size = grammar.size
        self.fill_all: FillBitmasks = grammar.compiler.fill_bitmasks
        self._plan = closer

    def guide(self) -> BudgetedMatcher:
        """A fresh one, for one sequence."""
        return BudgetedMatcher(self.grammar.matcher(), self._plan)


class CompileService:
    """Everything that belongs to a vocabulary, made once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._compilers: dict[str, GrammarCompiler] = {}
        """By canonical name: each has threads of its own."""

    @cached_property
    def token_classes(self) -> TokenClasses:
        """Token classes for length-aware closing."""
        return TokenClasses(self.vocabulary)

    def prepare(self) -> None:
        """Make now what every grammar needs: a second of work with 150,000 tokens."""
        assert self.token_classes
        with suppress(RequestError):  # there may be no such token
            self.compiler("auto").compile(grammar_ast.LiteralNode("a"))

    def compiler(self, name: str) -> GrammarCompiler:
        """The compiler of a backend. Raises RequestError for an unknown one."""
        known = "llguidance" if name == "auto" else canonical_name(name)
        if known not in self._compilers:
            try:
                self._compilers[known] = backend_select.build_compiler(known, self.vocabulary)
            except ConfigError as error:
                raise RequestError(str(error)) from None
        return self._compilers[known]

    def compile(self, form: str, backend: str) -> CompileResult:
        """All that is slow. Raises RequestError."""
        wanted = grammar_ast.map_json(grammar_ast.load_node(form), rewrite_node)
        grammar = self.compiler(backend).compile(wanted)
        least = find_min_completion(wanted, grammar.matcher(), self.token_classes)
        if least.min_tokens is None and not any(
            map(ebnf.may_be_cut_off, grammar_ast.user_grammars(wanted))
        ):
            raise RequestError(
                "no short text of the form was found, so that its texts could be cut off at "
                "max_tokens: use a simpler form"
            )
        return CompileResult(grammar.compiler.name, grammar.dump(), msgspec.to_builtins(least), 0.0)

    def load(self, done: CompileResult) -> GrammarWithCompletion:
        """All that is quick, of what was compiled elsewhere. Raises RequestError."""
        grammar = self.compiler(done.backend).load(done.grammar_data)
        least = msgspec.convert(done.min_completion, MinCompletion)
        return GrammarWithCompletion(
            grammar, build_completion_plan(least, self.token_classes), least
        )
