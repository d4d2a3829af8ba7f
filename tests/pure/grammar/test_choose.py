"""Which backend compiles a form."""

from __future__ import annotations

import pytest

from quire.errors import ConfigError, RequestError
from quire.grammar.choose import NAMES, check, chosen, compiler
from quire.grammar.forms import Either, Json, Regex, Repeat, Seq, Tag, Tags, Text, Until
from quire.grammar.llguidance import LLGuidance
from tests.grammar_cases import VOCABULARY

INT = Json('{"type": "integer"}')
ANY = Json("true")
TAGS = Tags(("<t>",), (Tag("<t>", INT, "</t>"),))


@pytest.mark.parametrize(
    "form",
    [
        ANY,
        Regex(".*"),
        TAGS,
        Seq((Until("</think>"), Regex("[ \n]{0,2}"), ANY)),
        Seq((Text("a"), TAGS, Text(""))),
        Tags(("<t>",), (Tag("<t>", Regex("[^<]*"), "</t>"),)),
        Seq((Regex("[a-z]*"), Text("="), INT)),
        Seq((Regex("[a-z]*"), INT)),
        Repeat(Seq((INT, Regex("x?"))), ","),
        Seq((Tags(("<t>",), (Tag("<t>", INT, "</t>"),), 1, True), Text("bye"))),
        Either((INT, Seq((Text("<think>"), Until("</think>"), INT)))),
    ],
)
def test_auto_is_llguidance(form):
    assert chosen("auto", form).backend == "llguidance"
    LLGuidance(VOCABULARY).compile(form)


@pytest.mark.parametrize(
    "form",
    [
        Seq((TAGS, Text("bye"))),
        Tag("a", Seq((TAGS,)), "b"),
        Repeat(TAGS, "\n"),
        Tags(("<t>",), (Tag("<t>", Regex(".*"), "</t>"),)),
        Seq((Regex("[a-z]*"), ANY)),
        Either((INT, Seq((TAGS, INT)))),
    ],
)
def test_auto_is_xgrammar_where_a_part_has_no_clear_end_and_more_follows(form):
    made = chosen("auto", form)
    assert made.backend == "xgrammar"
    assert "clear end" in made.why
    with pytest.raises(RequestError, match="xgrammar"):
        LLGuidance(VOCABULARY).compile(form)


def test_a_backend_that_is_asked_for_is_taken():
    assert chosen("xgrammar", ANY).backend == "xgrammar"
    assert chosen("guidance", ANY).backend == "llguidance"


def test_a_form_is_compiled_by_the_backend_that_auto_chose_and_loads_again():
    auto = compiler("auto", VOCABULARY)
    made = auto.compile(INT)
    assert made.compiler.name == "llguidance"
    assert auto.load(made.dump()).matcher().accept(ord("1"))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_installed_passes(name):
    check(name)


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
    for do in (check, lambda name: compiler(name, VOCABULARY)):
        with pytest.raises(ConfigError, match=told):
            do(name)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install xgrammar"):
        check("xgrammar")
