"""The backend over xgrammar. Imported only where it is asked for: it brings torch with it.

It compiles without bounds of its own, so it does so in a process that may be ended
(quire.grammar.compilation.grammar_cache); what was compiled travels as text and is loaded quickly.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import xgrammar as xgr

from quire.errors import RequestError
from quire.grammar.backends import emit_gbnf
from quire.grammar.backends.base import MaskWords, Matcher
from quire.grammar.backends.eos_matcher import EosMask, EosMatcher, clear_bit, stop_tokens_of
from quire.grammar.frontends import user_lark
from quire.grammar.frontends.schema_text import closed_schema
from quire.grammar.grammar_ast import GrammarNode, JsonNode, UserGrammarNode
from quire.grammar.vocabulary import SpecialTokenNames, Vocabulary


class XGrammarCompiler:
    """A base.Compiler."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.eos = EosMask(vocabulary)
        self._names = SpecialTokenNames(vocabulary)
        self.text_token_mask = _text_token_mask(vocabulary)
        rest = vocabulary.size % 32
        self.last = np.int32((1 << rest) - 1 if rest else -1)
        self._tokens = list(vocabulary.tokens)
        for i, name in vocabulary.special_tokens:  # no text has this byte, so none holds the token
            if i < len(self._tokens):
                self._tokens[i] = b"\xff" + name.encode()
        self._known: dict[frozenset[int], tuple[xgr.TokenizerInfo, xgr.GrammarCompiler]] = {}

    def compile(self, form: GrammarNode) -> XGrammarGrammar:
        """The form's grammar. Raises RequestError."""
        with _translate_errors():
            text = emit_gbnf.emit_gbnf(form, self._names, self._convert)
            named = [int(i) for i in re.findall(r"\bToken\((\d+)\)", text)]
            eos, hidden = stop_tokens_of(self.vocabulary, named)
            made = self._compiler_for(eos)[1].compile_grammar(xgr.Grammar.from_ebnf(text))
        return XGrammarGrammar(self, made, eos, hidden)

    def load(self, dumped: bytes) -> XGrammarGrammar:
        head, _, body = dumped.partition(b"\n")
        eos, hidden = frozenset(json.loads(head)["ends"]), json.loads(head)["hidden"]
        info = self._compiler_for(eos)[0]
        with _translate_errors():
            made = xgr.CompiledGrammar.deserialize_json(body.decode(), info)
        return XGrammarGrammar(self, made, eos, hidden)

    def _compiler_for(self, ends: frozenset[int]) -> tuple[xgr.TokenizerInfo, xgr.GrammarCompiler]:
        """End tokens that a grammar names are ordinary special ones within it."""
        if ends not in self._known:
            size = self.vocabulary.size
            info = xgr.TokenizerInfo(self._tokens, vocab_size=size, stop_token_ids=sorted(ends))
            self._known[ends] = info, xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        return self._known[ends]

    def _convert(self, form: JsonNode | UserGrammarNode) -> str:
        if isinstance(form, UserGrammarNode):
            if user_lark.has_json(form.text):
                raise RequestError("%json in Lark: only the backend llguidance bounds its spaces")
            return str(
                xgr.Grammar.from_lark(user_lark.prepare_user_lark(form.text, self._names, ""))
            )
        if form.whitespace_pattern is not None:
            raise RequestError("white space by a pattern: only the backend llguidance can do that")
        made = xgr.Grammar.from_json_schema(
            json.dumps(closed_schema(form)),
            any_whitespace=form.whitespace,
            separators=None if form.whitespace else (",", ":"),
            max_whitespace_cnt=emit_gbnf.MAX_WHITESPACE if form.whitespace else None,
            strict_mode=False,
        )
        return str(made)

    def fill_bitmasks(self, matchers: Sequence[tuple[int, Matcher]], words: MaskWords) -> None:
        for row, matcher in matchers:
            matcher.fill_bitmask(words[row])


