"""A small vocabulary, and forms over it with texts that are and are not theirs.

Cases of the contract of grammar backends.
A text is a str, in which names of special tokens stand for those, or a list of characters, in
which they are spelled out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

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
from quire.grammar.vocabulary import Vocabulary
from tests.grammar_oracle import Oracle

WORDS = [
    *(b'{"', b'":', b'", "', b'"}', b"}}", b"]}", b"  ", b" \n", b"\n\n", b"\n   ", b"true", b"tr"),
    *(
        b"ab",
        b"abc",
        b"aba",
        b"</",
        b"<t",
        b"</t>",
        b"<tool",
        b"call>",
        b"12",
        b"0.5",
        b"1e",
        b"yes",
    ),
    *("é".encode(), "日本".encode(), "日".encode()[:2], "本".encode()[1:] + b"a", "😀".encode()),
    *(
        b'"a"',
        b'"b"',
        b"null",
        b"\\u",
        b'\\"',
        b"</think>",
        b"<think",
        b"\xff",
        b"\xc3(",
        b"x",
        b"ab",
    ),
]
SPECIAL = ["<end>", "<stop>", "<think>", "</think>", "<tool>", "</tool>", "<pad>"]
HOLES = 3


def vocabulary(size: int = 320) -> Vocabulary:
    words = [*(bytes([i]) for i in range(256)), *WORDS]
    start = len(words)
    tokens = [*words, *(name.encode() for name in SPECIAL), *([b""] * HOLES)]
    special = tuple((start + i, name) for i, name in enumerate(SPECIAL))
    return Vocabulary(tuple(tokens), special, (start, start + 1), size)


VOCABULARY = vocabulary()
IDS = {name: i for i, name in VOCABULARY.special_tokens}
ORACLE = Oracle(IDS)


@dataclass(frozen=True)
class Case:
    name: str
    form: GrammarNode
    good: list = field(default_factory=list)
    bad: list = field(default_factory=list)
    by_oracle: bool = True
    """Whether the oracle knows the form: it knows no callers' grammars."""


def symbols(text: str | list[str]) -> tuple:
    return ORACLE.cut(text) if isinstance(text, str) else tuple(text)


def ids_of(text: str | list[str], chance=None) -> list[int]:
    """Tokens of a text: those of single bytes, or (with chance) any that fit."""
    made: list[int] = []
    plain = b""
    for one in [*symbols(text), None]:
        if isinstance(one, str):
            plain += one.encode()
            continue
        while plain:
            fits = [i for i, t in enumerate(VOCABULARY.tokens) if t and plain.startswith(t)]
            fits = [i for i in fits if i not in IDS.values()]
            made.append(chance.choice(fits) if chance else plain[0])
            plain = plain[len(VOCABULARY.tokens[made[-1]]) :]
        made += [] if one is None else [one]
    return made


def text_of(ids: list[int]) -> tuple | None:
    """Symbols of tokens; None where the bytes are not whole characters."""
    made: list[str | int] = []
    plain = b""
    for i in [*ids, None]:
        if i is not None and i not in IDS.values():
            plain += VOCABULARY.tokens[i]
            continue
        try:
            made += plain.decode()
        except UnicodeDecodeError:
            return None
        plain = b""
        made += [] if i is None else [i]
    return tuple(made)


def schema(**parts) -> str:
    return json.dumps(parts)


POINT = schema(
    type="object",
    properties={"a": {"type": "integer"}, "b": {"type": "string"}},
    required=["a"],
    additionalProperties=False,
)
INT = JsonNode(schema(type="integer"))
CALL = TagNode("<tool>", INT, "</tool>")

