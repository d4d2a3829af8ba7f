"""Random texts: nothing is raised, nothing is lost, nothing is invented."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.text.tools._render_calls import call_frame
from quire.text.tools.base import closing_literals
from tests.pure.tools.rendering import CallToRender, render_calls
from tests.pure.tools.samples import FORMATS, format_of, function, read

pytestmark = pytest.mark.sampled(3)

LOOSE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


def fragments(tool_format):
    """Shards of calls of a format, of other ones, and of nothing in particular."""
    one = format_of(tool_format)
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


@pytest.mark.parametrize("tool_format", FORMATS)
def test_random_text_parses_alike_at_every_split_and_loses_nothing(tool_format, often):
    @settings(max_examples=12 * often, deadline=None, suppress_health_check=LOOSE)
    @given(fragments(tool_format), st.data())
    def check(text, data):
        parsed = read(tool_format, text)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        assert read(tool_format, *parts) == parsed
        for call in parsed.calls:
            assert call.name
            assert call.arguments, "a call with nothing in it"
            if call.outcome == "whole":
                assert isinstance(json.loads(call.arguments), dict)
        if not parsed.calls and tool_format != "openai":
            assert parsed.text == text
        if parsed.notes or not parsed.calls:
            return
        assert all(call.outcome == "whole" for call in parsed.calls)

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


@pytest.mark.parametrize("tool_format", FORMATS)
def test_rendered_calls_parse_to_the_same_calls(tool_format, often):
    @settings(max_examples=10 * often, deadline=None, suppress_health_check=LOOSE)
    @given(CALLS)
    def check(calls):
        parsed = read(
            tool_format, render_calls(format_of(tool_format), calls), tools=declared_for(calls)
        )
        emitted = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
        assert emitted == [(call.name, dict(call.arguments)) for call in calls]
        assert (parsed.text, parsed.notes) == ("", [])

    check()


@pytest.mark.parametrize("tool_format", FORMATS)
def test_text_between_calls_is_content(tool_format):
    one = format_of(tool_format)
    call = render_calls(one, [CallToRender("now", {})])
    between = (
        "<|start|>assistant<|channel|>final<|message|>{}<|end|>"
        if tool_format == "openai"
        else "{}"
    )
    words = ["first", "second", "third"]
    text = "\n".join(part for word in words for part in (between.format(word), call))
    parsed = read(tool_format, text)
    assert "".join(parsed.text.split()) == "".join(words)
    assert len(parsed.calls) == 3


@pytest.mark.parametrize("tool_format", FORMATS)
def test_call_frames_around_arguments_are_calls(tool_format):
    call = CallToRender("get_weather", {"city": "Rom"})
    first = call_frame(format_of(tool_format), "get_weather", 0)
    template = first.template
    alone = render_calls(format_of(tool_format), [call])
    inside = alone[
        len(template.before + first.begin) : len(alone) - len(first.end + template.after)
    ]
    second = call_frame(format_of(tool_format), "get_weather", 1)
    calls = template.between.join(one.begin + inside + one.end for one in (first, second))
    assert template.before + calls + template.after == render_calls(
        format_of(tool_format), [call, call]
    )
    if template.notation == "json":
        assert json.loads(inside) == {"city": "Rom"}
