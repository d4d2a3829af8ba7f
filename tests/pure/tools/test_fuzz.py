"""Made-up texts: whatever is written, nothing is raised, nothing is lost, nothing is invented."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.text.tools._render_calls import call_frame
from quire.text.tools.base import closing_literals
from tests.pure.tools.rendering import CallToRender, render_calls
from tests.pure.tools.samples import FORMATS, dialect_of, function, read

LOOSE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


def fragments(dialect):
    """Shards of calls of a dialect, of other ones, and of nothing in particular."""
    one = dialect_of(dialect)
    marks = [m for form in one.syntaxes for m in form.begin]
    ends = [c for form in one.syntaxes for c in closing_literals(form.steps)]
    call = render_calls(one, [CallToRender("get_weather", {"city": "Rom", "days": 2})])
    shards = [call[a : a + 9] for a in range(0, len(call), 5)]
    plain = [
        '"',
        "\\",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\n",
        " ",
        "name",
        "now",
        "é",
        "<",
        "\ud800",
        "\0",
    ]
    known = st.sampled_from([call, *marks, *ends, *shards, *plain, "<tool_call>", "<think>"])
    return st.lists(known | st.text(max_size=6), max_size=14).map("".join)


@pytest.mark.parametrize("dialect", FORMATS)
def test_whatever_is_written_is_told_the_same_at_every_split_and_not_lost(dialect, often):
    @settings(max_examples=12 * often, deadline=None, suppress_health_check=LOOSE)
    @given(fragments(dialect), st.data())
    def check(text, data):
        said = read(dialect, text)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        assert read(dialect, *parts) == said
        for call in said.calls:
            assert call.name
            assert call.arguments, "a call with nothing in it"
            if call.outcome == "whole":
                assert isinstance(json.loads(call.arguments), dict)
        if not said.calls and dialect != "openai":
            assert said.text == text
        if said.notes or not said.calls:
            return
        assert all(call.outcome == "whole" for call in said.calls)

    check()


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}


def declared_for(calls):
    """Schemas that say of each argument what it is."""
    tools = []
    for call in calls:
        kinds = {key: kind_of(value) for key, value in call.arguments.items()}
        tools.append(function(call.name, **{key: {"type": kind} for key, kind in kinds.items()}))
    return tools


def kind_of(value):
    if value is None:
        return "null"
    return KINDS.get(type(value), "object")


CALLS = st.lists(
    st.builds(CallToRender, NAMES, st.dictionaries(NAMES, VALUES, max_size=4)),
    min_size=1, max_size=3, unique_by=lambda call: call.name,
)  # fmt: skip


@pytest.mark.parametrize("dialect", FORMATS)
def test_what_is_written_as_calls_is_read_as_those_calls(dialect, often):
    @settings(max_examples=10 * often, deadline=None, suppress_health_check=LOOSE)
    @given(CALLS)
    def check(calls):
        said = read(dialect, render_calls(dialect_of(dialect), calls), tools=declared_for(calls))
        told = [(call.name, json.loads(call.arguments)) for call in said.calls]
        assert told == [(call.name, dict(call.arguments)) for call in calls]
        assert (said.text, said.notes) == ("", [])

    check()


@pytest.mark.parametrize("dialect", FORMATS)
def test_words_between_calls_are_all_kept(dialect):
    one = dialect_of(dialect)
    call = render_calls(one, [CallToRender("now", {})])
    between = (
        "<|start|>assistant<|channel|>final<|message|>{}<|end|>" if dialect == "openai" else "{}"
    )
    words = ["first", "second", "third"]
    text = "\n".join(part for word in words for part in (between.format(word), call))
    said = read(dialect, text)
    assert "".join(said.text.split()) == "".join(words)
    assert len(said.calls) == 3


@pytest.mark.parametrize("dialect", FORMATS)
def test_frames_with_arguments_in_them_are_calls(dialect):
    call = CallToRender("get_weather", {"city": "Rom"})
    first = call_frame(dialect_of(dialect), "get_weather", 0)
    how = first.template
    alone = render_calls(dialect_of(dialect), [call])
    inside = alone[len(how.before + first.begin) : len(alone) - len(first.end + how.after)]
    second = call_frame(dialect_of(dialect), "get_weather", 1)
    calls = how.between.join(one.begin + inside + one.end for one in (first, second))
    assert how.before + calls + how.after == render_calls(dialect_of(dialect), [call, call])
    if how.notation == "json":
        assert json.loads(inside) == {"city": "Rom"}
