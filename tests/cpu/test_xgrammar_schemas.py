"""The suite of schemas on xgrammar: what is admitted for it by name, it holds to."""

import json
import random
from pathlib import Path

import jsonschema
import pytest

from quire.errors import RequestError
from quire.grammar import grammar_ast
from quire.grammar.backends.xgrammar_backend import XGrammarCompiler
from quire.grammar.frontends import validate
from tests.pure.grammar import walks

FOLDER = Path(__file__).parents[1] / "pure" / "grammar" / "schemas"
ROWS = [
    json.loads(line)
    for file in sorted(FOLDER.glob("*.jsonl"))
    for line in file.read_text().splitlines()
    if len(line) < 5000
]
HONOURED = [row for row in ROWS if row["honoured"] and "same" not in row]
PART = 5
"""One of so many rows: the others take too long for every day."""


@pytest.fixture(scope="module")
def compiler():
    return XGrammarCompiler(walks.tokens()[0])


def _admitted(row):
    options = validate.JsonOptions(closed=row.get("closed", False))
    try:
        return validate.build_constraint(validate.json_node(row["schema"], options), "xgrammar"), ""
    except RequestError as error:
        return None, str(error)


@pytest.mark.parametrize("start", range(0, len(HONOURED), PART))
def test_what_is_admitted_for_xgrammar_is_honoured_by_it(start, compiler):
    row = HONOURED[start]
    constraint, told = _admitted(row)
    if constraint is None:
        assert "xgrammar" in told
        return
    grammar = compiler.compile(grammar_ast.load_node(constraint.form))
    exact = json.loads(json.dumps(row["schema"]), parse_float=walks.number)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(exact, format_checker=checker)
    draw = random.Random(start)
    for ease in (0, 5, 15):
        text = walks.walk(grammar, draw, ease)
        if text is not None:
            assert validator.is_valid(json.loads(text, parse_float=walks.number)), text
            assert max(map(len, walks.spaces(text)), default=0) <= 2
