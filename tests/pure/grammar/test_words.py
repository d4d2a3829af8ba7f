"""What callers say of the form of a text, as forms."""

import json

import pytest

from quire.core.structured_output_params import StructuredOutputsParams
from quire.errors import RequestError
from quire.grammar.frontends.from_params import (
    StructuredDefaults,
    params_to_constraint,
    params_to_node,
    requested_backend,
)
from quire.grammar.grammar_ast import (
    AlternationNode,
    ChoiceNode,
    JsonNode,
    LiteralNode,
    RegexNode,
    RepeatNode,
    SequenceNode,
    TaggedTextNode,
    TagNode,
    UntilNode,
    UserGrammarNode,
)

OBJECT = JsonNode('{"type":"object"}')
SCHEMA = {"type": "object"}


def asked(**fields):
    return StructuredOutputsParams(**fields)


def tag(**tree):
    return params_to_node(asked(structural_tag=json.dumps(tree)), StructuredDefaults())


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"json": SCHEMA}, OBJECT),
        ({"json": '{ "type": "object" }'}, OBJECT),
        ({"json_object": True}, OBJECT),
        ({"json": {"b": 1, "a": "é"}}, JsonNode('{"b":1,"a":"é"}')),
        ({"json": {}, "disable_any_whitespace": True}, JsonNode("{}", whitespace=False)),
        ({"json": {}, "disable_additional_properties": True}, JsonNode("{}", closed=True)),
        ({"json": {}, "whitespace_pattern": " ?"}, JsonNode("{}", whitespace_pattern=" ?")),
        ({"regex": "a+"}, RegexNode("a+")),
        ({"choice": ["b", "a", "b"]}, ChoiceNode(("b", "a"))),
        ({"grammar": 'root ::= "a"'}, UserGrammarNode('root ::= "a"')),
    ],
)
def test_each_word_has_its_form(fields, wanted):
    assert params_to_node(asked(**fields), StructuredDefaults()) == wanted


def test_the_options_hold_where_the_request_does_not_say():
    house = StructuredDefaults(
        "xgrammar", disable_any_whitespace=True, disable_additional_properties=True
    )
    one = asked(json={})
    assert params_to_node(one, house) == JsonNode("{}", whitespace=False, closed=True)
    assert requested_backend(one, house) == "xgrammar"
    assert requested_backend(asked(json={}, backend="guidance"), house) == "guidance"


@pytest.mark.parametrize("bad", [{"a": object()}, {"a": float("nan")}, {"a": "\ud800"}])
def test_what_is_no_json_is_no_schema(bad):
    with pytest.raises(RequestError) as e:
        params_to_node(asked(json=bad), StructuredDefaults())
    assert e.value.param == "structured_outputs.json"


def test_white_space_belongs_to_json():
    with pytest.raises(RequestError) as e:
        params_to_node(asked(regex="a", whitespace_pattern=" "), StructuredDefaults())
    assert e.value.param == "structured_outputs.whitespace_pattern"


def test_a_constraint_tells_by_the_callers_word():
    assert params_to_constraint(asked(choice=["a"]), StructuredDefaults()).backend == "auto"
    with pytest.raises(RequestError, match="no_such") as e:
        params_to_constraint(asked(choice=["a"], backend="no_such"), StructuredDefaults())
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
    assert tag(**wrapped, triggers=["<f"]) == TaggedTextNode(
        ("<f",), (TagNode("<f>", OBJECT, "</f>"),)
    )


@pytest.mark.parametrize(
    ("tree", "wanted"),
    [
        (const("a"), LiteralNode("a")),
        ({"type": "json_schema", "json_schema": True}, JsonNode("true")),
        ({"type": "regex", "pattern": "a+"}, RegexNode("a+")),
        ({"type": "grammar", "grammar": 'root ::= "a"'}, UserGrammarNode('root ::= "a"')),
        (
            {"type": "sequence", "elements": [const("a"), const("b")]},
            SequenceNode((LiteralNode("a"), LiteralNode("b"))),
        ),
        ({"type": "sequence", "elements": [ANY, const("b")]}, UntilNode("b")),
        (
            {"type": "or", "elements": [const("a"), const("b")]},
            AlternationNode((LiteralNode("a"), LiteralNode("b"))),
        ),
        (TAG, SequenceNode((LiteralNode("<f>"), OBJECT, LiteralNode("</f>")))),
        ({**TAG, "end": ["</f>"]}, SequenceNode((LiteralNode("<f>"), OBJECT, LiteralNode("</f>")))),
        (
            {**TAG, "end": ["</f>", "</g>"]},
            SequenceNode(
                (
                    LiteralNode("<f>"),
                    OBJECT,
                    AlternationNode((LiteralNode("</f>"), LiteralNode("</g>"))),
                )
            ),
        ),
        ({**TAG, "content": ANY}, SequenceNode((LiteralNode("<f>"), UntilNode("</f>")))),
        (
            {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "at_least_one": True},
            TaggedTextNode(("<f",), (TagNode("<f>", OBJECT, "</f>"),), min_tags=1),
        ),
        (
            {"type": "tags_with_separator", "separator": ",", "tags": [TAG]},
            RepeatNode(
                SequenceNode((LiteralNode("<f>"), OBJECT, LiteralNode("</f>"))), ",", 0, None
            ),
        ),
        (
            {"type": "optional", "content": const("a")},
            RepeatNode(LiteralNode("a"), min_count=0, max_count=1),
        ),
        ({"type": "plus", "content": const("a")}, RepeatNode(LiteralNode("a"), min_count=1)),
        ({"type": "star", "content": const("a")}, RepeatNode(LiteralNode("a"), min_count=0)),
        (
            {"type": "repeat", "min": 2, "max": -1, "content": const("a")},
            RepeatNode(LiteralNode("a"), min_count=2),
        ),
        ({"type": "json_schema", "json_schema": True, "style": "json"}, JsonNode("true")),
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
