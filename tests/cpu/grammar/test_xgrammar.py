"""The contract of backends, over xgrammar."""

from __future__ import annotations

import pytest

from quire.grammar.backends import backend_select
from quire.grammar.backends.llguidance_backend import LLGuidanceCompiler
from quire.grammar.backends.xgrammar_backend import XGrammarCompiler
from quire.grammar.grammar_ast import (
    JsonNode,
    LiteralNode,
    RegexNode,
    SequenceNode,
    TaggedTextNode,
    TagNode,
    UserGrammarNode,
)
from tests import grammar_contract as contract
from tests.grammar_cases import CASES, INT, VOCABULARY, Case

COMPILER = XGrammarCompiler(VOCABULARY)
TAGS = TaggedTextNode(("<t>",), (TagNode("<t>", INT, "</t>"),))


class TestXGrammar(contract.Contract):
    compiler = COMPILER

    def test_both_backends_allow_the_same(self, case, grammar, chance):
        if "Json(" in repr(case.form):  # each has ways of its own to write numbers and strings
            return
        other = LLGuidanceCompiler(VOCABULARY).compile(case.form).matcher()
        for matcher, ids in contract.walk(grammar, chance):
            if ids:
                assert other.accept(ids[-1]), ids
            assert contract.allowed(matcher) == contract.allowed(other), ids


def test_many_are_filled_as_one_by_one():
    contract.fills_all_as_one_by_one(COMPILER, [COMPILER.compile(one.form) for one in CASES[:9]])


def test_white_space_by_a_pattern_is_refused_with_who_can():
    contract.refuses(COMPILER, JsonNode("true", whitespace_pattern="[ ]?"), "llguidance")


def test_json_within_lark_is_refused_with_who_can():
    contract.refuses(COMPILER, UserGrammarNode('start: %json {"type": "object"}'), "llguidance")


def test_what_xgrammar_refuses_is_told_without_its_places():
    contract.refuses(COMPILER, UserGrammarNode("start: what"), "xgrammar", "what")


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (
            SequenceNode((TAGS, LiteralNode("bye"))),
            ["bye", "a<t>1</t>bye", "byebye"],
            ["a", "<t>1</t>"],
        ),
        (
            TaggedTextNode(("<t>",), (TagNode("<t>", RegexNode(".*"), "</t>"),)),
            ["<t>a</t>b", "<t></t></t>b"],
            ["<t>"],
        ),
        (SequenceNode((RegexNode("[a-z]*"), JsonNode("true"))), ["true", "abtrue", "ab1"], ["ab"]),
    ],
)
def test_what_only_xgrammar_reads_auto_gives_it(form, good, bad):
    grammar = backend_select.build_compiler("auto", VOCABULARY).compile(form)
    assert grammar.compiler.name == "xgrammar"
    contract.takes_good_texts(grammar, Case("", form, good, bad))
    contract.refuses_bad_texts(grammar, Case("", form, good, bad))
    again = backend_select.build_compiler("auto", VOCABULARY).load(grammar.dump())
    contract.takes_good_texts(again, Case("", form, good, bad))
