"""The backend over llguidance: grammars as Lark text, matchers that never raise.

Its matchers enter an error state instead: what their work costs in one step is bounded by fuel,
and a matcher that ran out of it has a `fault`. Compiling and filling give up the GIL.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from quire.errors import RequestError
from quire.grammar import lark
from quire.grammar.base import Matcher, Words
from quire.grammar.ending import EndingMatcher, Ends, clear, stops
from quire.grammar.forms import Form
from quire.grammar.own_lark import named_ids
from quire.grammar.vocabulary import Names, Vocabulary

MOST_SIZE = 500_000
"""Symbols of a grammar."""
FUEL = 5_000_000
"""For the expressions of a grammar, when it is compiled: about 100 ms."""
STEP_FUEL = 1_000_000
"""For those that one step meets: about 70 ms, once for each state."""
STEP_ITEMS = 200_000
"""Of the parser, in one step: an object of 500 optional properties takes half of them, 8 ms."""
OWN_STEP_ITEMS = 2_000
"""The same for grammars that callers write: ambiguous ones take 70 ms for so many."""
OWN_BURST_S = 0.1
OWN_TOKEN_S = 0.002
"""Processor time that a text of such a grammar may take at first, and for each token: of one that
is ambiguous through and through the hundredth takes 10 ms, and all that runs beside it waits."""
LEXER_STATES = 50_000
"""Of one grammar, 1 to 2 kB each."""
TRIES = 2
TRY_TOKENS = 48
PATIENCE_S = 0.001
"""So long masks are filled by the calling thread: a known one takes 5 us, and waking others up to
some ms where the machine is busy."""
FEW = 2
_BASE_SIZE = 650_000
"""Measured over many small schemas, after use."""
_SIZE_PER_BYTE = 60


class _Tokens:
    """What llguidance asks a tokenizer."""

    def __init__(self, vocabulary: Vocabulary, end: int) -> None:
        missing = vocabulary.size - len(vocabulary.tokens)
        # it writes special tokens behind a byte that no text has, and would let that one through
        known = (b"" if b"\xff" in token else token for token in vocabulary.tokens)
        self.tokens = [*known, *([b""] * missing)]
        self.special_token_ids = [i for i, _ in vocabulary.special]
        self.eos_token_id = end
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        """Only for tokens that are forced, which no grammar here has."""
        return []


class LLGuidance:
    """A base.Compiler."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.ends = Ends(vocabulary)
        self._names = Names(vocabulary)
        self._tokenizers: dict[frozenset[int], LLTokenizer] = {}
        self._executor = LLExecutor()

    def compile(self, form: Form) -> LLGrammar:
        """The form's grammar. Raises RequestError."""
        try:
            grammars = lark.grammars(form, self._names)
        except RecursionError:
            raise RequestError("the form is nested too deeply") from None
        made = self.load(json.dumps({"grammars": grammars}).encode())
        self._try(made)
        return made

    def _try(self, made: LLGrammar) -> None:
        """Walk some way through it: what is too much for a step shows here, and not in the loop."""
        words = np.zeros(self.vocabulary.words, np.int32)
        chance = random.Random(0)
        for _ in range(TRIES):
            matcher = made.matcher()
            for _ in range(TRY_TOKENS):
                matcher.fill(words)
                if matcher.fault is not None:
                    raise RequestError(f"the form asks too much work: {matcher.fault}")
                if matcher.over or not matcher.accept(_drawn(words, chance)):
                    break

    def load(self, dumped: bytes) -> LLGrammar:
        text = dumped.decode()
        ends, hidden = stops(self.vocabulary, named_ids(text, self.vocabulary.size))
        master = LLMatcher(self._tokenizer(ends), text, log_level=0, limits=_limits(text))
        if master.is_error():
            raise RequestError(_told(master.get_error()))
        meter = Meter() if lark.OWN in text else None
        return LLGrammar(self, dumped, _Raw(master, ends, hidden, meter=meter))

    def _tokenizer(self, ends: frozenset[int]) -> LLTokenizer:
        """End tokens that a grammar names are ordinary special ones within it."""
        if ends not in self._tokenizers:
            wrapped: Any = _Tokens(self.vocabulary, min(ends))
            self._tokenizers[ends] = LLTokenizer(wrapped, eos_token=list(ends))
        return self._tokenizers[ends]

    def fill_all(self, matchers: Sequence[tuple[int, Matcher]], words: Words) -> None:
        """One by one, which is quickest where masks are known; if that drags on, in parallel."""
        assert words.flags["C_CONTIGUOUS"]
        given = [(row, *_parts(matcher)) for row, matcher in matchers]
        at, size = words.ctypes.data, words.shape[1] * words.itemsize
        late = time.perf_counter() + PATIENCE_S
        for done, (row, matcher, raw) in enumerate(given, 1):
            if not matcher.ended and raw.fault is None:
                raw.compute(at + row * size, size)
            if len(given) - done > FEW and time.perf_counter() > late:
                self._fill_rest(given[done:], words)
                given = given[:done]
                break
        self._finish(given, words)

    def _finish(self, given: list[tuple[int, EndingMatcher, _Raw]], words: Words) -> None:
        """See to the ends of masks that llguidance has filled. One that has no bit of an end is as
        it has to be: the text is not whole there, and its matcher has no fault."""
        ends = np.any(words[:, self.ends.where] & self.ends.bits, axis=1)
        for row, matcher, raw in given:
            if matcher.ended or raw.fault is not None:
                words[row] = self.ends.only
            elif ends[row] or raw.hidden is not None or raw.inner.is_error():
                raw.masked(words[row])
                matcher.finish(words[row])

    def _fill_rest(self, given: list[tuple[int, EndingMatcher, _Raw]], words: Words) -> None:
        busy = [one for one in given if one[2].meter is None and not one[1].over]
        if busy:  # of nothing llguidance raises
            self._fill_busy([(raw.inner, row) for row, _, raw in busy], words)
        for row, matcher, raw in given:
            if raw.meter is not None or matcher.over:
                matcher.fill(words[row])
            else:
                raw.masked(words[row])
                matcher.finish(words[row])

    def _fill_busy(self, work: list[tuple[LLMatcher, int]], words: Words) -> None:
        assert words.flags["C_CONTIGUOUS"]
        assert words.shape[1] == self.vocabulary.words
        at, row_bytes, rows = words.ctypes.data, words.shape[1] * 4, words.shape[0]
        self._executor.unsafe_compute_mask_ptr(work, at, row_bytes, rows)