class XGrammarGrammar:
    """A base.Grammar."""

    def __init__(
        self,
        compiler: XGrammarCompiler,
        made: xgr.CompiledGrammar,
        ends: frozenset[int],
        hidden: int | None,
    ) -> None:
        self.compiler = compiler
        self.size = int(made.memory_size_bytes)
        self._compiled = made
        self._stop_tokens, self._hidden = ends, hidden

    def matcher(self) -> EosMatcher:
        inner = xgr.GrammarMatcher(self._compiled, override_stop_tokens=list(self._stop_tokens))
        return EosMatcher(
            _XGrammarRawMatcher(inner, self._stop_tokens, self._hidden, self.compiler),
            self.compiler.eos,
        )

    def dump(self) -> bytes:
        head = {"ends": sorted(self._stop_tokens), "hidden": self._hidden}
        return json.dumps(head).encode() + b"\n" + self._compiled.serialize_json().encode()


class _XGrammarRawMatcher:
    """Over one GrammarMatcher."""

    __slots__ = ("_only_ends", "compiler", "fault", "hidden", "inner", "stop_tokens")

    def __init__(
        self,
        inner: xgr.GrammarMatcher,
        stops: frozenset[int],
        hidden: int | None,
        compiler: XGrammarCompiler,
    ) -> None:
        self.inner = inner
        self.stop_tokens = stops
        self.hidden = hidden
        self.compiler = compiler
        self.fault: str | None = None
        self._only_ends: bool | None = None

    def accept(self, token: int) -> bool:
        if token in self.stop_tokens or not 0 <= token < self.compiler.vocabulary.size:
            return False
        taken = bool(self.inner.accept_token(token))
        if taken:
            self._only_ends = None
        return taken

    def rollback(self, tokens: int) -> None:
        self.inner.rollback(tokens)
        self._only_ends = None
        self.fault = None

    def fill_mask(self, words: MaskWords) -> None:
        if not self.inner.fill_next_token_bitmask(words.reshape(1, -1)):
            words[:] = self.compiler.text_token_mask
        words[-1] &= self.compiler.last  # it may set bits past the vocabulary
        clear_bit(words, self.hidden)
        if not words.any() and not self.is_complete():
            self.fault = "the grammar has come to where nothing can follow"

    def count_accepted(self, tokens: Sequence[int]) -> int:
        taken = sum(1 for _ in itertools.takewhile(self.accept, tokens))
        next_one = tokens[taken] if taken < len(tokens) else None
        is_end = next_one in self.stop_tokens and next_one != self.hidden and self.is_complete()
        if taken:
            self.rollback(taken)
        return taken + is_end

    def is_complete(self) -> bool:
        return bool(self.inner.is_completed())

    def is_terminated(self) -> bool:
        if self._only_ends is None:
            self._only_ends = self.is_complete() and self._nothing_follows()
        return self._only_ends

    def _nothing_follows(self) -> bool:
        words = np.zeros(self.compiler.vocabulary.mask_words, np.int32)
        if not self.inner.fill_next_token_bitmask(words.reshape(1, -1)):
            return False
        for i in self.stop_tokens:
            clear_bit(words, i)
        return not words.any()

    def copy(self) -> _XGrammarRawMatcher:
        copy = _XGrammarRawMatcher(self.inner.fork(), self.stop_tokens, self.hidden, self.compiler)
        copy.fault = self.fault
        return copy


def _text_token_mask(vocabulary: Vocabulary) -> MaskWords:
    """Bits of all that stands for text."""
    bits = np.zeros(vocabulary.mask_words * 32, np.uint8)
    bits[[i for i, token in enumerate(vocabulary.tokens) if token]] = 1
    bits[[i for i, _ in vocabulary.special_tokens]] = 0
    words: MaskWords = np.packbits(bits, bitorder="little").view(np.int32)
    return words


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Its errors are RuntimeErrors, with places in its own sources."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        first = str(error).strip().split("\n")[0]
        told = re.sub(r"^\[[\d:]+\] \S+: ", "", first)
        raise RequestError(f"xgrammar refuses it: {told:.300}") from None
