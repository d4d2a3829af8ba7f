"""Regular expressions as trees, and sets of texts."""

import random
import re

import jsonschema
import pytest

from quire.errors import RequestError
from quire.grammar.automata import dfa, regex_ast
from quire.grammar.json_schema import formats


def _whole(pattern, **more):
    return regex_ast.without_anchors(regex_ast.parse_regex(pattern, **more))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^a$", ["a"], ["", "aa", "ba", "a\n"]),
        ("a", ["a", "xay"], ["", "b"]),
        ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
        ("(^|,)a", ["a", ",a", "x,a"], ["xa"]),
        ("^(a|b)?$", ["", "a", "b"], ["ab"]),
        ("^a{2,3}$", ["aa", "aaa"], ["a", "aaaa"]),
        (r"^\d\w\s$", ["1a ", "1_\t"], ["١a ", "1é ", "1a\u00a0"]),
        (r"^\D$", ["a"], ["1", "١"]),
        ("^[^a-c]$", ["d", "é", "\n"], ["a"]),
        ("^.$", ["a", "é"], ["\n", "\r", "\u2028"]),
        (r"^[\s\S]$", ["a", "\n", "\x1c"], ["", "ab"]),
        (r"^\u00e9\x41\n$", ["éA\n"], ["éA"]),
        ("(?i)^abc$", ["ABC", "aBc"], ["abz"]),
        (r"^[\]\-\^]$", ["]", "-", "^"], ["\\"]),
        ("^[a-z&&b]$", ["a", "&"], ["-"]),
        ("^(?P<n>x)(?:y)$", ["xy"], ["x"]),
    ],
)
def test_a_pattern_means_what_all_dialects_agree_on(pattern, good, bad):
    node = _whole(pattern)
    written = re.compile(regex_ast.to_anchored_pattern(node))
    for text in good:
        assert dfa.fully_matches(node, text)
        assert written.search(text)
        assert re.search(pattern, text)
    for text in bad:
        assert not dfa.fully_matches(node, text)
        assert not written.fullmatch(text)


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "(?=a)",
            "(?<!a)b",
            r"(a)\1",
            r"\bx",
            "[a",
            "(a",
            "a)",
            "*a",
            "a**",
            "a{3,1}",
            "[]",
            "a^b",
        ),
        *(
            "a{,3}",
            r"\p{Graph}",
            r"\012",
            "a{1,999999999}",
            "(" * 200 + ")" * 200,
            "a\0",
            "x" * 20000,
        ),
    ],
)
def test_what_a_grammar_cannot_follow_is_refused(pattern):
    with pytest.raises(RequestError):
        _whole(pattern)


def test_two_escapes_of_surrogates_are_one_character():
    assert dfa.fully_matches(_whole(r"^\ud83d\ude00$"), "😀")


def test_a_pattern_that_blows_up_elsewhere_is_matched_in_linear_time():
    assert not dfa.fully_matches(_whole("^(a+)+b$"), "a" * 2000)


def test_lengths_are_those_of_the_shortest_and_the_longest_text():
    assert regex_ast.text_lengths(_whole("^a{2,5}(b|cc)?$")) == (2, 7)
    assert regex_ast.text_lengths(_whole("^a+$")) == (1, None)
    assert regex_ast.text_lengths(regex_ast.NO_MATCH) is None


@pytest.mark.parametrize(
    ("one", "two", "meets"),
    [("^a", "b$", True), ("^a", "^b", False), ("^(aa)+$", "^.{3}$", False), ("^a*$", "^$", True)],
)
def test_whether_two_patterns_meet_is_decided(one, two, meets):
    assert dfa.intersects(_whole(one), _whole(two)) is meets


def test_what_is_left_without_others_is_written_as_a_pattern():
    left = dfa.difference([_whole("^[ab]{1,2}$")], [_whole("^a"), regex_ast.literal_regex("bb")])
    kept = [text for text in ("a", "b", "ab", "ba", "bb", "") if dfa.fully_matches(left, text)]
    assert kept == ["b", "ba"]
    assert re.compile(regex_ast.to_anchored_pattern(left)).search("ba")


def test_too_large_a_set_is_not_decided():
    with pytest.raises(dfa.DfaTooComplex):
        dfa.difference([_whole("^(a|b)*a(a|b){14}$")], [_whole("^b")])


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("time", "23:59:59Z", "24:00:00Z"),
        ("date-time", "2000-02-29T00:00:00.5+01:00", "1900-02-29T00:00:00Z"),
        ("duration", "P1Y2M3DT4H5M6S", "P1S"),
        ("email", "a.b+c@d-e.org", "a..b@c"),
        ("hostname", "a-b.c", "-a.b"),
        ("ipv4", "255.0.10.1", "256.0.0.1"),
        ("ipv6", "1::8:127.0.0.1", "1::2::3"),
        ("uri", "https://u@h.org:80/a/b?c=d#e", "//h/a"),
        ("uri-reference", "../a?b", "a b"),
        ("uuid", "00112233-4455-6677-8899-aAbBcCdDeEfF", "00112233445566778899aabbccddeeff"),
        ("json-pointer", "/a~1b/0", "a"),
        ("base64", "YWI=", "YWI"),
    ],
)
def test_a_format_is_what_validators_take(name, good, bad):
    node = formats.node(name)
    assert dfa.fully_matches(node, good)
    assert not dfa.fully_matches(node, bad)
    jsonschema.Draft202012Validator.FORMAT_CHECKER.check(good, name)


def test_all_formats_are_read():
    for name in formats.KNOWN:
        node = formats.node(name)
        assert node is None or regex_ast.text_lengths(node) is not None


@pytest.mark.parametrize(
    "pattern",
    [
        *("^(?!aws:)[a-z:]+$", "^(?=a)b", "^(?=.*[0-9])[a-z0-9]{2,4}$", "^(?!a$)a?b?$"),
        *("^(?!.*--)[a-z-]+$", "^(?!(a|[)b])x)[)abx]+$", "^(?!x$|y$)(x|y|z)+$", "^(?![ab])"),
    ],
)
def test_look_aheads_at_the_start_are_differences(pattern):
    draw = random.Random(1)
    narrow, wide = dfa.parse_search(pattern), dfa.parse_search(pattern, True)
    for _ in range(300):
        text = "".join(draw.choice("ab-x0:)yzws") for _ in range(draw.randint(0, 5)))
        expected = re.search(pattern, text) is not None
        for node in (narrow, wide):
            assert (node != regex_ast.NO_MATCH and dfa.fully_matches(node, text)) == expected, text


def test_general_categories_are_classes():
    letters = dfa.parse_search(r"^\p{Lu}[\p{L}\p{Zs}]+\P{Letter}$")
    assert dfa.fully_matches(letters, "Éa ß1")
    assert not dfa.fully_matches(letters, "éa ß1")
    for unknown in (r"\p{Graph}", r"\p{Xx}", r"\pL"):
        with pytest.raises(RequestError, match="general category"):
            regex_ast.parse_regex(unknown)
