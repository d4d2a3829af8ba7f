"""Backend over llguidance: compiles Lark text, and wraps matchers that never raise.

Fuel bounds the work of one step; a matcher that uses it up enters an error state and has a `fault`.
All matchers of a grammar share one lexer. When the lexer reaches a limit, each of them continues
with a new one, so only a text that reaches the limit alone has a fault.
Compiling and filling masks release the GIL.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from quire.errors import RequestError
from quire.grammar.backends import emit_lark
from quire.grammar.backends.base import MaskWords, Matcher
from quire.grammar.backends.eos_matcher import EosMask, EosMatcher, clear_bit, stop_tokens_of
from quire.grammar.frontends.user_lark import referenced_token_ids
from quire.grammar.grammar_ast import GrammarNode
from quire.grammar.vocabulary import SpecialTokenNames, Vocabulary

MAX_SIZE = 500_000
"""Symbols of a grammar."""
FUEL = 5_000_000
"""For the expressions of a grammar, when it is compiled: about 100 ms."""
STEP_FUEL = 1_000_000
"""For those that one step meets: about 70 ms, once for each state."""
STEP_ITEMS = 200_000
"""Of the parser, in one step: an object of 500 optional properties takes half of them, 8 ms."""
USER_STEP_ITEMS = 2_000
"""The same for grammars that callers write: ambiguous ones take 70 ms for so many."""
USER_BURST_S = 0.1
USER_SECONDS_PER_TOKEN = 0.002
"""Processor time that a text of such a grammar may take at first, and for each token: of one that
is ambiguous through and through the hundredth takes 10 ms, and all that runs beside it waits."""
LEXER_STATES = 50_000
"""Of one grammar, 1 to 2 kB each."""
NUM_PROBES = 2
PROBE_TOKENS = 48
SERIAL_FILL_S = 0.001
"""So long masks are filled by the calling thread: a known one takes 5 us, and waking others up to
some ms where the machine is busy."""
MIN_PARALLEL_FILLS = 2
_BASE_SIZE = 650_000
"""Measured over many small schemas, after use."""
_SIZE_PER_BYTE = 60


class _TokenizerAdapter:
    """The tokenizer interface of llguidance."""

    def __init__(self, vocabulary: Vocabulary, end: int) -> None:
        missing = vocabulary.size - len(vocabulary.tokens)
        # it writes special tokens behind a byte that no text has, and would let that one through
        known = (b"" if b"\xff" in token else token for token in vocabulary.tokens)
        self.tokens = [*known, *([b""] * missing)]
        self.special_token_ids = [i for i, _ in vocabulary.special_tokens]
        self.eos_token_id = end
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        """Only for tokens that are forced, which no grammar here has."""
        return []


class LLGuidanceCompiler:
    """A base.Compiler."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.eos = EosMask(vocabulary)
        self._names = SpecialTokenNames(vocabulary)
        self._tokenizers: dict[frozenset[int], LLTokenizer] = {}
        self._executor = LLExecutor()

    def compile(self, form: GrammarNode) -> LLGuidanceGrammar:
        """The form's grammar. Raises RequestError."""
        try:
            grammars = emit_lark.emit_lark(form, self._names)
        except RecursionError:
            raise RequestError("the form is nested too deeply") from None
        made = self.load(json.dumps({"grammars": grammars}).encode())
        self._probe(made)
        return made

    def _probe(self, made: LLGuidanceGrammar) -> None:
        """Walk some way through it: what is too much for a step shows here, and not in the loop."""
        words = np.zeros(self.vocabulary.mask_words, np.int32)
        chance = random.Random(0)
        for _ in range(NUM_PROBES):
            matcher = made.matcher()
            for _ in range(PROBE_TOKENS):
                matcher.fill_bitmask(words)
                if matcher.is_terminated and matcher.fault is None:
                    break
                if matcher.fault or not matcher.accept(_draw_token(words, chance)):
                    fault = matcher.fault or "a token that is allowed cannot be taken"
                    raise RequestError(f"the form takes too much work: {fault}")

    def load(self, dumped: bytes) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(self, dumped)

    def new_matcher(self, text: str, eos: frozenset[int]) -> LLMatcher:
        """A matcher with a lexer of its own. Raises RequestError."""
        made = LLMatcher(self._tokenizer(eos), text, log_level=0, limits=_limits(text))
        if made.is_error():
            raise RequestError(_user_message(made.get_error()))
        return made

    def _tokenizer(self, ends: frozenset[int]) -> LLTokenizer:
        """End tokens that a grammar names are ordinary special ones within it."""
        if ends not in self._tokenizers:
            wrapped: Any = _TokenizerAdapter(self.vocabulary, min(ends))
            self._tokenizers[ends] = LLTokenizer(wrapped, eos_token=list(ends))
        return self._tokenizers[ends]

    def fill_bitmasks(self, matchers: Sequence[tuple[int, Matcher]], words: MaskWords) -> None:
        """One by one, which is quickest where masks are known; if that drags on, in parallel."""
        assert words.flags["C_CONTIGUOUS"]
        given = [(row, *_unwrap(matcher)) for row, matcher in matchers]
        at, size = words.ctypes.data, words.shape[1] * words.itemsize
        late = time.perf_counter() + SERIAL_FILL_S
        for done, (row, matcher, raw) in enumerate(given, 1):
            if not matcher.num_eos and raw.fault is None:
                raw.compute_mask(at + row * size, size)
            if len(given) - done > MIN_PARALLEL_FILLS and time.perf_counter() > late:
                self._fill_rest(given[done:], words)
                given = given[:done]
                break
        self._finish_masks(given, words)

    def _finish_masks(
        self, given: list[tuple[int, EosMatcher, _LLGuidanceRawMatcher]], words: MaskWords
    ) -> None:
        """See to the ends of masks that llguidance has filled. One that has no bit of an end is as
        it has to be: the text is not whole there, and its matcher has no fault."""
        eos = np.any(words[:, self.eos.word_indices] & self.eos.bits, axis=1)
        for row, matcher, raw in given:
            if matcher.num_eos or raw.fault is not None:
                words[row] = self.eos.mask
            elif eos[row] or raw.hidden is not None or raw.inner.is_error():
                raw.after_fill(words[row])
                matcher.add_eos_bits(words[row])

    def _fill_rest(
        self, given: list[tuple[int, EosMatcher, _LLGuidanceRawMatcher]], words: MaskWords
    ) -> None:
        busy = [one for one in given if one[2].meter is None and not one[1].is_terminated]
        if busy:  # of nothing llguidance raises
            self._fill_parallel([(raw.inner, row) for row, _, raw in busy], words)
        for row, matcher, raw in given:
            if raw.meter is not None or matcher.is_terminated:
                matcher.fill_bitmask(words[row])
            else:
                raw.after_fill(words[row])
                matcher.add_eos_bits(words[row])

    def _fill_parallel(self, work: list[tuple[LLMatcher, int]], words: MaskWords) -> None:
        assert words.flags["C_CONTIGUOUS"]
        assert words.shape[1] == self.vocabulary.mask_words
        at, row_bytes, rows = words.ctypes.data, words.shape[1] * 4, words.shape[0]
        self._executor.unsafe_compute_mask_ptr(work, at, row_bytes, rows)


