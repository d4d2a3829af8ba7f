"""Forms made at random: what a backend lets end is what the oracle says may end."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.grammar.backends.llguidance_backend import LLGuidanceCompiler
from quire.grammar.grammar_ast import (
    AlternationNode,
    ChoiceNode,
    LiteralNode,
    RegexNode,
    RepeatNode,
    SequenceNode,
    TaggedTextNode,
    TagNode,
    UntilNode,
)
from tests import grammar_contract as contract
from tests.grammar_cases import ORACLE, VOCABULARY, ids_of, symbols, text_of

COMPILER = LLGuidanceCompiler(VOCABULARY)
PATTERNS = ["a*", "[ab]+", "a?b", "(?:ab)*", "<|a", "b{0,2}", "[^a]*", "[^<]*<", "(?:a|[^<b]+)b"]
MARKS = ["a", "ab", "aa", "aba", "<t>", "<tool>", "a<tool>", "<tool>b", "</think>"]
PIECES = ["a", "b", "<", "ab", "<t>", "<tool>", "</think>"]
SHORT = st.text("ab<", max_size=3)
LEAVES = st.one_of(
    st.builds(LiteralNode, SHORT | st.sampled_from(["<tool>", "a<tool>b", "<think>"])),
    st.builds(ChoiceNode, st.lists(SHORT, min_size=1, max_size=4).map(tuple)),
    st.builds(RegexNode, st.sampled_from(PATTERNS)),
    st.builds(UntilNode, st.sampled_from(MARKS)),
)


def _joined(parts):
    some = st.lists(parts, min_size=1, max_size=3).map(tuple)
    begun = st.sampled_from(["<t>", "<tool>"])
    tag = st.builds(
        lambda begin, more, *rest: TagNode(begin + more, *rest), begun, SHORT, parts, SHORT
    )
    tags = st.lists(tag, max_size=3).map(tuple)
    return st.one_of(
        st.builds(SequenceNode, some),
        st.builds(AlternationNode, some),
        st.builds(RepeatNode, parts, SHORT, st.integers(0, 1), st.none() | st.integers(1, 3)),
        st.builds(TagNode, SHORT, parts, SHORT),
        st.builds(
            TaggedTextNode,
            st.just(("<t>", "<tool>")),
            tags,
            min_tags=st.integers(0, 1),
            only_first=st.booleans(),
        ),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.recursive(LEAVES, _joined, max_leaves=5), st.integers(0, 99))
def test_what_may_end_is_a_text_of_the_form(form, seed):
    chance = random.Random(seed)
    try:
        grammar = COMPILER.compile(form)
    except RequestError as error:
        assert "clear end" in str(error) or "none is given" in str(error)  # noqa: PT017
        return
    for matcher, ids in contract.walk(grammar, chance, most=10):
        text = text_of(ids)
        assert not matcher.is_complete or (text is not None and ORACLE.whole(form, text)), ids
    for _ in range(6):
        text = "".join(chance.choices(PIECES, k=chance.randrange(7)))
        matcher, ids = grammar.matcher(), ids_of(text)
        whole = contract.accepted(matcher, ids) == len(ids) and matcher.is_complete
        assert not whole or ORACLE.whole(form, symbols(text)), text
