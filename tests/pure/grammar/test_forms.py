"""Forms as they travel: JSON text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.grammar.grammar_ast import (
    AlternationNode,
    ChoiceNode,
    JsonNode,
    LiteralNode,
    RegexNode,
    RepeatNode,
    SequenceNode,
    TaggedTextNode,
    TagNode,
    UntilNode,
    UserGrammarNode,
    dump_node,
    load_node,
)

TEXT = st.text(max_size=6)
LEAVES = st.one_of(
    st.builds(
        JsonNode,
        TEXT,
        whitespace=st.booleans(),
        closed=st.booleans(),
        whitespace_pattern=st.none() | TEXT,
    ),
    st.builds(RegexNode, TEXT),
    st.builds(ChoiceNode, st.lists(TEXT, max_size=3).map(tuple)),
    st.builds(UserGrammarNode, TEXT),
    st.builds(LiteralNode, TEXT),
    st.builds(UntilNode, TEXT),
)


def _joined(parts):
    many = st.lists(parts, max_size=3).map(tuple)
    tag = st.builds(TagNode, TEXT, parts, TEXT)
    return st.one_of(
        st.builds(SequenceNode, many),
        st.builds(AlternationNode, many),
        st.builds(RepeatNode, parts, TEXT, st.integers(0, 3), st.none() | st.integers(0, 9)),
        tag,
        st.builds(
            TaggedTextNode,
            st.lists(TEXT, max_size=2).map(tuple),
            st.lists(tag, max_size=2).map(tuple),
            st.integers(0, 2),
            st.booleans(),
        ),
    )


FORMS = st.recursive(LEAVES, _joined, max_leaves=8)


@given(FORMS)
def test_what_is_dumped_is_loaded_as_it_was(form):
    assert load_node(dump_node(form)) == form


@given(FORMS, FORMS)
def test_forms_are_equal_where_their_dumps_are(one, two):
    assert (one == two) == (dump_node(one) == dump_node(two))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '{"kind":"nothing"}', '{"kind":"regex"}', '{"kind":"text","x":1}', "["],
)
def test_what_is_no_form_is_refused(text):
    with pytest.raises(RequestError, match="not a form"):
        load_node(text)
