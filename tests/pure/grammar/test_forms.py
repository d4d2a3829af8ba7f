"""Forms as they travel: JSON text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.grammar.forms import (
    Choice,
    Either,
    Grammar,
    Json,
    Regex,
    Repeat,
    Seq,
    Tag,
    Tags,
    Text,
    Until,
    dump,
    load,
)

TEXT = st.text(max_size=6)
LEAVES = st.one_of(
    st.builds(Json, TEXT, whitespace=st.booleans(), closed=st.booleans(), spacing=st.none() | TEXT),
    st.builds(Regex, TEXT),
    st.builds(Choice, st.lists(TEXT, max_size=3).map(tuple)),
    st.builds(Grammar, TEXT),
    st.builds(Text, TEXT),
    st.builds(Until, TEXT),
)


def _joined(parts):
    many = st.lists(parts, max_size=3).map(tuple)
    tag = st.builds(Tag, TEXT, parts, TEXT)
    return st.one_of(
        st.builds(Seq, many),
        st.builds(Either, many),
        st.builds(Repeat, parts, TEXT, st.integers(0, 3), st.none() | st.integers(0, 9)),
        tag,
        st.builds(
            Tags,
            st.lists(TEXT, max_size=2).map(tuple),
            st.lists(tag, max_size=2).map(tuple),
            st.integers(0, 2),
            st.booleans(),
        ),
    )


FORMS = st.recursive(LEAVES, _joined, max_leaves=8)


@given(FORMS)
def test_what_is_dumped_is_loaded_as_it_was(form):
    assert load(dump(form)) == form


@given(FORMS, FORMS)
def test_forms_are_equal_where_their_dumps_are(one, two):
    assert (one == two) == (dump(one) == dump(two))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '{"kind":"nothing"}', '{"kind":"regex"}', '{"kind":"text","x":1}', "["],
)
def test_what_is_no_form_is_refused(text):
    with pytest.raises(RequestError, match="not a form"):
        load(text)
