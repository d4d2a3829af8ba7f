"""A text that reaches a limit of the lexer, which all matchers of a grammar share."""

import random

import numpy as np
import pytest

from quire.grammar.backends import llguidance_backend
from quire.grammar.backends.llguidance_backend import LLGuidanceCompiler
from quire.grammar.grammar_ast import JsonNode, RegexNode
from tests.pure.grammar import walks

WORDS = "(?:[a-z]{1,20} ?){1,100}"
FORMS = {
    "regex": RegexNode(WORDS),
    "pattern": JsonNode(f'{{"type":"string","pattern":"^{WORDS}$"}}'),
    "multipleOf": JsonNode('{"type":"array","items":{"type":"integer","multipleOf":9973}}'),
}
NUM_TOKENS = 24


@pytest.fixture(params=FORMS)
def grammar(request, monkeypatch):
    """Of a limit that one text does not reach, and several do."""
    monkeypatch.setattr(llguidance_backend, "LEXER_STATES", 700)
    compiler = LLGuidanceCompiler(walks.tokens()[0])
    monkeypatch.setattr(compiler, "_probe", lambda made: None)
    return compiler.compile(FORMS[request.param])


def _extend(matcher, draw, num_tokens):
    words = np.zeros(walks.tokens()[0].mask_words, np.int32)
    for _ in range(num_tokens):
        matcher.fill_bitmask(words)
        if matcher.fault is not None or matcher.is_terminated:
            return
        assert matcher.accept(llguidance_backend._draw_token(words, draw))


@pytest.mark.sampled(3)
def test_texts_do_not_use_up_the_states_of_others(grammar):
    begun = grammar.matcher()
    _extend(begun, random.Random(0), 3)
    for seed in range(1, 40):
        matcher = grammar.matcher()
        _extend(matcher, random.Random(seed), NUM_TOKENS)
        assert matcher.fault is None, seed
    _extend(begun, random.Random(0), 3)
    assert begun.fault is None


def test_a_text_of_which_one_step_needs_too_many_states_has_a_fault(monkeypatch):
    monkeypatch.setattr(llguidance_backend, "LEXER_STATES", 60)
    compiler = LLGuidanceCompiler(walks.tokens()[0])
    monkeypatch.setattr(compiler, "_probe", lambda made: None)
    grammar = compiler.compile(FORMS["regex"])
    matcher = grammar.matcher()
    _extend(matcher, random.Random(1), 400)
    assert "states" in matcher.fault
    assert not matcher.is_complete
    fresh = grammar.matcher()
    _extend(fresh, random.Random(2), 1)
    assert fresh.fault is None
