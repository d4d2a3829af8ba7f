"""Grammars that callers write in EBNF, and Lark text before a backend reads it."""

from __future__ import annotations

import json
import time

import pytest

from quire.errors import RequestError
from quire.grammar.automata import dfa, regex_ast
from quire.grammar.frontends import ebnf, user_lark, validate
from quire.grammar.grammar_ast import UserGrammarNode
from quire.grammar.vocabulary import SpecialTokenNames
from tests.grammar_cases import IDS, VOCABULARY
from tests.pure.grammar import walks

NAMES = SpecialTokenNames(VOCABULARY)


def node(text: str) -> regex_ast.RegexExpr:
    made = ebnf.EbnfGrammar(text, 1000).to_regex(ebnf.RuleRef("root"))
    assert made is not None
    return made


@pytest.mark.parametrize(
    "text", ["root ::= x", "  root::=x", "# so\nroot ::= a", "a-b ::= x\nroot ::= a-b"]
)
def test_ebnf_is_told_from_lark_by_how_it_defines(text):
    assert ebnf.is_ebnf(text)


@pytest.mark.parametrize("text", ["start: x", 'start: "a ::= b"', "// root ::= x\nstart: A", ""])
def test_lark_is_no_ebnf(text):
    assert not ebnf.is_ebnf(text)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ("root ::= \"a\" | 'b'", ["a", "b"], ["", "ab"]),
        ("root ::= [a-c] [^a-c\\n]", ["ax", "b\t"], ["aa", "a\n", "a"]),
        ("root ::= [\\]\\-x^]", ["]", "-", "x", "^"], ["\\", "a"]),
        ("root ::= [-a]", ["-", "a"], ["b"]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\n\\"\\\\"', ['Aé😀\n"\\'], ["A"]),
        ('root ::= ("a" "b"?){2,3} "c"*', ["aa", "abaab", "aacc"], ["a", "aaaa"]),
        ('root ::= "a"{2} "b"{1,}', ["aab", "aabbb"], ["ab", "aa"]),
        ("root ::= .", ["x", "日"], ["", "\n", "xx"]),
        ('root ::= "a" # no\n  | b\n\nb ::=\n "b"', ["a", "b"], ["no"]),
        ('root ::= | "a"', ["", "a"], ["b"]),
    ],
)
def test_an_expression_means_what_is_written(text, good, bad):
    assert all(dfa.fully_matches(node(text), one) for one in good)
    assert not any(dfa.fully_matches(node(text), one) for one in bad)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ("root ::= [ab] | [ab] root", ["a", "abba"], ["", "c"]),
        ("root ::= [ab] root?", ["a", "abba"], ["", "c"]),
        ('root ::= "" | "a" root', ["", "aa"], ["b"]),
        ('root ::= "x" | root "a" | root "b"', ["x", "xab"], ["", "a", "ax"]),
        ('root ::= root | "x" | "a" "b" root', ["x", "ababx"], ["abx"[:2], "ax"]),
        ('root ::= "<" x ">"\nx ::= [a-z] | [a-z] x', ["<a>", "<abc>"], ["<>", "a"]),
        ('root ::= "a" y\ny ::= ("b" | "c") y | "." | ","', ["a.", "abcb,"], ["a", "ab"]),
    ],
)
def test_a_rule_that_ends_or_begins_with_itself_is_a_repetition(text, good, bad):
    assert all(dfa.fully_matches(node(text), one) for one in good)
    assert not any(dfa.fully_matches(node(text), one) for one in bad)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "(" root ")" | "x"',
        'root ::= root "+" root | "x"',
        'root ::= "a" root "b"?',
        'root ::= " "* "(" root ")" | "x"? "z" root "u"',
    ],
)
def test_other_recursion_stays(text):
    text += ' | "y"'
    assert ebnf.EbnfGrammar(text, 1000).to_regex(ebnf.RuleRef("root")) is None


def test_what_is_recursive_or_has_tokens_is_not_regular():
    rules = ebnf.EbnfGrammar('root ::= "(" root ")" | x\nx ::= <think> y\ny ::= "a"', 1000)
    assert [rules.to_regex(ebnf.RuleRef(name)) is None for name in ("root", "x", "y")] == [
        True,
        True,
        False,
    ]


