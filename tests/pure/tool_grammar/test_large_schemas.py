"""Schemas of functions that would make grammars without end."""

import json

import pytest

from quire.grammar.grammar_ast import is_larger
from quire.text.tools.base import Tool
from quire.text.tools.select import TOOL_FORMATS
from quire.tool_grammar import call_grammar
from quire.tool_grammar.parameter_schemas import InexpressibleSchema

REF = {"$ref": "#/$defs/a"}
ENDLESS = {
    "options that are themselves": {"anyOf": [REF] * 12},
    "properties that are objects again": {
        "type": "object",
        "properties": {f"p{i}": REF for i in range(12)},
        "additionalProperties": False,
    },
    "options within options": {
        "anyOf": [{"anyOf": [{"anyOf": [{"type": "null"}] * 12}] * 12}] * 12
    },
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("given", ENDLESS.values(), ids=ENDLESS)
def test_the_grammar_of_a_call_stays_small(given):
    parameters = {
        "type": "object",
        "properties": {"x": REF},
        "additionalProperties": False,
        "$defs": {"a": given},
    }
    tool = Tool("f", json.loads(json.dumps(parameters)))
    for name in TOOL_FORMATS.names():
        form = TOOL_FORMATS.load(name).__dict__.get("FORMAT")
        try:
            made = form and call_grammar.call_grammar(form, tool)
        except InexpressibleSchema:
            continue
        assert made is None or not is_larger(made, 20_000), name
