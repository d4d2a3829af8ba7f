"""Grammars over a vocabulary of single bytes and some marks: texts they accept and generate."""

import random

import numpy as np

from quire.grammar.backends.llguidance_backend import LLGuidanceCompiler
from quire.grammar.frontends import validate
from quire.grammar.grammar_ast import load_node, map_json
from quire.grammar.json_schema.rewrite import rewrite_node
from quire.grammar.vocabulary import SpecialTokenNames, Vocabulary

END = 256


def vocabulary(marks=()):
    special = [(END, "<|the_end|>"), *((END + 1 + i, mark) for i, mark in enumerate(marks))]
    tokens = [bytes([i]) for i in range(256)] + [name.encode() for _, name in special]
    return Vocabulary(tuple(tokens), tuple(special), (END,), len(tokens))


class Trial:
    """A compiled grammar."""

    def __init__(self, grammar, marks=()):
        self.vocabulary = vocabulary(marks)
        self._names = SpecialTokenNames(self.vocabulary)
        count = len(self.vocabulary.tokens)
        self._likely = np.array([i in LIKELY or i > END for i in range(count)])
        checked = map_json(load_node(validate.build_constraint(grammar).form), rewrite_node)
        self._grammar = LLGuidanceCompiler(self.vocabulary).compile(checked)

    def ids(self, text):
        found = []
        for piece in self._names.split(text):
            found += [piece] if isinstance(piece, int) else list(piece.encode())
        return found

    def accepts(self, text):
        """Whether the whole text is allowed, and allowed to end there."""
        return self.taken(text) is None

    def taken(self, text):
        """The allowed part of the text; None: all of it, and to end there."""
        matcher = self._grammar.matcher()
        ids = self.ids(text)
        for place, one in enumerate(ids):
            if not matcher.accept(one):
                return self.text(ids[:place]) + "⟂"
        return None if matcher.is_complete else text + "⟂"

    def text(self, ids):
        tokens = self.vocabulary.tokens
        return b"".join(tokens[i] for i in ids).decode("utf-8", "replace")

    def walk(self, rng, literals=(), most=4000, ends=0.5, begin=""):
        """A random text that the grammar allows; None if it found no end.

        literals: texts that are tried as a whole now and then, so that walks come to an end. ends:
        how likely it ends where it may. begin: what it begins with.
        """
        matcher = self._grammar.matcher()
        ids = self.ids(begin)
        assert all(matcher.accept(one) for one in ids), begin
        words = np.zeros(self.vocabulary.mask_words, np.int32)
        while len(ids) < most:
            if matcher.is_complete and (matcher.is_terminated or rng.random() < ends):
                return self.text(ids)
            if rng.random() < 0.4 and self._try(matcher, rng.choice(literals or ('"',)), ids):
                continue
            matcher.fill_bitmask(words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little").view(bool)
            bits = bits[: len(self._likely)]
            bits[END] = False
            if not bits.any():
                return self.text(ids) if matcher.is_complete else None
            likely = np.flatnonzero(bits & self._likely)
            is_likely = likely.size and rng.random() < 0.95
            one = int(rng.choice(likely if is_likely else np.flatnonzero(bits)))
            assert matcher.accept(one), (self.text(ids), one)
            ids.append(one)
        return None

    def _try(self, matcher, literal, ids):
        taken = []
        for one in self.ids(literal):
            if not matcher.accept(one):
                matcher.rollback(len(taken))
                return False
            taken.append(one)
        ids += taken
        return True


LIKELY = frozenset(b"abcxyz0123456789 \"{}[],:-._<>/'()=\n|") | frozenset("é汉".encode())


def rng(seed):
    return random.Random(seed)
