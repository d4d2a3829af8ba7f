"""The backend over xgrammar. Imported only where it is asked for: it brings torch with it.

It compiles without bounds of its own, so it does so in a process that may be ended
(quire.grammar.pool); what was compiled travels as text and is loaded quickly.
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
from quire.grammar import gbnf, own_lark
from quire.grammar.base import Matcher, Words
from quire.grammar.ending import EndingMatcher, Ends, clear, stops
from quire.grammar.forms import Form, Grammar, Json
from quire.grammar.schema_text import closed
from quire.grammar.vocabulary import Names, Vocabulary


class XGrammar:
    """A base.Compiler."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.ends = Ends(vocabulary)
        self._names = Names(vocabulary)
        self.everything = _everything(vocabulary)
        rest = vocabulary.size % 32
        self.last = np.int32((1 << rest) - 1 if rest else -1)
        self._tokens = list(vocabulary.tokens)
        for i, name in vocabulary.special:  # no text has this byte, so none holds the token
            if i < len(self._tokens):
                self._tokens[i] = b"\xff" + name.encode()
        self._known: dict[frozenset[int], tuple[xgr.TokenizerInfo, xgr.GrammarCompiler]] = {}

    def compile(self, form: Form) -> XGGrammar:
        """The form's grammar. Raises RequestError."""
        with _refusing():
            text = gbnf.rules(form, self._names, self._converted)
            named = [int(i) for i in re.findall(r"\bToken\((\d+)\)", text)]
            ends, hidden = stops(self.vocabulary, named)
            made = self._over(ends)[1].compile_grammar(xgr.Grammar.from_ebnf(text))
        return XGGrammar(self, made, ends, hidden)

    def load(self, dumped: bytes) -> XGGrammar:
        head, _, body = dumped.partition(b"\n")
        ends, hidden = frozenset(json.loads(head)["ends"]), json.loads(head)["hidden"]
        info = self._over(ends)[0]
        with _refusing():
            made = xgr.CompiledGrammar.deserialize_json(body.decode(), info)
        return XGGrammar(self, made, ends, hidden)

    def _over(self, ends: frozenset[int]) -> tuple[xgr.TokenizerInfo, xgr.GrammarCompiler]:
        """End tokens that a grammar names are ordinary special ones within it."""
        if ends not in self._known:
            size = self.vocabulary.size
            info = xgr.TokenizerInfo(self._tokens, vocab_size=size, stop_token_ids=sorted(ends))
            self._known[ends] = info, xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        return self._known[ends]

    def _converted(self, form: Json | Grammar) -> str:
        if isinstance(form, Grammar):
            if own_lark.has_json(form.text):
                raise RequestError("%json in Lark: only the backend llguidance bounds its spaces")
            return str(xgr.Grammar.from_lark(own_lark.prepared(form.text, self._names, "")))
        if form.spacing is not None:
            raise RequestError("white space by a pattern: only the backend llguidance can do that")
        made = xgr.Grammar.from_json_schema(
            json.dumps(closed(form)),
            any_whitespace=form.whitespace,
            separators=None if form.whitespace else (",", ":"),
            max_whitespace_cnt=gbnf.MOST_WHITESPACE if form.whitespace else None,
            strict_mode=False,
        )
        return str(made)

    def fill_all(self, matchers: Sequence[tuple[int, Matcher]], words: Words) -> None:
        for row, matcher in matchers:
            matcher.fill(words[row])


class XGGrammar:
    """A base.Grammar."""

    def __init__(
        self,
        compiler: XGrammar,
        made: xgr.CompiledGrammar,
        ends: frozenset[int],
        hidden: int | None,
    ) -> None:
        self.compiler = compiler
        self.size = int(made.memory_size_bytes)
        self._made = made
        self._stops, self._hidden = ends, hidden

    def matcher(self) -> EndingMatcher:
        inner = xgr.GrammarMatcher(self._made, override_stop_tokens=list(self._stops))
        return EndingMatcher(
            _Raw(inner, self._stops, self._hidden, self.compiler), self.compiler.ends
        )

    def dump(self) -> bytes:
        head = {"ends": sorted(self._stops), "hidden": self._hidden}
        return json.dumps(head).encode() + b"\n" + self._made.serialize_json().encode()


class _Raw:
    """Over one GrammarMatcher."""

    __slots__ = ("_only_ends", "compiler", "fault", "hidden", "inner", "stops")

    def __init__(
        self,
        inner: xgr.GrammarMatcher,
        stops: frozenset[int],
        hidden: int | None,
        compiler: XGrammar,
    ) -> None:
        self.inner = inner
        self.stops = stops
        self.hidden = hidden
        self.compiler = compiler
        self.fault: str | None = None
        self._only_ends: bool | None = None

    def take(self, token: int) -> bool:
        if token in self.stops or not 0 <= token < self.compiler.vocabulary.size:
            return False
        taken = bool(self.inner.accept_token(token))
        if taken:
            self._only_ends = None
        return taken

    def back(self, tokens: int) -> None:
        self.inner.rollback(tokens)
        self._only_ends = None
        self.fault = None

    def mask(self, words: Words) -> None:
        if not self.inner.fill_next_token_bitmask(words.reshape(1, -1)):
            words[:] = self.compiler.everything
        words[-1] &= self.compiler.last  # it may set bits past the vocabulary
        clear(words, self.hidden)
        if not words.any() and not self.whole():
            self.fault = "the grammar has come to where nothing can follow"

    def ahead(self, tokens: Sequence[int]) -> int:
        taken = sum(1 for _ in itertools.takewhile(self.take, tokens))
        next_one = tokens[taken] if taken < len(tokens) else None
        is_end = next_one in self.stops and next_one != self.hidden and self.whole()
        if taken:
            self.back(taken)
        return taken + is_end

    def whole(self) -> bool:
        return bool(self.inner.is_completed())

    def stopped(self) -> bool:
        if self._only_ends is None:
            self._only_ends = self.whole() and self._nothing_follows()
        return self._only_ends

    def _nothing_follows(self) -> bool:
        words = np.zeros(self.compiler.vocabulary.words, np.int32)
        if not self.inner.fill_next_token_bitmask(words.reshape(1, -1)):
            return False
        for i in self.stops:
            clear(words, i)
        return not words.any()

    def twin(self) -> _Raw:
        twin = _Raw(self.inner.fork(), self.stops, self.hidden, self.compiler)
        twin.fault = self.fault
        return twin


def _everything(vocabulary: Vocabulary) -> Words:
    """Bits of all that stands for text."""
    bits = np.zeros(vocabulary.words * 32, np.uint8)
    bits[[i for i, token in enumerate(vocabulary.tokens) if token]] = 1
    bits[[i for i, _ in vocabulary.special]] = 0
    words: Words = np.packbits(bits, bitorder="little").view(np.int32)
    return words


@contextmanager
def _refusing() -> Iterator[None]:
    """Its errors are RuntimeErrors, with places in its own sources."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        first = str(error).strip().split("\n")[0]
        told = re.sub(r"^\[[\d:]+\] \S+: ", "", first)
        raise RequestError(f"xgrammar refuses it: {told:.300}") from None