def test_what_would_be_too_long_an_expression_is_left_as_rules():
    doubled = "\n".join(f"a{n} ::= a{n + 1} a{n + 1}" for n in range(40))
    rules = ebnf.EbnfGrammar(f'root ::= a0\n{doubled}\na40 ::= "x"', 1000)
    assert rules.to_regex(ebnf.RuleRef("root")) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('a ::= "x"', "no rule `root`"),
        ("root ::= b", "`b`, which is not a rule"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a" )', "part too many"),
        ('root ::= "a', "something that is not EBNF"),
        ("root ::= [a", "something that is not EBNF"),
        ('root ::= "a"{3,2}', "count"),
        ("root ::= [z-a]", "backwards"),
        ('root ::= "\\ud800"', "not a character"),
        ('root ::= "x" root', "ever ends"),
        ('root ::= a\na ::= b | a "x"\nb ::= a', "ever ends"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "groups within"),
        ('root ::= e root "a" | "a"\ne ::= ""', "`root` comes back to itself behind"),
        ('root ::= "x"? a\na ::= [0-9]* root "b" | "b"', "comes back to itself behind"),
        ('root ::= "' + "x" * 300_000 + '"', "characters"),
    ],
)
def test_what_is_wrong_is_said(text, told):
    with pytest.raises(RequestError, match=told.replace("(", r"\(")):
        ebnf.EbnfGrammar(text, 1000)


def test_names_of_special_tokens_in_lark_become_ids():
    text = user_lark.prepare_user_lark('start: <think> "<think>" /<think>/ // <think>\n', NAMES, "")
    assert text == f'start: <[{IDS["<think>"]}]> "<think>" /<think>/ // <think>\n'


def test_an_unknown_special_token_is_refused():
    with pytest.raises(RequestError, match="<what>"):
        user_lark.prepare_user_lark("start: <what>", NAMES, "")


def test_json_in_lark_gets_bounds_for_its_white_space_where_it_sets_none():
    made = user_lark.prepare_user_lark(
        'start: %json {"type": "object"} "%json {"', NAMES, "[ ]{1,2}"
    )
    schema = json.loads(made.removeprefix("start: %json ").removesuffix(' "%json {"'))
    assert schema == {"x-guidance": {"whitespace_pattern": "[ ]{1,2}"}, "type": "object"}
    kept = '{"x-guidance": {"whitespace_flexible": false}}'
    assert json.loads(
        user_lark.prepare_user_lark(f"start: %json {kept}", NAMES, "x")[13:]
    ) == json.loads(kept)


def test_json_in_lark_that_is_none_is_refused():
    with pytest.raises(RequestError, match="JSON"):
        user_lark.prepare_user_lark("start: %json {]", NAMES, "")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a <[3]> <[5-7]>", {3, 5, 6, 7}),
        ("<[1,4-5]>", {1, 4, 5}),
        ("<[^1]>", {0, 2, 3, 4, 5, 6, 7, 8, 9}),
        ("<[*]>", set(range(10))),
        ("<[x]> <a>", set()),
    ],
)
def test_ids_that_a_grammar_names_are_found(text, named):
    assert user_lark.referenced_token_ids(text, 10) == named


def test_thousands_of_rules_in_a_row_are_read_soon():
    chain = "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(3000))
    began = time.process_time()
    rules = ebnf.EbnfGrammar(f'{chain}\nr3000 ::= "b"\nroot ::= r0', 1000)
    assert len(rules.by_name) == 3002
    assert time.process_time() - began < 5, "it takes time by the square of their number"


@pytest.mark.parametrize(
    ("text", "may_be_cut_off"),
    [
        ('root ::= item{300}\nitem ::= [a-z]{1,400} " "', False),
        ('root ::= [a-z]{1,4000}\nother ::= "(" other ")" | "x"', False),
        ('root ::= "(" root ")" | [a-z]{1,4000}', True),
        ("root ::= [a-z]{1,4000} <|end|>", True),
        ("start: /[a-z]{1,4000}/", True),
    ],
)
def test_only_recursive_grammars_and_those_of_tokens_may_be_cut_off(text, may_be_cut_off):
    assert ebnf.may_be_cut_off(text) == may_be_cut_off


def test_a_grammar_without_recursion_that_is_too_large_to_complete_is_refused():
    constraint = validate.build_constraint(
        UserGrammarNode('root ::= item{300}\nitem ::= [a-z]{1,400} " "')
    )
    with pytest.raises(RequestError, match="no short text"):
        walks.service().compile(constraint.form, constraint.backend)
