"""Schemas made at random: what is admitted allows nothing that the schema does not, and whatever
is sent, the answer is a constraint or a RequestError, soon.
"""

import json
import random
import time
from pathlib import Path

import jsonschema
import pytest

from quire.errors import RequestError
from quire.grammar.json_schema import lowering
from quire.grammar.json_schema.rewrite import rewrite
from tests import tiers
from tests.pure.grammar import made_schemas

VALIDATOR = jsonschema.Draft202012Validator
MADE = 120
"""Schemas of each run."""
VALUES = 40
SOON_S = 5.0
"""Of processor time, for one schema: a slow machine's share. Most take under a millisecond."""


@pytest.fixture
def count():
    return MADE * tiers.amount(1, 50)


def _rewritten(given):
    """The schema that backends get; None if it is refused."""
    text = given if isinstance(given, str) else json.dumps(given)
    try:
        lowering.read_ignored(text)
        return json.loads(rewrite(text))
    except RequestError:
        return None


def test_what_the_rewritten_schema_allows_the_schema_allows(count):
    draw = random.Random(1)
    admitted = 0
    for _ in range(count):
        given = made_schemas.schema(draw)
        made = _rewritten(given)
        if made is None:
            continue
        admitted += 1
        before = (VALIDATOR(given), VALIDATOR(made_schemas.enforced(given)))
        after = VALIDATOR(made)
        for value in (made_schemas.value(draw) for _ in range(VALUES)):
            is_good = any(validator.is_valid(value) for validator in before)
            assert is_good or not after.is_valid(value), (given, made, value)
    assert admitted > count // 2


def test_a_broken_schema_is_refused_and_nothing_else_is_raised(count):
    draw = random.Random(3)
    for _ in range(5 * count):
        given = made_schemas.broken(draw, made_schemas.schema(draw))
        text = json.dumps(given)
        before = time.process_time()
        _rewritten(text)
        taken = time.process_time() - before
        assert taken < SOON_S, f"{taken:.1f} s for {text:.400}"


def test_a_broken_schema_of_the_suite_is_refused_and_nothing_else_is_raised(count):
    draw = random.Random(5)
    files = sorted((Path(__file__).parent / "schemas").glob("*.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines() if len(line) < 3000]
    for line in draw.choices(lines, k=5 * count):
        given = made_schemas.broken(draw, json.loads(line)["schema"])
        _rewritten(json.dumps(given))


def test_cut_off_text_is_refused(count):
    draw = random.Random(4)
    for _ in range(count):
        text = json.dumps(made_schemas.schema(draw))
        cut = text[: draw.randrange(len(text))]
        if cut.strip() not in ("true", "false"):
            assert _rewritten(cut) is None
