"""Constrained text is whole at every budget from its least upwards, whatever is drawn."""

import functools
import itertools
import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import quire
from quire.errors import RequestError
from quire.grammar import grammar_ast
from quire.grammar.backends.llguidance_backend import LLGuidanceCompiler
from quire.grammar.frontends import validate
from quire.grammar.grammar_ast import (
    AlternationNode,
    ChoiceNode,
    GrammarNode,
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
from quire.grammar.length_closing.budgeted_matcher import BudgetedMatcher
from quire.grammar.length_closing.completion_plan import (
    CompletionPlan,
    MinCompletion,
    build_completion_plan,
    find_min_completion,
)
from quire.grammar.length_closing.token_classes import TokenClasses
from quire.grammar.vocabulary import Vocabulary
from tests import tiers
from tests.pure.grammar import walks

SUITE = Path(__file__).parent / "schemas"
DRAWS = ("any", "not the end", "longest", "opening")


def embedded() -> Vocabulary:
    read = json.loads((Path(quire.__file__).parent / "embedded/tokenizer.json").read_text())
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    letters |= {chr(256 + place): byte for place, byte in enumerate(odd)}
    names = {one["id"]: one["content"] for one in read["added_tokens"]}
    tokens = [b""] * 4096
    for text, token in read["model"]["vocab"].items():
        tokens[token] = text.encode() if token in names else bytes(letters[c] for c in text)
    return Vocabulary(tuple(tokens), tuple(sorted(names.items())), (2, 0), 4096)


def knotty() -> Vocabulary:
    """Bytes, some words, and long tokens that close and open several things at once."""
    knots = '":{" }]} [[[[ {{ [{" ":[" "," "},{" },{ ]] [{ {"a": {"a":{" ":0," ,[ ],[ ": " {"name":" }}}'
    more = [
        "null",
        "true",
        "000",
        "-1.5e",
        "\\u00",
        '\\"',
        "{}",
        '""',
        "</think>{",
        "nk>",
        ">{",
        "</th",
        'me"',
    ]
    words = [a + b for a, b in itertools.product(["al", " ga", "na", "x"], ["me", "lue", " the "])]
    tokens = [*(bytes([byte]) for byte in range(256))]
    tokens += [one.encode() for one in (*knots.split(" "), *more, *words)]
    tokens = list(dict.fromkeys(tokens))
    count = len(tokens)
    special = ((count, "<eos>"), (count + 1, "<think>"), (count + 2, "</think>"))
    tokens += [name.encode() for _, name in special]
    return Vocabulary(tuple(tokens), special, (count,), count + 7)


class Room:
    """A vocabulary, and what is compiled over it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.spelling = TokenClasses(vocabulary)
        self.compiler = LLGuidanceCompiler(vocabulary)
        self.words = np.zeros(vocabulary.mask_words, np.int32)
        self.made = functools.lru_cache(maxsize=64)(self._made)

    def _made(self, form: GrammarNode) -> tuple[object, MinCompletion, CompletionPlan]:
        grammar = self.compiler.compile(form)
        least = find_min_completion(form, grammar.matcher(), self.spelling)
        closer = build_completion_plan(least, self.spelling)
        assert closer is not None
        return grammar, least, closer

    def least(self, form: GrammarNode) -> int:
        found = self.made(form)[1].min_tokens
        assert found is not None
        return found

    def guide(self, form: GrammarNode) -> BudgetedMatcher:
        grammar, _, closer = self.made(form)
        return BudgetedMatcher(grammar.matcher(), closer)

    def allowed(self, guide: BudgetedMatcher, left: int | None) -> list[int]:
        guide.fill_bitmask(self.words, left)
        return self.spelling.tokens_of(self.words)

    def drawn(self, tokens: list[int], how: str, rng: random.Random) -> int:
        pieces = self.vocabulary.tokens
        live = [one for one in tokens if one not in self.vocabulary.eos_token_ids] or tokens
        if how == "any":
            return rng.choice(tokens)
        if how == "longest":
            return max(live, key=lambda one: (len(pieces[one]), rng.random()))
        if how == "opening":
            return max(live, key=lambda one: (_openers(pieces[one]), rng.random()))
        return rng.choice(live)

    def text(self, tokens: list[int]) -> bytes:
        return b"".join(self.vocabulary.tokens[one] for one in tokens)

    def walk(
        self, form: GrammarNode, budget: int, how: str, rng: random.Random
    ) -> tuple[BudgetedMatcher, bytes]:
        """Draw until the end or the budget."""
        guide, taken = self.guide(form), []
        while len(taken) < budget and not guide.is_terminated:
            token = self.drawn(self.allowed(guide, budget - len(taken)), how, rng)
            assert guide.accept(token), "a mask held what may not come"
            if token in self.vocabulary.eos_token_ids:
                break
            taken.append(token)
        return guide, self.text(taken)


def _openers(piece: bytes) -> tuple[int, bool]:
    return sum(map(piece.count, (b"{", b"[", b","))), piece[:1] == b'"'


ROOMS = {"embedded": Room(embedded()), "knotty": Room(knotty())}
each_room = pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS.keys())


def schema_form(schema: object) -> JsonNode:
    form = walks.rewritten(validate.build_constraint(walks.json_node(json.dumps(schema))))
    assert isinstance(form, JsonNode)
    return form


def obj(required: int | None = None, **properties: object) -> dict[str, object]:
    names = list(properties)[:required]
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
DEEP = obj(alpha=TEXT, beta={"type": "array", "items": TEXT, "minItems": 2})
TREE = obj(v=WHOLE, kids={"type": "array", "items": {"$ref": "#/$defs/n"}})
SCHEMAS = {
    "flat": obj(name=TEXT, age=WHOLE, email=TEXT),
    "anything": {},
    "any object": {"type": "object"},
    "optional and deep": obj(1, city=TEXT, deep=DEEP, more={"type": "array", "items": DEEP}),
    "lengths and patterns": obj(
        a={"type": "string", "minLength": 20, "maxLength": 25},
        b={"type": "string", "pattern": "^[A-Z]{3}-\\d{4}$"},
        c={"type": "string", "pattern": "^[^a]*(a.{10})?$"},
        d={"type": "string", "pattern": "xyz$"},
    ),
    "choices": {"anyOf": [{"type": "null"}, obj(kind={"const": "a"}), obj(kind=TEXT, deep=DEEP)]},
    "values": obj(
        e={"enum": ["purple haze", "red", 'na"me']}, n={"type": "number", "minimum": 0.5}
    ),
    "recursive": {"$defs": {"n": TREE}, "$ref": "#/$defs/n"},
    "free names": {"type": "object", "properties": {"name": DEEP}, "additionalProperties": WHOLE},
}


def _call(name: str, schema: dict[str, object]) -> TagNode:
    begin = f'<tool_call>\n{{"name": "{name}", "arguments": '
    return TagNode(begin, schema_form(schema), "}\n</tool_call>")


CALLS = (_call("f", obj(1, name=TEXT, age=WHOLE)), _call("get_weather", obj(city=TEXT, deep=DEEP)))
FORMS: dict[str, GrammarNode] = {
    "reasoning": SequenceNode((UntilNode("</think>"), RegexNode("[ \n]{0,2}"), schema_form(DEEP))),
    "perhaps reasoning": AlternationNode(
        (
            schema_form(DEEP),
            SequenceNode((LiteralNode("<think>"), UntilNode("</think>"), schema_form(DEEP))),
        )
    ),
    "calls in text": TaggedTextNode(("<tool_call>",), CALLS),
    "a call at least": TaggedTextNode(("<tool_call>",), CALLS, min_tags=1),
    "calls": RepeatNode(AlternationNode(CALLS), separator="\n"),
    "parameters": SequenceNode(
        (
            LiteralNode("<f>\n<p=x>\n"),
            UntilNode("\n</p>\n"),
            RepeatNode(LiteralNode("<q>\n"), min_count=0, max_count=1),
            LiteralNode("</f>"),
        )
    ),
    "choice": ChoiceNode(("yes", "no", "perhaps later today", 'quo"te\n', "日本語")),
    "pattern": RegexNode(r"\d{3}-[a-z]+(foo|barbarbar)"),
    "overlapping mark": SequenceNode((UntilNode("abab"), LiteralNode("done"))),
}


def budgets(least: int) -> tuple[int, ...]:
    """Each near the least, some above, and one that does not bind."""
    near, above = range(least, least + 6), range(least + 6, least + 61, tiers.amount(9, 3))
    return (*near, *above, least + 150)


@pytest.mark.sampled(3)
@each_room
@pytest.mark.parametrize("name", SCHEMAS)
def test_json_is_whole_and_valid_at_every_budget(name, room):
    form, rng = schema_form(SCHEMAS[name]), random.Random(name)
    least = room.least(form)
    for budget in budgets(least):
        guide, text = room.walk(form, max(budget, 1), DRAWS[budget % 4], rng)
        assert guide.is_complete, (budget, least, text)
        jsonschema.validate(json.loads(text), SCHEMAS[name])


@pytest.mark.sampled(3)
@each_room
@pytest.mark.parametrize("name", FORMS)
def test_other_forms_are_whole_at_every_budget(name, room):
    form, rng = FORMS[name], random.Random(name)
    least = room.least(form)
    for budget in budgets(least):
        guide, text = room.walk(form, max(budget, 1), DRAWS[budget % 4], rng)
        assert guide.is_complete, (budget, least, text)


def suite() -> list[object]:
    rows = [json.loads(line) for path in SUITE.glob("*.jsonl") for line in path.open()]
    return [row["schema"] for row in rows if row.get("honoured")]


def test_schemas_of_the_suite_are_closed():
    rng, room = random.Random(5), ROOMS["embedded"]
    for schema in rng.sample(suite(), 40):
        form = schema_form(schema)
        least = room.least(form)
        for budget in (least, least + 1, least + rng.randrange(2, 60)):
            guide, text = room.walk(form, max(budget, 1), rng.choice(DRAWS), rng)
            assert guide.is_complete, (schema, budget, least, text)


def schemas() -> st.SearchStrategy[dict[str, object]]:
    leaf = st.sampled_from(
        [
            TEXT,
            WHOLE,
            {"type": "boolean"},
            {"enum": ["red", "a", "long value", 5, None]},
            {},
            {"type": "string", "minLength": 9},
            {"type": "string", "pattern": "^(foo|barbaz)*end$"},
        ]
    )
    names = st.sampled_from(["name", "na", "age", "description", "ü", 'a"b'])

    def wider(inner):
        members = st.dictionaries(names, inner, max_size=4)
        return st.one_of(
            st.builds(
                lambda items, n: {"type": "array", "items": items, "minItems": n},
                inner,
                st.integers(0, 3),
            ),
            st.builds(lambda given, n: obj(n, **given), members, st.integers(0, 4)),
            st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=2, max_size=3)),
        )

    return st.recursive(leaf, wider, max_leaves=6)


@settings(
    max_examples=tiers.amount(20, 400),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(
    schemas(),
    st.integers(0, 60),
    st.sampled_from(DRAWS),
    st.sampled_from(sorted(ROOMS)),
    st.randoms(),
)
def test_random_schemas_are_closed(schema, more, how, room, rng):
    try:
        form = schema_form(schema)
    except RequestError:
        return
    budget = max(ROOMS[room].least(form) + more, 1)
    guide, text = ROOMS[room].walk(form, budget, how, rng)
    assert guide.is_complete, (budget, text)
    jsonschema.validate(json.loads(text), schema)


def test_the_least_of_a_flat_object_is_its_shortest_text():
    room = ROOMS["embedded"]
    short = room.spelling.fewest(b'{"name":"","age":0,"email":""}')
    assert room.least(schema_form(SCHEMAS["flat"])) == len(short)


TINY = {
    "number or text": {"anyOf": [WHOLE, TEXT]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
    "object": obj(a={"type": "null"}),
    "enum": {"enum": ["name", "xxxx", "ga the "]},
    "pattern": {"type": "string", "pattern": "^(x|galue)+a$"},
}


@pytest.mark.parametrize("name", TINY)
def test_the_least_is_no_longer_than_an_exhaustive_search_finds(name):
    room, form = ROOMS["knotty"], schema_form(TINY[name])
    grammar, least, _ = room.made(form)
    edge = [(grammar.matcher(), 0)]
    seen = 0
    for depth in range(least.min_tokens):
        wider = []
        for matcher, _ in edge:
            if matcher.is_complete:
                pytest.fail(f"{depth} tokens do, {least.min_tokens} were announced")
            matcher.fill_bitmask(room.words)
            pieces = room.vocabulary.tokens
            for token in room.spelling.tokens_of(room.words):
                # white space makes no text shorter, and what begins alike need not be tried twice
                if (
                    token not in room.vocabulary.eos_token_ids
                    and not pieces[token].isspace()
                    and seen < 40_000
                ):
                    other = matcher.copy()
                    assert other.accept(token)
                    wider.append((other, depth + 1))
                    seen += 1
        edge = wider if len(wider) < 400 else random.Random(1).sample(wider, 400)


def test_far_from_its_budget_a_text_is_free():
    room, form = ROOMS["embedded"], schema_form(SCHEMAS["flat"])
    guide = room.guide(form)
    for piece in (b'{"', b"name", b'":', b'"', b"a"):
        assert guide.accept(room.spelling.ids[piece])
    assert room.allowed(guide, 400) == room.allowed(guide, None)


def test_a_string_goes_on_until_its_end_must_come():
    room, form = ROOMS["embedded"], schema_form(obj(name=TEXT))
    for budget in range(room.least(form) + 6, room.least(form) + 40):
        guide = room.guide(form)
        taken = 0
        for piece in (b'{"', b"name", b'":', b'"'):
            assert guide.accept(room.spelling.ids[piece])
            taken += 1
        plain = room.spelling.ids[b"a"]
        while plain in room.allowed(guide, budget - taken):
            assert guide.accept(plain)
            taken += 1
        assert budget - taken <= 3, "a quote and a bracket are all that is needed"


def test_what_the_budget_ended_is_told_from_what_ended_itself():
    room, form = ROOMS["embedded"], schema_form(SCHEMAS["flat"])
    rng = random.Random(1)
    tight, _ = room.walk(form, room.least(form) + 4, "not the end", rng)
    assert tight.forced
    guide = room.guide(form)
    for piece in (b'{"', b"name", b'":', b'"', b'",', b'"', b"age", b'":', b"0", b","):
        room.allowed(guide, 300)
        assert guide.accept(room.spelling.ids[piece])
    for piece in (b'"', b"email", b'":', b'"', b'"}'):
        room.allowed(guide, 290)
        assert guide.accept(room.spelling.ids[piece])
    assert guide.is_terminated
    assert not guide.forced


def test_a_mask_never_holds_what_the_matcher_does_not_allow():
    room, rng = ROOMS["knotty"], random.Random(2)
    for form in (FORMS["calls"], FORMS["parameters"], schema_form(SCHEMAS["lengths and patterns"])):
        guide, budget = room.guide(form), room.least(form) + 30
        while budget and not guide.is_terminated:
            tokens = room.allowed(guide, budget)
            assert all(guide.matcher.validate([one]) for one in tokens)
            assert guide.accept(room.drawn(tokens, "any", rng))
            budget -= 1


@each_room
@pytest.mark.parametrize("name", ["flat", "lengths and patterns", "choices"])
def test_taking_tokens_back_and_copying_change_nothing(name, room):
    form, rng = schema_form(SCHEMAS[name]), random.Random(name)
    for more in (0, 3, 11, 30):
        guide, left = room.guide(form), room.least(form) + more
        while left and not guide.is_terminated:
            guide = guide.copy()
            for ahead in range(min(rng.randrange(4), left)):
                tokens = room.allowed(guide, left - ahead)
                if not guide.accept(rng.choice(tokens)) or guide.is_terminated:
                    guide.rollback(ahead + 1)
                    break
            else:
                guide.rollback(len(guide._history) - (room.least(form) + more - left))
            token = room.drawn(room.allowed(guide, left), "not the end", rng)
            if token in room.vocabulary.eos_token_ids:
                break
            assert guide.accept(token)
            left -= 1
        assert guide.is_complete


@each_room
@pytest.mark.parametrize("name", ["flat", "choices"])
def test_a_sequence_that_comes_back_is_closed_as_well(name, room):
    form, rng = schema_form(SCHEMAS[name]), random.Random(name)
    for more in (0, 5, 25):
        budget, taken = room.least(form) + more, []
        guide = room.guide(form)
        while len(taken) < budget and not guide.is_terminated:
            if rng.random() < 0.2:
                guide = room.guide(form)
                assert all(map(guide.accept, taken))
            token = room.drawn(room.allowed(guide, budget - len(taken)), "not the end", rng)
            if token in room.vocabulary.eos_token_ids:
                break
            assert guide.accept(token)
            taken.append(token)
        assert guide.is_complete, room.text(taken)


def test_a_grammar_of_the_users_own_is_not_closed():
    room = ROOMS["embedded"]
    form = UserGrammarNode('start: "<" /[a-z]+/ ">"')
    grammar = room.compiler.compile(form)
    least = find_min_completion(form, grammar.matcher(), room.spelling)
    assert least.min_tokens is None
    guide = BudgetedMatcher(grammar.matcher(), build_completion_plan(least, room.spelling))
    assert room.allowed(guide, 1) == room.allowed(guide, None)


OWN = {
    "a query": """root ::= "SELECT " name (", " name)* " FROM " name (" WHERE " cond)? ";"
        name ::= [a-z] [a-z_]*
        cond ::= name " = " (number | "'" [^']{3,} "'")
        number ::= [0-9]+""",
    "lines": 'root ::= item{2,}\nitem ::= "- " text "\\n"\ntext ::= [A-Z] [a-z ]+ [.!?]',
    "a list": "root ::= word | word \", \" root\nword ::= 'red' | 'green' | 'ultramarine'",
}


@each_room
@pytest.mark.parametrize("name", OWN)
def test_a_grammar_of_rules_that_are_no_part_of_themselves_is_closed(name, room):
    form, rng = UserGrammarNode(OWN[name]), random.Random(name)
    least = room.least(form)
    for budget in (*range(least, least + 8), *range(least + 9, least + 61, 7)):
        guide, text = room.walk(form, budget, DRAWS[budget % 4], rng)
        assert guide.is_complete, (budget, least, text)


@pytest.mark.parametrize("text", ['root ::= "(" root* ")"', 'root ::= "a" <think>'])
def test_other_grammars_of_rules_are_not(text):
    room = ROOMS["knotty"]
    grammar = room.compiler.compile(UserGrammarNode(text))
    assert (
        find_min_completion(UserGrammarNode(text), grammar.matcher(), room.spelling).min_tokens
        is None
    )


def test_many_are_filled_as_each_alone():
    room = ROOMS["embedded"]
    work = [
        (room.guide(schema_form(one)), left) for one, left in zip(SCHEMAS.values(), (20, 300) * 5)
    ]
    rows = np.zeros((len(work), room.vocabulary.mask_words), np.int32)
    matchers = [(row, guide.matcher) for row, (guide, _) in enumerate(work)]
    room.compiler.fill_bitmasks(matchers, rows)
    for row, (guide, left) in enumerate(work):
        guide.apply_budget(rows[row], left)
    for (guide, left), row in zip(work, rows):
        assert room.spelling.tokens_of(row) == room.allowed(guide, left)


def test_a_string_that_the_budget_ended_says_so():
    room, form = ROOMS["embedded"], schema_form(TEXT)
    for budget in (6, 40, 80):
        guide, text = room.walk(form, budget, "longest", random.Random(4))
        assert guide.forced, (budget, text)


def test_free_text_in_which_calls_may_stand_stays_free_of_their_cost():
    room = ROOMS["embedded"]
    bare = TaggedTextNode(("<tool_call>",), (TagNode("<tool_call>", schema_form(DEEP), ""), *CALLS))
    assert len(room.allowed(room.guide(bare), 12)) > 3000


def test_a_token_that_ends_a_name_counts_as_that_name():
    room, form = ROOMS["knotty"], schema_form(SCHEMAS["free names"])
    guide = room.guide(form)
    for piece in (b"{", b'"', b"n", b"a"):
        room.allowed(guide, 300)
        assert guide.accept(room.spelling.ids[piece])
    ends = room.spelling.ids[b'me"']
    assert ends in room.allowed(guide, 300)
    assert ends not in room.allowed(guide, 8), "what follows the name takes more"


@pytest.mark.parametrize("form", [RegexNode("[a-z ]{20,90}"), FORMS["reasoning"], FORMS["calls"]])
def test_a_sequence_that_comes_back_has_the_masks_that_it_had(form):
    room, rng = ROOMS["embedded"], random.Random(8)
    budget, taken = room.least(form) + 45, []
    guide = room.guide(form)
    while len(taken) < budget and not guide.is_terminated:
        tokens = room.allowed(guide, budget - len(taken))
        back = room.guide(form)
        assert all(map(back.accept, taken))
        assert room.allowed(back, budget - len(taken)) == tokens, len(taken)
        token = room.drawn(tokens, "not the end", rng)
        if token in room.vocabulary.eos_token_ids:
            break
        assert guide.accept(token)
        taken.append(token)


def test_a_text_that_cannot_be_completed_any_more_has_a_fault(monkeypatch):
    """And not a cut text: its request ends with an error."""
    form = JsonNode('{"type":"array","items":{"type":"integer"},"minItems":3}')
    service = walks.service()
    done = service.compile(grammar_ast.dump_node(form), "auto")
    guide = service.load(done).guide()
    monkeypatch.setattr(guide, "_find_path", lambda left: setattr(guide, "_path_known", False))
    words = np.zeros(service.vocabulary.mask_words, np.int32)
    tokens = {piece: i for i, piece in enumerate(service.vocabulary.tokens)}
    for left in range(8, 1, -1):
        guide.fill_bitmask(words, left)
        guide._path_known = False
        assert guide.fault is None
        assert guide.accept(tokens[b"["] if left == 8 else tokens[b"1"])
    guide.fill_bitmask(words, 1)
    assert "max_tokens" in guide.fault
    assert guide.copy().fault == guide.fault
    assert (words == service.token_classes.eos_mask).all()
    guide.rollback(1)
    assert guide.fault is None
