"""Which backend compiles a form."""

from __future__ import annotations

import pytest

from quire.errors import ConfigError, RequestError
from quire.grammar.backends.backend_select import (
    NAMES,
    build_compiler,
    check_backend,
    select_backend,
)
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
def test_auto_is_llguidance(form):
    assert select_backend("auto", form).backend == "llguidance"
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
def test_auto_is_xgrammar_where_a_part_has_no_clear_end_and_more_follows(form):
    made = select_backend("auto", form)
    assert made.backend == "xgrammar"
    assert "clear end" in made.reason
    with pytest.raises(RequestError, match="xgrammar"):
        LLGuidanceCompiler(VOCABULARY).compile(form)


def test_a_backend_that_is_asked_for_is_taken():
    assert select_backend("xgrammar", ANY).backend == "xgrammar"
    assert select_backend("guidance", ANY).backend == "llguidance"


def test_a_form_is_compiled_by_the_backend_that_auto_chose_and_loads_again():
    auto = build_compiler("auto", VOCABULARY)
    made = auto.compile(INT)
    assert made.compiler.name == "llguidance"
    assert auto.load(made.dump()).matcher().accept(ord("1"))


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


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install xgrammar"):
        check_backend("xgrammar")