class LLGuidanceGrammar:
    """A base.Grammar."""

    def __init__(self, compiler: LLGuidanceCompiler, dumped: bytes) -> None:
        """Raises RequestError."""
        self.compiler = compiler
        self.size = _BASE_SIZE + _SIZE_PER_BYTE * len(dumped)
        self._text = dumped.decode()
        self.stop_tokens, self.hidden = stop_tokens_of(
            compiler.vocabulary, referenced_token_ids(self._text, compiler.vocabulary.size)
        )
        self.is_user_grammar = emit_lark.USER_GRAMMAR_MARKER in self._text
        self._prototype = compiler.new_matcher(self._text, self.stop_tokens)
        self._lock = threading.Lock()

    def matcher(self) -> EosMatcher:
        return EosMatcher(_LLGuidanceRawMatcher(self), self.compiler.eos)

    def dump(self) -> bytes:
        return self._text.encode()

    def new_inner(self) -> LLMatcher:
        """A matcher at the start of a text, over a lexer that has reached no limit."""
        with self._lock:
            made = self._prototype.deep_copy()
            made.compute_bitmask()  # an error of the lexer shows in a step only
            if made.is_error():
                self._prototype = self.compiler.new_matcher(self._text, self.stop_tokens)
            return self._prototype.deep_copy()


@dataclass(slots=True)
class FuelMeter:
    """Counts the work of the texts of a client's grammar."""

    left: float = USER_BURST_S

    def spend(self, seconds: float, tokens: int = 0) -> None:
        """So much processor time was taken, for so many more tokens."""
        self.left += tokens * USER_SECONDS_PER_TOKEN - seconds

    @property
    def fault(self) -> str | None:
        """Why it may not continue."""
        if self.left > 0:
            return None
        return (
            "the grammar is too ambiguous: each token of this text takes milliseconds; write rules "
            "of which one fits each text: `list ::= item item*`, and not `list ::= list list`"
        )


