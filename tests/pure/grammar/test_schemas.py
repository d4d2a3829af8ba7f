"""The suite of schemas: each honoured, in every text that masks allow, or refused with its place.

A line of schemas/*.jsonl: `name`; `schema`; `honoured`, or `at`, the JSON pointer of the refusal;
`ignored`: keywords that are named as not enforced; `closed` as in forms.Json; `same`: the schema in
words of draft 2020-12 where it has older ones.
`pytest --long tests/pure/tools tests/pure/grammar` walks more, and at more budgets.
"""

import decimal
import json
import random
import zlib
from pathlib import Path

import jsonschema
import pytest

from quire.errors import RequestError
from quire.grammar import grammar_ast
from quire.grammar.frontends import validate
from quire.grammar.json_schema.document import UnsupportedSchema
from quire.grammar.json_schema.rewrite import rewrite
from tests import tiers
from tests.pure.grammar import made_schemas, walks

FOLDER = Path(__file__).parent / "schemas"
ROWS = [
    pytest.param(
        {"file": file.stem, **json.loads(line)}, id=f"{file.stem}-{json.loads(line)['name']}"
    )
    for file in sorted(FOLDER.glob("*.jsonl"))
    for line in file.read_text().splitlines()
]
HONOURED = [row for row in ROWS if row.values[0]["honoured"]]
REFUSED = [row for row in ROWS if not row.values[0]["honoured"]]
FREE = tiers.amount(8, 340)
"""Texts without a budget."""
ROOM = (0, 1, 5)
"""Tokens over the least, of texts with one."""
CLOSED = (
    "a list of calls",
    "a tree",
    "invoice",
    "survey",
    "Person",
    "nested lists",
    "oneOf by a constant",
    "two at most of three",
    "unique enum",
    "if by country",
    "dependentSchemas of a value",
    "required twice over",
    "type object",
    "pattern ^[A-Z]{2,3}-[0-9]{4}$",
    "a range of fractions",
    "with if",
)
"""Schemas whose texts are closed at each budget of tokens."""
SMALL = [row for row in HONOURED if row.values[0]["name"] in CLOSED]
EASE = (0, 5, 10, 20, 40)
"""Tokens after which walks look for their end, one after the other."""


LARGE = {"too many subschemas", "mutual recursion without an end", "a list that never ends"}
"""Refused by the compiler, after seconds of its work."""


def _validator(row):
    given = row.get("same", row["schema"])
    text = json.dumps(made_schemas.enforced(given))
    exact = json.loads(text, parse_float=walks.number)
    checked = jsonschema.Draft202012Validator
    if isinstance(given, dict) and "draft-07" in given.get("$schema", ""):
        checked = jsonschema.Draft7Validator
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return checked(exact, format_checker=checker)


def _constraint(row):
    return validate.build_constraint(walks.json_node(row["schema"], row.get("closed", False)))


def _check(text, validator):
    with decimal.localcontext(decimal.Context(prec=400)):
        value = json.loads(text, parse_float=walks.number)
        fault = next(validator.iter_errors(value), None)
    assert fault is None, f"{text!r}: {fault.message}"
    assert max(map(len, walks.spaces(text)), default=0) <= 2, f"white space in {text!r}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", HONOURED)
def test_every_text_of_an_honoured_schema_is_valid(row, often):
    """Some texts end as they like, others within budgets of few tokens."""
    constraint, validator = _constraint(row), _validator(row)
    grammar = walks.compiled(constraint)
    assert validate.ignored_keywords(grammar_ast.load_node(constraint.form)) == tuple(
        row.get("ignored", ())
    )
    draw = random.Random(zlib.crc32(row["name"].encode()))
    for place in range(FREE):
        text = walks.walk(grammar, draw, EASE[place % len(EASE)])
        if text is not None:  # else it came to no end
            _check(text, validator)
    least = walks.least(constraint, grammar)
    for room in ROOM * (1 if often == 1 else 3):
        _check(walks.walk_within(grammar, least, least.min_tokens + room, draw), validator)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", SMALL)
def test_every_budget_from_the_least_gives_a_valid_text(row, often):
    constraint, validator = _constraint(row), _validator(row)
    grammar = walks.compiled(constraint)
    least = walks.least(constraint, grammar)
    draw = random.Random(1)
    for budget in range(least.min_tokens, least.min_tokens + (16 if often == 1 else 200)):
        _check(walks.walk_within(grammar, least, budget, draw), validator)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", [row for row in REFUSED if row.values[0]["name"] not in LARGE])
def test_what_is_not_honoured_is_refused_with_its_place(row):
    """`at` is null where only the compiler finds that no value is valid."""
    if row["at"] is None:
        node = walks.json_node(row["schema"])
        with pytest.raises(RequestError):
            walks.service().compile(grammar_ast.dump_node(node), "auto")
        return
    with pytest.raises(UnsupportedSchema) as caught:
        rewrite(row["schema"] if isinstance(row["schema"], str) else json.dumps(row["schema"]))
    assert caught.value.place == row["at"]
    assert not row["at"] or row["at"] in str(caught.value)


@pytest.mark.long("the compiler works for seconds")
@pytest.mark.parametrize("row", [row for row in REFUSED if row.values[0]["name"] in LARGE])
def test_what_only_a_long_search_finds_is_refused(row):
    test_what_is_not_honoured_is_refused_with_its_place(row)