class LLGrammar:
    """A base.Grammar."""

    def __init__(self, compiler: LLGuidance, dumped: bytes, master: _Raw) -> None:
        self.compiler = compiler
        self.size = _BASE_SIZE + _SIZE_PER_BYTE * len(dumped)
        self._dumped = dumped
        self._master = master

    def matcher(self) -> EndingMatcher:
        return EndingMatcher(self._master.twin(), self.compiler.ends)

    def dump(self) -> bytes:
        return self._dumped


@dataclass(slots=True)
class Meter:
    """What the texts of a caller's grammar cost."""

    left: float = OWN_BURST_S

    def take(self, seconds: float, tokens: int = 0) -> None:
        """So much processor time was taken, for so many more tokens."""
        self.left += tokens * OWN_TOKEN_S - seconds

    @property
    def fault(self) -> str | None:
        """Why it may not go on."""
        if self.left > 0:
            return None
        return (
            "the grammar is too ambiguous: each token of this text takes milliseconds; write rules "
            "of which one fits each text: `list ::= item item*`, and not `list ::= list list`"
        )


class _Raw:
    """Over one LLMatcher. stops: what llguidance takes for the end; hidden: one that is none."""

    __slots__ = ("fault", "hidden", "inner", "meter", "stops")

    def __init__(
        self,
        inner: LLMatcher,
        stops: frozenset[int],
        hidden: int | None,
        fault: str | None = None,
        meter: Meter | None = None,
    ) -> None:
        """meter: of a caller's own grammar."""
        self.inner = inner
        self.stops = stops
        self.hidden = hidden
        self.fault = fault
        self.meter = meter

    def take(self, token: int) -> bool:
        if token in self.stops or self.fault is not None:
            return False
        if self.meter is None:
            return self.inner.try_consume_tokens([token]) == 1
        began = time.thread_time()
        taken = self.inner.try_consume_tokens([token]) == 1
        self.meter.take(time.thread_time() - began, tokens=1)
        return taken

    def back(self, tokens: int) -> None:
        if not self.inner.rollback(tokens):
            self.look()

    def mask(self, words: Words) -> None:
        self.compute(words.ctypes.data, words.nbytes)
        self.masked(words)

    def compute(self, at: int, size: int) -> None:
        """Write the mask into memory, as llguidance has it."""
        if self.meter is None:
            self.inner.unsafe_compute_mask_ptr(at, size)
            return
        began = time.thread_time()
        self.inner.unsafe_compute_mask_ptr(at, size)
        self.meter.take(time.thread_time() - began)
        self.fault = self.meter.fault

    def masked(self, words: Words) -> None:
        """See what filling did to it, by whomever it was filled.

        Where nothing can follow llguidance allows the end, be the text whole or not.
        """
        self.look()
        ending = any(words[i // 32] >> i % 32 & 1 for i in self.stops)
        if ending and self.fault is None and not self.inner.is_accepting():
            self.fault = "the grammar has come to where nothing can follow"
        clear(words, self.hidden)

    def look(self) -> None:
        """See whether the last step was too much for it."""
        if self.inner.is_error():
            self.fault = _told(self.inner.get_error())

    def ahead(self, tokens: Sequence[int]) -> int:
        if self.fault is not None:
            return 0
        known = list(tokens)
        for at, token in enumerate(known):
            if token in self.stops:
                known = known[: at if token == self.hidden else at + 1]
                break
        return self.inner.validate_tokens(known)

    def whole(self) -> bool:
        return self.inner.is_accepting()

    def stopped(self) -> bool:
        return self.inner.is_stopped()

    def twin(self) -> _Raw:
        meter = None if self.meter is None else dataclasses.replace(self.meter)
        return _Raw(self.inner.deep_copy(), self.stops, self.hidden, self.fault, meter)


def _parts(matcher: Matcher) -> tuple[EndingMatcher, _Raw]:
    assert isinstance(matcher, EndingMatcher)
    assert isinstance(matcher.raw, _Raw)
    return matcher, matcher.raw


def _drawn(words: Words, chance: random.Random) -> int:
    """A token that the mask allows: any of one of its words."""
    at = int(chance.choice(np.flatnonzero(words)))
    return at * 32 + chance.choice([bit for bit in range(32) if words[at] >> bit & 1])


def _limits(grammar: str) -> LLParserLimits:
    """What it may take. A grammar is a caller's own where lark.OWN says so."""
    return LLParserLimits(
        initial_lexer_fuel=FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=OWN_STEP_ITEMS if lark.OWN in grammar else STEP_ITEMS,
        max_lexer_states=LEXER_STATES,
        max_grammar_size=MOST_SIZE,
        verbose_errors=False,
    )


def _told(error: str) -> str:
    """Its message without places in texts that only we have seen."""
    first = error.strip().split("\n")[0]
    return re.sub(r"^at \d+\(\d+\): ", "", first).removeprefix("failed to compile JSON schema: ")
