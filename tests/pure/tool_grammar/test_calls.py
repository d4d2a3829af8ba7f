"""Grammars of calls allow what a model of the format writes and what its parser accepts."""

import json
import re

import jsonschema
import pytest

from quire.text.output.json_tool_parser import JSON_LIST_FORMAT
from quire.text.output.parsed_text import collect_pieces
from quire.text.tools._render_calls import call_frame
from quire.text.tools.base import closing_literals
from quire.text.tools.parser import ToolParser
from quire.tool_grammar import call_grammar
from quire.tool_grammar.parameter_schemas import arguments_schema
from tests.pure.tool_grammar.tools import DECLARED, TOOLS, arguments
from tests.pure.tool_grammar.walking import Trial, rng
from tests.pure.tools.rendering import CallToRender, render_calls
from tests.pure.tools.samples import FORMATS, format_of

pytestmark = pytest.mark.sampled(3)

EVERY = [*FORMATS, "json"]


def of(name):
    return JSON_LIST_FORMAT if name == "json" else format_of(name)


def literals(tool_format):
    """Literals within and after calls."""
    template = tool_format.template
    parser = [
        '"',
        "}",
        '"}',
        "]",
        *[template.after] * 4,
        template.between,
        *template.call.split("«arguments»")[1:],
    ]
    for part in (template.param, template.call):
        parser += [piece.partition("«")[0] for piece in part.split("»")]
    return [text for text in parser if text and "«" not in text]


def made_calls(rand):
    names = rand.choices(list(DECLARED), k=rand.randrange(1, 4))
    return [CallToRender(name, arguments(rand, name)) for name in names]


@pytest.fixture(scope="module", params=EVERY)
def trial(request):
    tool_format = of(request.param)
    return tool_format, Trial(call_grammar.calls_grammar(tool_format, list(DECLARED.values())))


def test_rendered_calls_are_allowed(trial, often):
    tool_format, grammar = trial
    for seed in range(6 * often):
        asked = made_calls(rng(seed))
        text = render_calls(tool_format, asked)
        assert grammar.accepts(text), grammar.taken(text)


def is_torn(text, tool_format):
    """A string within JSON between tags contains a tag that ends a value, a call or all calls: the
    parser ends the value there."""
    if tool_format.template.notation not in ("params", "elements"):
        return False
    end = tool_format.template.param.partition("«value»")[2].strip()
    ends = [end, *(one for made in tool_format.syntaxes for one in closing_literals(made.steps))]
    whole = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    return any(text.count(one[:4]) != whole.count(one[:4]) for one in ends)


def parse_valid(text, tool_format):
    """The parsed text; every call in it is whole and as declared."""
    parsed = collect_pieces(ToolParser(tool_format, TOOLS).push(text, last=True))
    assert not parsed.notes, (text, parsed)
    for call in parsed.calls:
        assert call.outcome == "whole", (text, call)
        schema = arguments_schema(DECLARED[call.name].parameters)
        jsonschema.validate(json.loads(call.arguments), schema)
    return parsed


def test_allowed_text_parses_to_valid_calls(trial, often):
    tool_format, grammar = trial
    texts = [grammar.walk(rng(seed), literals(tool_format)) for seed in range(10 * often)]
    texts = [text for text in texts if text is not None and not is_torn(text, tool_format)]
    assert len(texts) >= 3
    for text in texts:
        parsed = parse_valid(text, tool_format)
        assert parsed.calls, text
        assert not parsed.text.strip(), (text, parsed)


def test_a_maximum_of_one_allows_one_call(trial):
    tool_format, _ = trial
    grammar = Trial(call_grammar.calls_grammar(tool_format, list(DECLARED.values()), max_calls=1))
    one = CallToRender("get_weather", {"city": "Rome"})
    assert grammar.accepts(render_calls(tool_format, [one]))
    assert not grammar.accepts(render_calls(tool_format, [one, one]))


@pytest.fixture(scope="module", params=[name for name in EVERY if name not in ("json", "openai")])
def strict_text(request):
    tool_format = of(request.param)
    return tool_format, Trial(
        call_grammar.text_with_calls_grammar(tool_format, list(DECLARED.values()))
    )


@pytest.mark.parametrize(
    "text", ["", "Hello.", "a < b, {x}, [y]\n\nand 汉 `code`", "It is:\n 1. x"]
)
def test_text_without_calls_is_unconstrained(strict_text, text):
    assert strict_text[1].accepts(text)


def test_calls_may_follow_text(strict_text, often):
    tool_format, grammar = strict_text
    for seed in range(4 * often):
        text = "I look it up.\n" + render_calls(tool_format, made_calls(rng(seed)))
        assert grammar.accepts(text), grammar.taken(text)


def test_undeclared_functions_and_parameters_are_not_allowed(strict_text):
    tool_format, grammar = strict_text
    for name in ("forecast", "get_weathers", "get"):
        assert not grammar.accepts(
            "So: \n" + render_calls(tool_format, [CallToRender(name, {"city": "Rome"})])
        )
    assert not grammar.accepts(
        "\n" + render_calls(tool_format, [CallToRender("get_weather", {"city": "x", "sky": "y"})])
    )


def test_calls_in_unconstrained_text_are_valid(strict_text, often):
    tool_format, grammar = strict_text
    marks = [mark for one in tool_format.syntaxes for mark in one.begin]
    begin = "So:\n" + tool_format.template.before + call_frame(tool_format, "order").begin
    read = 0
    for seed in range(6 * often):
        more = [*literals(tool_format), *marks, "\n"]
        text = grammar.walk(rng(seed), more, most=2500, ends=0.1, begin=begin)
        if text is not None and not is_torn(text, tool_format):
            assert parse_valid(text, tool_format).calls
            read += 1
    assert read
