"""What forms may be asked for."""

import json

import pytest

from quire.core.constraint import Constraint
from quire.errors import RequestError
from quire.grammar import grammar_ast
from quire.grammar.frontends import validate
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
    UserGrammarNode,
)
from quire.grammar.grammar_ast import UntilNode as UntilMark
from quire.grammar.json_schema import lowering, rewrite
from quire.grammar.json_schema.document import UnsupportedSchema
from tests.pure.grammar import walks

MANY = json.dumps({"oneOf": [{"properties": {f"k{n}": {"type": "integer"}}} for n in range(60)]})
OBJECT = '{"type":"object","properties":{"a":{"type":"integer"}}}'


def test_a_constraint_is_the_form_and_the_backend():
    given = walks.json_node({"type": "object", "properties": {"a": {"const": 1}}})
    made = validate.build_constraint(given, "guidance")
    assert isinstance(made, Constraint)
    assert made.backend == "llguidance"
    assert grammar_ast.load_node(made.form) == given


def test_schemas_within_forms_are_checked_here_and_rewritten_elsewhere(monkeypatch):
    """What takes more than linear time runs in compile workers."""
    monkeypatch.setattr(rewrite, "SchemaWriter", None)
    tags = TaggedTextNode(("<f",), (TagNode("<f>", JsonNode('{"const":3}'), "</f>"),))
    form = SequenceNode((LiteralNode("<a>"), AlternationNode((RepeatNode(JsonNode(MANY)), tags))))
    assert grammar_ast.load_node(validate.build_constraint(form).form) == form
    for bad in ('{"type":5}', '{"$ref":"http://x/y"}', '{"minItems":-1}'):
        with pytest.raises(UnsupportedSchema):
            validate.build_constraint(RepeatNode(JsonNode(bad)))


def test_closed_objects_are_written_so():
    node = rewrite.rewrite_node(JsonNode(OBJECT, closed=True))
    assert not node.closed
    assert json.loads(node.schema)["additionalProperties"] is False
    assert "patternProperties" not in json.loads(node.schema)


@pytest.mark.parametrize(
    "form",
    [
        *(
            RegexNode(""),
            RegexNode("(?=a)"),
            RegexNode("a\0"),
            RegexNode("a" * 20_000),
            RegexNode("(a{1,1000}){1,1000}"),
            RegexNode("(?:[a-z]{1,40} ?){1,400}"),
        ),
        *(
            ChoiceNode(()),
            ChoiceNode(("a\0",)),
            ChoiceNode(("x",) * 10_001),
            ChoiceNode(("y" * 300_000,)),
        ),
        *(
            UserGrammarNode(""),
            UserGrammarNode("root ::= " + "(" * 300),
            UserGrammarNode("a" * 300_000),
            UserGrammarNode("\0"),
        ),
        *(
            JsonNode("{"),
            JsonNode("[]"),
            JsonNode('"x"'),
            JsonNode('{"type":5}'),
            JsonNode(OBJECT, whitespace_pattern="x"),
        ),
        *(
            JsonNode(OBJECT, whitespace_pattern="("),
            AlternationNode(()),
            UntilMark(""),
            LiteralNode("a\0"),
            LiteralNode("\ud83d"),
        ),
        *(
            RepeatNode(LiteralNode("a"), min_count=3, max_count=2),
            RepeatNode(LiteralNode("a"), max_count=10**6),
            RepeatNode(LiteralNode("a"), min_count=-1),
        ),
        *(
            TaggedTextNode((), (TagNode("<", LiteralNode("a"), ">"),)),
            TaggedTextNode(("<",), ()),
            TaggedTextNode(("<",), (TagNode("x", LiteralNode(""), ""),)),
        ),
        SequenceNode(tuple(LiteralNode("a") for _ in range(10_001))),
    ],
)
def test_what_is_too_much_or_means_nothing_is_refused(form):
    with pytest.raises(RequestError) as caught:
        validate.build_constraint(form, param="structured_outputs")
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("pattern", ["(?:[a-z]{1,40} ){1,400}", "[a-z ]{1,16000}", "([a-z]+ ?)+"])
def test_counts_with_a_separator_are_admitted(pattern):
    assert validate.build_constraint(RegexNode(pattern))


def test_forms_may_be_nested_only_so_deep():
    form = LiteralNode("a")
    for _ in range(70):
        form = SequenceNode((form,))
    with pytest.raises(RequestError, match="deep"):
        validate.build_constraint(form)


@pytest.mark.parametrize("name", ["outlines", "lm-format-enforcer"])
def test_a_backend_that_is_not_here_is_refused_before_anything_waits_for_it(name):
    with pytest.raises(RequestError, match="not supported"):
        validate.build_constraint(RegexNode("a"), name, param="backend")


def test_an_unknown_backend_is_refused():
    with pytest.raises(RequestError, match="there are auto"):
        validate.build_constraint(RegexNode("a"), "best", param="backend")


def test_white_space_may_be_told_by_a_pattern_of_white_space():
    made = validate.build_constraint(JsonNode(OBJECT, whitespace_pattern=r"[ \n]?"))
    assert grammar_ast.load_node(made.form).whitespace_pattern == r"[ \n]?"


def test_a_refusal_names_keyword_place_and_way_out():
    with pytest.raises(UnsupportedSchema) as caught:
        validate.build_constraint(walks.json_node({"properties": {"a": {"$ref": "http://x/y"}}}))
    assert caught.value.place == "/properties/a/$ref"
    assert all(word in str(caught.value) for word in ("/properties/a/$ref", "http://x/y", "$defs"))


def test_the_check_of_a_schema_is_kept_refusals_too(monkeypatch):
    good, bad = '{"type": "boolean", "legend": "kept"}', '{"type": "kept"}'
    assert lowering.read_ignored(good) == ("legend",)
    with pytest.raises(UnsupportedSchema):
        lowering.read_ignored(bad)
    monkeypatch.setattr(lowering, "Document", None)
    assert lowering.read_ignored(good) == ("legend",)
    with pytest.raises(UnsupportedSchema) as caught:
        lowering.read_ignored(bad)
    assert caught.value.place == "/type"


def test_a_refusal_names_the_function_of_a_schema():
    node = JsonNode('{"type": "kept"}', owner="the function f")
    for check in (validate.build_constraint, rewrite.rewrite_node):
        with pytest.raises(UnsupportedSchema, match="JSON schema of the function f, at /type"):
            check(node)


def test_keywords_that_are_not_enforced_are_ignored_and_named():
    given = {"type": "string", "propertyOrder": 1, "format": "city", "$comment": "x", "default": 1}
    assert json.loads(rewrite.rewrite(json.dumps(given))) == {"type": "string"}
    nodes = (walks.json_node(given), walks.json_node({"uniqueItems": True}))
    found = validate.ignored_keywords(SequenceNode(nodes))
    assert found == ("format.city", "propertyOrder", "uniqueItems")
    assert validate.ignored_keywords(walks.json_node({"uniqueItems": False})) == ()
