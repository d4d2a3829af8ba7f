"""The contract of backends, over llguidance; and what is its own."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest

from quire.grammar.backends.llguidance_backend import LLGuidanceCompiler
from quire.grammar.grammar_ast import (
    JsonNode,
    LiteralNode,
    RegexNode,
    SequenceNode,
    TaggedTextNode,
    TagNode,
    UntilNode,
    UserGrammarNode,
)
from quire.grammar.json_schema.rewrite import rewrite_node
from tests import grammar_cases as cases
from tests import grammar_contract as contract
from tests.grammar_cases import CASES, INT, VOCABULARY

pytestmark = pytest.mark.sampled(3)

COMPILER = LLGuidanceCompiler(VOCABULARY)


class TestLLGuidance(contract.Contract):
    compiler = COMPILER


@pytest.mark.parametrize("patience", [0.0, 100.0])
def test_many_are_filled_as_one_by_one(patience, monkeypatch):
    monkeypatch.setattr("quire.grammar.backends.llguidance_backend.SERIAL_FILL_S", patience)
    contract.fills_all_as_one_by_one(COMPILER, [COMPILER.compile(one.form) for one in CASES[:9]])


def test_callers_grammars_alone_are_filled_one_by_one(monkeypatch):
    monkeypatch.setattr("quire.grammar.backends.llguidance_backend.SERIAL_FILL_S", 0.0)
    callers = COMPILER.compile(UserGrammarNode('start: "a" start "b" | "a"'))
    assert callers.matcher().raw.meter is not None
    contract.fills_all_as_one_by_one(COMPILER, [callers] * 12)


# -- what is llguidance's own -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (RegexNode("(?=a)b"), "look-ahead"),
        (RegexNode(r"(a)\1"), "reference"),
        (RegexNode("a("), "regular expression"),
        (JsonNode("{"), "not JSON"),
        (JsonNode("false"), "nsatisfiable"),
        (JsonNode('{"type": "string", "format": "what"}'), "what"),
        (UserGrammarNode("start: what"), "what"),
        (UserGrammarNode('start: "a" %%'), "lexer"),
        (UserGrammarNode('begin: "a"'), "start"),
        (UserGrammarNode("root ::= <what>"), "<what>"),
        (UntilNode(""), "mark"),
        (TaggedTextNode(("<t>",), (TagNode("<x>", LiteralNode(""), ""),)), "none of the triggers"),
        (TaggedTextNode(("<t>",), (), min_tags=1), "none is given"),
    ],
)
def test_what_is_wrong_with_a_form_is_said(form, told):
    contract.refuses(COMPILER, form, told)


def test_a_form_nested_too_deeply_is_refused():
    form = INT
    for _ in range(5000):
        form = SequenceNode((form, INT))
    contract.refuses(COMPILER, form, "nested")


def test_too_much_work_in_one_step_is_refused_when_it_is_compiled(monkeypatch):
    monkeypatch.setattr("quire.grammar.backends.llguidance_backend.STEP_ITEMS", 20)
    many = {f"property{i}": {"type": "string"} for i in range(60)}
    contract.refuses(
        COMPILER, JsonNode(json.dumps({"type": "object", "properties": many})), "too much"
    )


def test_a_matcher_that_runs_out_of_work_has_a_fault_and_is_not_whole(monkeypatch):
    monkeypatch.setattr("quire.grammar.backends.llguidance_backend.USER_STEP_ITEMS", 400)
    monkeypatch.setattr(COMPILER, "_probe", lambda made: None)
    grammar = COMPILER.compile(UserGrammarNode('root ::= s\ns ::= s s s | s s | "a" | "aa"'))
    matcher = grammar.matcher()
    for _ in range(600):
        contract.mask(matcher)
        if matcher.fault is not None or not matcher.accept(ord("a")):
            break
    assert matcher.fault is not None
    assert not matcher.is_complete
    assert matcher.is_terminated
    assert contract.allowed(matcher) == list(VOCABULARY.eos_token_ids)


def _tokens_until_fault(monkeypatch, seconds):
    """On a clock that goes on by so much whenever a matcher does something."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(ticks) * seconds)
    matcher = COMPILER.compile(UserGrammarNode('root ::= "(" root* ")"')).matcher()
    for taken in range(200):
        contract.mask(matcher)
        if matcher.fault is not None:
            return taken, matcher
        assert matcher.accept(ord("("))
    return 200, matcher


def test_a_callers_text_whose_tokens_take_long_has_a_fault_soon(monkeypatch):
    taken, matcher = _tokens_until_fault(monkeypatch, 0.004)
    assert taken < 20
    assert "ambiguous" in matcher.fault
    assert contract.allowed(matcher.copy()) == list(VOCABULARY.eos_token_ids)
    assert not matcher.is_complete


def test_one_whose_tokens_do_not_has_none(monkeypatch):
    taken, _ = _tokens_until_fault(monkeypatch, 0.0009)
    assert taken == 200


def test_only_callers_grammars_are_measured():
    assert COMPILER.compile(INT).matcher().raw.meter is None


def test_a_grammar_that_leads_nowhere_has_a_fault_there(monkeypatch):
    contract.refuses(COMPILER, UserGrammarNode('start: "a" b\nb: b "x"\n'), "too much")
    monkeypatch.setattr(COMPILER, "_probe", lambda made: None)
    matcher = COMPILER.compile(UserGrammarNode('start: "a" b\nb: b "x"\n')).matcher()
    assert matcher.accept(ord("a"))
    assert contract.allowed(matcher) == list(VOCABULARY.eos_token_ids)
    assert matcher.fault is not None
    assert not matcher.is_complete


def test_bits_past_the_vocabulary_are_0():
    compiler = LLGuidanceCompiler(cases.vocabulary(size=1000))
    matcher = compiler.compile(RegexNode("(?s:.*)")).matcher()
    words = np.full(compiler.vocabulary.mask_words, -1, np.int32)
    matcher.fill_bitmask(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert len(bits) == 1024
    assert not bits[len(compiler.vocabulary.tokens) - cases.HOLES :].any()


def test_a_caller_cannot_ask_for_forced_tokens():
    """Forcing loops for ever on this grammar."""
    matcher = COMPILER.compile(
        UserGrammarNode('%llguidance {"no_forcing": false}\nstart: /a*/ "b"')
    ).matcher()
    assert contract.allowed(matcher)


def test_white_space_goes_by_a_pattern_of_the_caller():
    grammar = COMPILER.compile(JsonNode(cases.POINT, whitespace_pattern="[ ]{0,3}"))
    good = cases.Case("", grammar, ['{"a":   1}'], ['{"a":    1}', '{"a":\n1}'])
    contract.takes_good_texts(grammar, good)
    contract.refuses_bad_texts(grammar, good)


def test_objects_of_a_closed_form_hold_what_is_named():
    schema = '{"properties": {"a": {"properties": {"b": true}}}, "type": "object"}'
    grammar = COMPILER.compile(rewrite_node(JsonNode(schema, closed=True)))
    case = cases.Case("", grammar, ['{"a":{"b":1}}', "{}"], ['{"c":1}', '{"a":{"c":1}}'])
    contract.takes_good_texts(grammar, case)
    contract.refuses_bad_texts(grammar, case)
