"""Whole at every budget, as with llguidance: closing asks no more of a backend than its contract."""

import json
import random

import jsonschema
import pytest

from quire.errors import RequestError
from quire.grammar import grammar_ast
from quire.grammar.backends.xgrammar_backend import XGrammarCompiler
from quire.grammar.compilation.compile_service import CompileService
from quire.grammar.frontends import validate
from quire.grammar.grammar_ast import UserGrammarNode
from tests.pure.grammar import test_closing as cases


class Room(cases.Room):
    def __init__(self, vocabulary):
        super().__init__(vocabulary)
        self.compiler = XGrammarCompiler(vocabulary)


ROOMS = {name: Room(one.vocabulary) for name, one in cases.ROOMS.items()}
each_room = pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS.keys())


def admitted(schema):
    return validate.build_constraint(validate.json_node(json.dumps(schema)), "xgrammar")


def check(form, room, seed, schema=None):
    """At budgets from the least upwards."""
    rng, least = random.Random(seed), room.least(form)
    for budget in (*range(least, least + 6, 2), *range(least + 9, least + 61, 17), least + 90):
        guide, text = room.walk(form, max(budget, 1), cases.DRAWS[budget % 4], rng)
        assert guide.complete, (budget, least, text)
        if schema is not None:
            jsonschema.validate(json.loads(text), schema)


@each_room
@pytest.mark.parametrize("name", [one for one in cases.SCHEMAS if one != "lengths and patterns"])
def test_json_is_whole_and_valid_at_every_budget(name, room):
    schema = cases.SCHEMAS[name]
    check(grammar_ast.load_node(admitted(schema).form), room, name, schema)


@pytest.mark.parametrize("name", cases.FORMS)
def test_other_forms_are_whole_at_every_budget(name):
    check(cases.FORMS[name], ROOMS["knotty"], name)


@pytest.mark.parametrize("name", cases.OWN)
def test_so_is_a_grammar_of_rules(name):
    check(UserGrammarNode(cases.OWN[name]), ROOMS["embedded"], name)


def test_schemas_of_the_suite_are_closed():
    rng = random.Random(6)
    for schema in rng.sample(cases.suite(), 12):
        try:
            form = grammar_ast.load_node(admitted(schema).form)
        except RequestError:
            continue
        check(form, ROOMS["embedded"], 1)


def test_a_form_whose_end_is_not_found_is_refused_by_name():
    workshop = CompileService(cases.ROOMS["embedded"].vocabulary)
    endless = admitted({"type": "string", "maxLength": 10**9})
    with pytest.raises(RequestError, match="xgrammar"):
        workshop.compile(endless.form, "xgrammar")
    other = validate.build_constraint(validate.json_node({"type": "string", "maxLength": 10**9}))
    assert workshop.compile(other.form, "auto").min_completion["least"]
