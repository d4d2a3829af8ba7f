"""What callers say of the form of a text, as forms."""

import json

import pytest

from quire.core.structured import StructuredOutputsParams
from quire.errors import RequestError
from quire.grammar.forms import (
    Choice,
    Either,
    Grammar,
    Json,
    Regex,
    Repeat,
    Seq,
    Tag,
    Tags,
    Text,
    Until,
)
from quire.grammar.words import House, backend, constraint, form

OBJECT = Json('{"type":"object"}')
SCHEMA = {"type": "object"}


def asked(**fields):
    return StructuredOutputsParams(**fields)


def tag(**tree):
    return form(asked(structural_tag=json.dumps(tree)), House())


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"json": SCHEMA}, OBJECT),
        ({"json": '{ "type": "object" }'}, OBJECT),
        ({"json_object": True}, OBJECT),
        ({"json": {"b": 1, "a": "é"}}, Json('{"b":1,"a":"é"}')),
        ({"json": {}, "disable_any_whitespace": True}, Json("{}", whitespace=False)),
        ({"json": {}, "disable_additional_properties": True}, Json("{}", closed=True)),
        ({"json": {}, "whitespace_pattern": " ?"}, Json("{}", spacing=" ?")),
        ({"regex": "a+"}, Regex("a+")),
        ({"choice": ["b", "a", "b"]}, Choice(("b", "a"))),
        ({"grammar": 'root ::= "a"'}, Grammar('root ::= "a"')),
    ],
)
def test_each_word_has_its_form(fields, wanted):
    assert form(asked(**fields), House()) == wanted


def test_the_options_hold_where_the_request_does_not_say():
    house = House("xgrammar", disable_any_whitespace=True, disable_additional_properties=True)
    one = asked(json={})
    assert form(one, house) == Json("{}", whitespace=False, closed=True)
    assert backend(one, house) == "xgrammar"
    assert backend(asked(json={}, backend="guidance"), house) == "guidance"


@pytest.mark.parametrize("bad", [{"a": object()}, {"a": float("nan")}, {"a": "\ud800"}])
def test_what_is_no_json_is_no_schema(bad):
    with pytest.raises(RequestError) as e:
        form(asked(json=bad), House())
    assert e.value.param == "structured_outputs.json"


def test_white_space_belongs_to_json():
    with pytest.raises(RequestError) as e:
        form(asked(regex="a", whitespace_pattern=" "), House())
    assert e.value.param == "structured_outputs.whitespace_pattern"


def test_a_constraint_tells_by_the_callers_word():
    assert constraint(asked(choice=["a"]), House()).backend == "auto"
    with pytest.raises(RequestError, match="no_such") as e:
        constraint(asked(choice=["a"], backend="no_such"), House())
    assert e.value.param == "structured_outputs.choice"


# -- structural tags ------------------------------------------------------------------------------

F = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}
TAG = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</f>",
}
ANY = {"type": "any_text"}


def const(text):
    return {"type": "const_string", "value": text}


@pytest.mark.parametrize(
    "wrapped", [{"structures": [F]}, {"type": "structural_tag", "structures": [F]}]
)
def test_the_older_way_is_tags_behind_triggers(wrapped):
    assert tag(**wrapped, triggers=["<f"]) == Tags(("<f",), (Tag("<f>", OBJECT, "</f>"),))


@pytest.mark.parametrize(
    ("tree", "wanted"),
    [
        (const("a"), Text("a")),
        ({"type": "json_schema", "json_schema": True}, Json("true")),
        ({"type": "regex", "pattern": "a+"}, Regex("a+")),
        ({"type": "grammar", "grammar": 'root ::= "a"'}, Grammar('root ::= "a"')),
        ({"type": "sequence", "elements": [const("a"), const("b")]}, Seq((Text("a"), Text("b")))),
        ({"type": "sequence", "elements": [ANY, const("b")]}, Until("b")),
        ({"type": "or", "elements": [const("a"), const("b")]}, Either((Text("a"), Text("b")))),
        (TAG, Seq((Text("<f>"), OBJECT, Text("</f>")))),
        ({**TAG, "end": ["</f>"]}, Seq((Text("<f>"), OBJECT, Text("</f>")))),
        (
            {**TAG, "end": ["</f>", "</g>"]},
            Seq((Text("<f>"), OBJECT, Either((Text("</f>"), Text("</g>"))))),
        ),
        ({**TAG, "content": ANY}, Seq((Text("<f>"), Until("</f>")))),
        (
            {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "at_least_one": True},
            Tags(("<f",), (Tag("<f>", OBJECT, "</f>"),), least=1),
        ),
        (
            {"type": "tags_with_separator", "separator": ",", "tags": [TAG]},
            Repeat(Seq((Text("<f>"), OBJECT, Text("</f>"))), ",", 0, None),
        ),
        ({"type": "optional", "content": const("a")}, Repeat(Text("a"), least=0, most=1)),
        ({"type": "plus", "content": const("a")}, Repeat(Text("a"), least=1)),
        ({"type": "star", "content": const("a")}, Repeat(Text("a"), least=0)),
        (
            {"type": "repeat", "min": 2, "max": -1, "content": const("a")},
            Repeat(Text("a"), least=2),
        ),
        ({"type": "json_schema", "json_schema": True, "style": "json"}, Json("true")),
    ],
)
def test_each_format_of_a_tree_has_its_form(tree, wanted):
    assert tag(type="structural_tag", format=tree) == wanted


@pytest.mark.parametrize(
    ("tree", "pointer"),
    [
        ({"type": "x"}, "/format/type"),
        ({}, "/format"),
        (5, "/format"),
        ({"type": "const_string"}, "/format"),
        ({"type": "sequence", "elements": [const("a"), {"type": "tag"}]}, "/format/elements/1"),
        ({"type": "sequence", "elements": []}, "/format/elements"),
        ({"type": "sequence", "elements": [ANY, TAG]}, "/format/elements/1"),
        ({"type": "any_text", "excludes": ["a"]}, "/format/excludes"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "/format/style"),
        ({**TAG, "content": ANY, "end": ["a", "b"]}, "/format/end"),
        ({"type": "repeat", "min": 2, "max": 1, "content": const("a")}, "/format/max"),
        ({"type": "repeat", "min": True, "max": 1, "content": const("a")}, "/format/min"),
        ({"type": "triggered_tags", "triggers": ["<g"], "tags": [TAG]}, "/format/triggers"),
        (
            {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "at_least_one": 1},
            "/format/at_least_one",
        ),
    ],
)
def test_what_is_wrong_with_a_tree_is_told_with_its_place(tree, pointer):
    with pytest.raises(RequestError) as e:
        tag(type="structural_tag", format=tree)
    assert f" at {pointer}" in str(e.value)
    assert e.value.param == "structured_outputs.structural_tag"


@pytest.mark.parametrize("tree", [{}, {"type": "structural_tag"}, {"structures": [F]}])
def test_a_structural_tag_says_something(tree):
    with pytest.raises(RequestError):
        tag(**tree)
