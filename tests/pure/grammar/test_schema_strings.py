"""Strings and names under schemas, in every JSON spelling of their characters."""

import itertools
import json
import re

import jsonschema
import pytest

from quire.errors import RequestError
from quire.grammar.automata import dfa
from quire.grammar.backends.llguidance_backend import LLGuidanceCompiler
from quire.grammar.frontends import validate
from quire.grammar.grammar_ast import JsonNode
from quire.grammar.json_schema import formats
from quire.grammar.json_schema.rewrite import rewrite
from quire.grammar.vocabulary import Vocabulary
from tests.pure.grammar import walks

BYTES = LLGuidanceCompiler(
    Vocabulary(
        tokens=(*(bytes([i]) for i in range(256)), b"<end>"),
        special_tokens=((256, "<end>"),),
        eos_token_ids=(256,),
        size=257,
    )
)
ESCAPES = {'"': '\\"', "\\": "\\\\", "/": "\\/", **{c: repr(c)[1:-1] for c in "\n\r\t"}}
CHARS = [*map(chr, range(128)), "\x80", "é", "\u2028", "\uffff"]


def _spellings(char):
    plain = [char] if char >= " " and char not in '"\\' else []
    return [*plain, f"\\u{ord(char):04x}", *([ESCAPES[char]] if char in ESCAPES else [])]


def _accepts(grammar, text):
    matcher = grammar.matcher()
    data = text.encode()
    return matcher.validate([*data, 256]) == len(data) + 1


def _compiled(schema):
    return BYTES.compile(JsonNode(rewrite(json.dumps(schema)), whitespace=False))


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"[^\\]", r'[^"]', r'[^"\\]', r"[^/]", r"[^\n]", r"[^\x01]", r"[^\t\\]", "."),
        *(r"\S", r"\W", r"\D", r"[^a-z\\]", r"[\x08-\x0a]", r'["-\\]', r"[^\x08\\]", r"[ -~]"),
    ],
)
def test_a_class_excludes_a_character_in_every_spelling(pattern):
    string = {"type": "string", "pattern": f"^{pattern}{{2}}$"}
    inside = {"type": "object", "properties": {"k": string}, "required": ["k"]}
    for schema, begin, end in ((string, '"', '"'), (inside, '{"k":"', '"}')):
        grammar = _compiled(schema)
        for char in CHARS:
            good = re.fullmatch(pattern, char) is not None
            for one in _spellings(char):
                assert good or not _accepts(grammar, begin + one * 2 + end), one
        plain = next(char for char in '"(0\t' if re.fullmatch(pattern, char))
        assert _accepts(grammar, begin + _spellings(plain)[0] * 2 + end) or plain in '"\t'


@pytest.mark.parametrize("name", ['foo"bar', "a\\b", "a/b", "é", "a\nb", "\x01", "\u2028", "a\tb"])
@pytest.mark.parametrize("word", ["properties", "patternProperties"])
def test_a_listed_name_has_its_schema_in_every_spelling(name, word):
    given = name if word == "properties" else f"^{re.escape(name)}$"
    grammar = _compiled({"type": "object", word: {given: {"type": "number"}}})
    for spelled in itertools.product(*map(_spellings, name)):
        text = f'{{"{"".join(spelled)}":"x"}}'
        assert json.loads(text) == {name: "x"}
        assert not _accepts(grammar, text), text
    written = json.dumps({name: 1}, ensure_ascii=False, separators=(",", ":"))
    assert name == "\x01" or _accepts(grammar, written)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "uri",
            ["file:///a", "file:///", "urn:a:b", "data:,x", "mailto:a@b.c"],
            ["a", "//a/b", "http:// ", "http://a b"],
        ),
        ("uri-reference", ["file:///a", "//a/b", "a", "", "?x"], ["\\a", "a b"]),
        ("date-time", ["2024-02-29T00:00:00Z"], ["2023-02-29T00:00:00Z"]),
    ],
)
def test_a_format_takes_what_validators_take(name, good, bad):
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for text in good:
        assert checker.conforms(text, name), text
        assert dfa.fully_matches(formats.node(name), text), text
    for text in bad:
        assert not checker.conforms(text, name), text
        assert not dfa.fully_matches(formats.node(name), text), text


@pytest.mark.parametrize("length", [300, 2_000])
@pytest.mark.parametrize("size", [2**31, 2**53])
def test_long_names_and_great_lengths_are_honoured(length, size):
    name = "n" * length
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": size}},
        "required": [name],
        "additionalProperties": False,
    }
    constraint = validate.build_constraint(walks.json_node(schema))
    done = walks.service().compile(constraint.form, constraint.backend)
    assert done.min_completion["min_tokens"] > 0


def test_a_value_in_an_error_is_written_as_json():
    with pytest.raises(RequestError, match=r'not \{"a": null, "b": true\}'):
        rewrite('{"type": {"a": null, "b": true}}')