class _LLGuidanceRawMatcher:
    """Over one LLMatcher."""

    __slots__ = ("_grammar", "_restarted_at", "_tokens", "fault", "inner", "meter")

    def __init__(self, grammar: LLGuidanceGrammar) -> None:
        """At the start of a text."""
        self._grammar = grammar
        self.inner = grammar.new_inner()
        self.fault: str | None = None
        self.meter = FuelMeter() if grammar.is_user_grammar else None
        self._tokens: list[int] = []
        self._restarted_at: int | None = None
        """Number of tokens at which a new lexer was taken last."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end a text for llguidance."""
        return self._grammar.stop_tokens

    @property
    def hidden(self) -> int | None:
        """The stop token that is no end token of the model."""
        return self._grammar.hidden

    def accept(self, token: int) -> bool:
        if token in self.stop_tokens or self.fault is not None:
            return False
        began = 0.0 if self.meter is None else time.thread_time()
        taken = self.inner.try_consume_tokens([token]) == 1
        if not taken and self.inner.is_error() and self._restart():
            taken = self.inner.try_consume_tokens([token]) == 1
        if self.meter is not None:
            self.meter.spend(time.thread_time() - began, tokens=1)
        if taken:
            self._tokens.append(token)
        return taken

    def rollback(self, tokens: int) -> None:
        del self._tokens[len(self._tokens) - tokens :]
        if not self.inner.rollback(tokens):
            self.check_limits()

    def fill_mask(self, words: MaskWords) -> None:
        self.compute_mask(words.ctypes.data, words.nbytes)
        self.after_fill(words)

    def compute_mask(self, at: int, size: int) -> None:
        """Write the mask into memory, as llguidance has it."""
        if self.meter is None:
            self.inner.unsafe_compute_mask_ptr(at, size)
            return
        began = time.thread_time()
        self.inner.unsafe_compute_mask_ptr(at, size)
        self.meter.spend(time.thread_time() - began)
        self.fault = self.meter.fault

    def after_fill(self, words: MaskWords) -> None:
        """Inspect the mask after it was filled, by this matcher or in a batch.

        Where nothing can follow llguidance allows the end, be the text whole or not.
        """
        if self.inner.is_error() and self._restart():
            self.compute_mask(words.ctypes.data, words.nbytes)
        self.check_limits()
        ending = any(words[i // 32] >> i % 32 & 1 for i in self.stop_tokens)
        if ending and self.fault is None and not self.inner.is_accepting():
            self.fault = "the grammar has come to where nothing can follow"
        clear_bit(words, self.hidden)

    def check_limits(self) -> None:
        """See whether the last step was too much for it."""
        if self.inner.is_error() and self.fault is None:
            self.fault = _user_message(self.inner.get_error())

    def _restart(self) -> bool:
        """Follow the same tokens with a new lexer. False: the text needs too much by itself."""
        is_shared = self.inner.get_error().startswith("lexer error")
        if not is_shared or self._restarted_at == len(self._tokens):
            return False
        self._restarted_at = len(self._tokens)
        inner = self._grammar.new_inner()
        if inner.try_consume_tokens(self._tokens) != len(self._tokens):
            return False
        self.inner = inner
        return True

    def count_accepted(self, tokens: Sequence[int]) -> int:
        if self.fault is not None:
            return 0
        known = list(tokens)
        for at, token in enumerate(known):
            if token in self.stop_tokens:
                known = known[: at if token == self.hidden else at + 1]
                break
        return self.inner.validate_tokens(known)

    def is_complete(self) -> bool:
        return self.inner.is_accepting()

    def is_terminated(self) -> bool:
        return self.inner.is_stopped()

    def copy(self) -> _LLGuidanceRawMatcher:
        made = copy.copy(self)
        made.inner = self.inner.deep_copy()
        made.meter = None if self.meter is None else dataclasses.replace(self.meter)
        made._tokens = self._tokens.copy()
        return made


def _unwrap(matcher: Matcher) -> tuple[EosMatcher, _LLGuidanceRawMatcher]:
    assert isinstance(matcher, EosMatcher)
    assert isinstance(matcher.raw, _LLGuidanceRawMatcher)
    return matcher, matcher.raw


def _draw_token(words: MaskWords, chance: random.Random) -> int:
    """A token that the mask allows: any of one of its words."""
    at = int(chance.choice(np.flatnonzero(words)))
    return at * 32 + chance.choice([bit for bit in range(32) if words[at] >> bit & 1])


def _limits(grammar: str) -> LLParserLimits:
    """Limits of a grammar, lower where it contains one of a caller."""
    return LLParserLimits(
        initial_lexer_fuel=FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=USER_STEP_ITEMS if emit_lark.USER_GRAMMAR_MARKER in grammar else STEP_ITEMS,
        max_lexer_states=LEXER_STATES,
        max_grammar_size=MAX_SIZE,
        verbose_errors=False,
    )


def _user_message(error: str) -> str:
    """Its message without places in texts that only we have seen."""
    first = error.strip().split("\n")[0]
    if first.startswith("lexer error: too many"):
        return "a pattern or a count of the form makes too many states: use a smaller one"
    return re.sub(r"^at \d+\(\d+\): ", "", first).removeprefix("failed to compile JSON schema: ")