CASES = [
    Case("text", LiteralNode("abc"), ["abc"], ["", "ab", "abcd", "xabc"]),
    Case("no text", LiteralNode(""), [""], ["a"]),
    Case(
        "text of every kind",
        LiteralNode('é"\\\n\t\x00日/[]{}<tool>"'),
        ['é"\\\n\t\x00日/[]{}<tool>"'],
        [list('é"\\\n\t\x00日/[]{}<tool>"'), 'é"\\\n'],
    ),
    Case("special within text", LiteralNode("a<think>b"), ["a<think>b"], [list("a<think>b"), "ab"]),
    Case("regex", RegexNode(r"[a-c]{2,3}\d?"), ["ab", "abc1"], ["a", "abcd", "ab12", "<think>"]),
    Case("regex, anchored", RegexNode(r"^(?:ab|x+)$"), ["ab", "xxx"], ["", "abx"]),
    Case("regex of alternatives, anchored apart", RegexNode(r"^ab$|^x$"), ["ab", "x"], ["abx", ""]),
    Case("regex, any text", RegexNode(r"(?s:.*)"), ["", "日本\n<t", "😀"], ["<think>"]),
    Case("regex, lazy", RegexNode(r"a+?b??"), ["a", "aab"], ["b"]),
    Case("regex, unicode", RegexNode("[é-ÿ]|日本?|😀+"), ["é", "日", "日本", "😀😀"], ["本", "e"]),
    Case("regex, slashes", RegexNode(r'"/\*[^*/]*\*/"'), ['"/*a*/"'], ['"/**a*/"']),
    Case("choice", ChoiceNode(("ab", "abc", "x")), ["ab", "abc", "x"], ["a", "abx", "xab", ""]),
    Case(
        "choice of every kind",
        ChoiceNode(('"', "\n", "日本", "a/b", "\\d", "<think>", "")),
        ['"', "\n", "日本", "a/b", "\\d", list("<think>"), ""],
        ["1", "<think>", "日"],
    ),
    Case("json", JsonNode(POINT), ['{"a":1}', '{"a": 12, "b": "x\\"é"}', '{\n "a" :-1}'],
         ['{"b":""}', '{"a":   1}', ' {"a":1}', '{"a":1} ', '{"a":01}', '{"a":1,"b":"<tool>"}']),
    Case("json without spaces", JsonNode(POINT, whitespace=False), ['{"a":1,"b":""}'], ['{"a": 1}']),
    Case("any json", JsonNode("true"), ["null", "-0.5e7", '[[], {"é": [true, "\\u001f"]}]', '"日本"'],
         ["nul", "[1,]", "01", "{'a':1}", '"\n"', ""]),
    Case("json, spaces within a string", JsonNode(schema(type="string")), ['"     "', '""'], ['"a']),
    Case("number then text", SequenceNode((INT, LiteralNode("\n</t>"))), ["5\n</t>", "-12\n</t>"], ["5</t>", "5"]),
    Case("until", UntilNode("</t>"), ["</t>", "a<</t>", "</t</t>", "日本</t>"], ["</t", "</t>a", "<think></t>"]),
    Case("until a mark that overlaps itself", UntilNode("aba"), ["aba", "ababa"[:3], "xaba", "aaba"], ["ababa", "ab"]),
    Case(
        "until a special token",
        UntilNode("</think>"),
        ["</think>", "ab</think>", [*"ab</think>"]],
        ["ab", "a</think>b", [*"</think>a"], "<think></think>"],
    ),
    Case("until text and a special token", UntilNode("\n</think>"), ["\n</think>", "a\n\n</think>", [*"\n</think>"]],
         ["</think>", "a</think>"]),
    Case("until a special token and text", UntilNode("</think>\n"), ["</think>\n", [*"a</think>\n"]], ["</think>a", "</think>"]),
    Case(
        "reasoning, then a choice",
        SequenceNode((UntilNode("</think>"), RegexNode("[ \n]{0,2}"), ChoiceNode(("ab", "abc")))),
        ["x</think>ab", "</think>\n\nabc"],
        ["</think>\n\n\nab", "ab", "x</think>a"],
    ),
    Case("reasoning or not", AlternationNode((INT, SequenceNode((LiteralNode("<think>"), UntilNode("</think>"), INT)))),
         ["1", "<think>a</think>2"], ["a", "<think>1", "</think>1"]),
    Case("nothing in a row", SequenceNode(()), [""], ["a"]),
    Case("regular parts in a row", SequenceNode((RegexNode("a*"), LiteralNode("ab"), ChoiceNode(("b", "")))), ["ab", "aaabb"], ["aa", "b"]),
    Case("either, beginnings alike", AlternationNode((LiteralNode("ab"), ChoiceNode(("a", "c")), SequenceNode((LiteralNode("abx"), INT)), SequenceNode((LiteralNode("a"), INT)))),
         ["ab", "a", "abx1", "a1"], ["abx", "b"]),
    Case("either, one part empty", SequenceNode((INT, AlternationNode((LiteralNode(""), LiteralNode(";"))))), ["1", "1;"], [";", "1;;"]),
    Case("repeat", RepeatNode(INT, ",", 2, 3), ["1,2", "1,22,3"], ["1", "1,2,3,4", "1,", ""]),
    Case("repeat without end", RepeatNode(CALL, "\n", 1), ["<tool>1</tool>", "<tool>1</tool>\n<tool>2</tool>"], ["", "\n"]),
    Case("perhaps", RepeatNode(INT, min_count=0, max_count=1), ["", "1"], ["a"]),
    Case("never", RepeatNode(INT, min_count=0, max_count=0), [""], ["1"]),
    Case("repeat of text", RepeatNode(LiteralNode("ab"), "x", 0, None), ["", "ab", "abxab"], ["abab", "abx"]),
    Case(
        "separator that the end begins with",
        SequenceNode((LiteralNode("<f>\n"), RepeatNode(TagNode("<i>", INT, "</i>"), "\n"), LiteralNode("\n</f>"))),
        ["<f>\n<i>5</i>\n<i>6</i>\n</f>"],
        ["<f>\n</f>", "<f>\n<i>5</i></f>"],
    ),
    Case(
        "text that a wide part before it could eat",
        SequenceNode((INT, RegexNode("[a-z]*"), LiteralNode("b;"), INT)),
        ["1b;2", "1abb;2"],
        ["1;2", "1ab2"],
    ),
    Case(
        "parts that may be missing, and begin alike",
        SequenceNode((
            INT,
            RepeatNode(SequenceNode((LiteralNode("<p=a>"), INT)), min_count=0, max_count=1),
            RepeatNode(SequenceNode((LiteralNode("<p=b>"), RegexNode("[A-Z]{1,2}"), LiteralNode("</p>"))), min_count=0, max_count=1),
            LiteralNode("</f>"),
        )),
        ["1</f>", "1<p=a>2</f>", "1<p=b>XY</p></f>", "1<p=a>2<p=b>X</p></f>"],
        ["1<p=b>X</f>", "1<p=b>X</p><p=a>2</f>"],
    ),
    Case("tag", TagNode("<t>", INT, "</t>"), ["<t>1</t>"], ["<t></t>"]),
    Case(
        "tags behind text",
        TaggedTextNode(("<t",), (TagNode("<tx>", INT, "</t>"), TagNode("<ty>", RegexNode("[ab]+"), ";"))),
        ["", "ab<", "<tx>1</t>", "a<ty>ab;b<tx>2</t>c", "<<tx>1</t>"],
        ["<t", "<tz>", "<tx>a</t>", "a<tx>1</t><t", "<think>"],
    ),
    Case(
        "tags behind special tokens",
        TaggedTextNode(("<tool>",), (TagNode('<tool>{"a": ', INT, "}</tool>"), TagNode("<tool>x", LiteralNode(""), "</tool>"))),
        ["", "ab", '<tool>{"a": 1}</tool>', "a<tool>x</tool>b<tool>x</tool>"],
        ["<tool>", [*"<tool>"], "a<tool>y", "</tool>"],
    ),
    Case("a tag at least", TaggedTextNode(("<t>",), (TagNode("<t>", INT, "</t>"),), min_tags=1), ["a<t>1</t>b"], ["", "ab"]),
    Case("only the first tag", TaggedTextNode(("<t>",), (TagNode("<t>", INT, "</t>"),), only_first=True), ["ab", "a<t>1</t>"], ["<t>1</t>b"]),
    Case("one tag and no more", TaggedTextNode(("<t>",), (TagNode("<t>", INT, "</t>"),), 1, True), ["a<t>1</t>"], ["ab", "<t>1</t>b"]),
    Case("a trigger without a tag", TaggedTextNode(("<t>", "[x"), (TagNode("<t>", INT, "</t>"),)), ["[<t>1</t>["], ["[x", "a[x]"]),
    Case("no tags at all", TaggedTextNode(("<t>", "<tool>"), ()), ["", "<t", "ab"], ["<t>", "<tool>", [*"<tool>"]]),
    Case("a trigger within a special token's name", TaggedTextNode(("<to",), (TagNode("<tool>", INT, ""),)), ["a<tool>1b"[:0] or "a", "<tool>1"], ["<to", [*"<tool>1"]]),
    Case("an end token that is named", SequenceNode((LiteralNode("a<end>"), INT)), ["a<end>1"], ["a", "a<stop>1", "a1"]),
    Case("all end tokens named", LiteralNode("a<end>b<stop>"), ["a<end>b<stop>"], ["a<end>b"]),
    Case("ebnf, regular", UserGrammarNode('root ::= "a" b? # x\nb ::= [bc]{2} | "\\x41é"'), ["a", "abc", "aAé"], ["ab"], by_oracle=False),
    Case(
        "ebnf, recursive",
        UserGrammarNode('root ::= e\ne ::= t (("+" | "++") e)?\nt ::= [a-c]+ | "(" e ")" | <tool> n\nn ::= [0-9]'),
        ["ab", "(a+b)++c", "<tool>1+a"],
        ["", "a+", "(a", "<tool>", [*"<tool>1"]],
        by_oracle=False,
    ),
    Case(
        "lark",
        UserGrammarNode('start: "a" mid "b"\nmid: "(" mid ")" | NUM | <tool>\nNUM: /[0-9]+/\n'),
        ["a((1))b", "a<tool>b"],
        ["ab", "a(1b", [*"a<tool>b"]],
        by_oracle=False,
    ),
    Case("a grammar within a form", SequenceNode((LiteralNode("<think>"), UserGrammarNode('root ::= "(" root ")" | "x"'), LiteralNode("!"))), ["<think>((x))!"], ["x!"], by_oracle=False),
]  # fmt: skip
"""What every backend compiles alike."""
