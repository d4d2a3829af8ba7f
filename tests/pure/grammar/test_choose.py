"""Which backend compiles a form."""

from __future__ import annotations

import pytest

from quire.config.structured_backends import NAMES, canonical_name
from quire.errors import ConfigError, RequestError
from quire.grammar.backends.backend_select import build_compiler, check_backend
from quire.grammar.backends.llguidance_backend import LLGuidanceCompiler
from quire.grammar.grammar_ast import (
    AlternationNode,
    JsonNode,
    LiteralNode,
    RegexNode,
    RepeatNode,
    SequenceNode,
    TaggedTextNode,
    TagNode,
    UntilNode,
)
from tests.grammar_cases import VOCABULARY

INT = JsonNode('{"type": "integer"}')
ANY = JsonNode("true")
TAGS = TaggedTextNode(("<t>",), (TagNode("<t>", INT, "</t>"),))


@pytest.mark.parametrize(
    "form",
    [
        ANY,
        RegexNode(".*"),
        TAGS,
        SequenceNode((UntilNode("</think>"), RegexNode("[ \n]{0,2}"), ANY)),
        SequenceNode((LiteralNode("a"), TAGS, LiteralNode(""))),
        TaggedTextNode(("<t>",), (TagNode("<t>", RegexNode("[^<]*"), "</t>"),)),
        SequenceNode((RegexNode("[a-z]*"), LiteralNode("="), INT)),
        SequenceNode((RegexNode("[a-z]*"), INT)),
        RepeatNode(SequenceNode((INT, RegexNode("x?"))), ","),
        SequenceNode(
            (TaggedTextNode(("<t>",), (TagNode("<t>", INT, "</t>"),), 1, True), LiteralNode("bye"))
        ),
        AlternationNode((INT, SequenceNode((LiteralNode("<think>"), UntilNode("</think>"), INT)))),
    ],
)
def test_forms_whose_parts_have_a_clear_end_are_compiled(form):
    LLGuidanceCompiler(VOCABULARY).compile(form)


@pytest.mark.parametrize(
    "form",
    [
        SequenceNode((TAGS, LiteralNode("bye"))),
        TagNode("a", SequenceNode((TAGS,)), "b"),
        RepeatNode(TAGS, "\n"),
        TaggedTextNode(("<t>",), (TagNode("<t>", RegexNode(".*"), "</t>"),)),
        SequenceNode((RegexNode("[a-z]*"), ANY)),
        AlternationNode((INT, SequenceNode((TAGS, INT)))),
    ],
)
def test_text_without_a_clear_end_that_more_follows_is_refused(form):
    with pytest.raises(RequestError, match="no clear end"):
        LLGuidanceCompiler(VOCABULARY).compile(form)


@pytest.mark.parametrize("name", [*NAMES, "guidance", "xgrammar"])
def test_a_grammar_loads_again_under_every_name(name):
    compiler = build_compiler(name, VOCABULARY)
    made = compiler.compile(INT)
    assert made.compiler.name == "llguidance"
    assert compiler.load(made.dump()).matcher().accept(ord("1"))


def test_the_backend_that_other_engines_default_to_is_an_alias():
    assert canonical_name("xgrammar") == canonical_name("guidance") == "llguidance"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_installed_passes(name):
    check_backend(name)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("grammar", "no backend"),
        ("outlines", "not supported"),
        ("lm-format-enforcer", "not supported"),
        ("lm_format_enforcer", "not supported"),
    ],
)
def test_what_is_not_here_is_refused_with_the_reason(name, told):
    for do in (check_backend, lambda name: build_compiler(name, VOCABULARY)):
        with pytest.raises(ConfigError, match=told):
            do(name)
