"""What forms may be asked for."""

import json

import pytest

from quire.core.constraint import Constraint
from quire.errors import RequestError
from quire.grammar import admit, forms, schema
from quire.grammar.forms import Choice, Either, Grammar, Json, Regex, Repeat, Seq, Tag, Tags, Text
from quire.grammar.forms import Until as UntilMark
from quire.grammar.schemas.document import Refused

OBJECT = '{"type":"object","properties":{"a":{"type":"integer"}}}'


def _schema(constraint):
    return json.loads(forms.load(constraint.form).schema)


def test_a_constraint_is_the_form_rewritten_and_the_backend():
    given = admit.json_form(
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    )
    made = admit.constraint(given, "guidance")
    assert isinstance(made, Constraint)
    assert made.backend == "llguidance"
    assert _schema(made)["properties"] == {"a": {"enum": [1]}}


def test_equal_schemas_in_other_words_are_one_constraint():
    one = admit.constraint(admit.json_form({"const": "x"}))
    two = admit.constraint(admit.json_form('{"enum": ["x"], "title": "t"}'))
    assert one == two


def test_closed_is_resolved():
    made = admit.constraint(Json(OBJECT, closed=True))
    assert not forms.load(made.form).closed
    assert _schema(made)["additionalProperties"] is False
    assert "patternProperties" not in _schema(made)


def test_schemas_within_forms_are_rewritten():
    form = Seq((Text("<a>"), Either((Json('{"const":1}'), Repeat(Json('{"const":2}'), ",")))))
    made = admit.constraint(form).form
    assert "const" not in made
    tags = Tags(("<f",), (Tag("<f>", Json('{"const":3}'), "</f>"),))
    assert "const" not in admit.constraint(tags).form


@pytest.mark.parametrize(
    "form",
    [
        *(
            Regex(""),
            Regex("(?=a)"),
            Regex("a\0"),
            Regex("a" * 20_000),
            Regex("(a{1,1000}){1,1000}"),
        ),
        *(Choice(()), Choice(("a\0",)), Choice(("x",) * 10_001), Choice(("y" * 300_000,))),
        *(Grammar(""), Grammar("root ::= " + "(" * 300), Grammar("a" * 300_000), Grammar("\0")),
        *(Json("{"), Json("[]"), Json('"x"'), Json('{"type":5}'), Json(OBJECT, spacing="x")),
        *(Json(OBJECT, spacing="("), Either(()), UntilMark(""), Text("a\0"), Text("\ud83d")),
        *(
            Repeat(Text("a"), least=3, most=2),
            Repeat(Text("a"), most=10**6),
            Repeat(Text("a"), least=-1),
        ),
        *(
            Tags((), (Tag("<", Text("a"), ">"),)),
            Tags(("<",), ()),
            Tags(("<",), (Tag("x", Text(""), ""),)),
        ),
        Seq(tuple(Text("a") for _ in range(10_001))),
    ],
)
def test_what_is_too_much_or_means_nothing_is_refused(form):
    with pytest.raises(RequestError) as caught:
        admit.constraint(form, param="structured_outputs")
    assert caught.value.param == "structured_outputs"


def test_forms_may_be_nested_only_so_deep():
    form = Text("a")
    for _ in range(70):
        form = Seq((form,))
    with pytest.raises(RequestError, match="deep"):
        admit.constraint(form)


@pytest.mark.parametrize("name", ["outlines", "lm-format-enforcer"])
def test_a_backend_that_is_not_here_is_refused_before_anything_waits_for_it(name):
    with pytest.raises(RequestError, match="not supported"):
        admit.constraint(Regex("a"), name, param="backend")


def test_an_unknown_backend_is_refused():
    with pytest.raises(RequestError, match="known: auto"):
        admit.constraint(Regex("a"), "best", param="backend")


def test_what_is_no_json_is_no_schema():
    with pytest.raises(RequestError, match="no JSON") as caught:
        admit.json_form({"a": {1, 2}}, param="schema")
    assert caught.value.param == "schema"


def test_white_space_may_be_told_by_a_pattern_of_white_space():
    made = admit.constraint(Json(OBJECT, spacing=r"[ \n]?"))
    assert forms.load(made.form).spacing == r"[ \n]?"


def test_a_refusal_names_keyword_place_and_way_out():
    with pytest.raises(Refused) as caught:
        admit.constraint(admit.json_form({"properties": {"a": {"$ref": "http://x/y"}}}))
    assert caught.value.place == "/properties/a/$ref"
    assert all(word in str(caught.value) for word in ("/properties/a/$ref", "http://x/y", "$defs"))


GOOD = {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({**GOOD, "additionalProperties": True}, "/additionalProperties"),
        ({key: GOOD[key] for key in ("type", "properties", "required")}, ""),
        ({**GOOD, "required": []}, "/required"),
        ({**GOOD, "required": ["a", "b"]}, "/required"),
        ({**GOOD, "properties": {"a": {"type": "object"}}}, "/properties/a"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}}, "/$defs/x"),
        ({"type": "array", "items": {"type": "object"}}, "/items"),
        ({**GOOD, "patternProperties": {"a": {}}}, "/patternProperties"),
        ({"type": "foo"}, "/type"),
    ],
)
def test_strict_mode_refuses_open_and_optional_properties(given, place):
    with pytest.raises(Refused) as caught:
        schema.strict(given)
    assert caught.value.place == place


def test_strict_mode_lets_strict_schemas_through():
    assert schema.strict(GOOD) is GOOD
    tree = {**GOOD, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    assert schema.strict(tree) is tree


def test_the_same_schema_is_rewritten_once():
    text = json.dumps(GOOD)
    assert schema.rewritten(text) is schema.rewritten(text)


def test_items_that_recursion_never_ends_are_left_out():
    endless = {"type": "object", "properties": {"x": {"$ref": "#/$defs/e"}}, "required": ["x"]}
    first = [{"type": "boolean"}, {"$ref": "#/$defs/e"}]
    given = {"type": "array", "prefixItems": first, "$defs": {"e": endless}}
    made = _schema(admit.constraint(admit.json_form(given)))
    assert made == {"type": "array", "prefixItems": [{"type": "boolean"}], "items": False}
