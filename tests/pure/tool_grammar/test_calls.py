"""What forms of calls allow is what a model of the dialect writes and what its reader understands."""

import json
import re

import jsonschema
import pytest

from quire.text.output.json_tool_parser import JSON_LIST_FORMAT
from quire.text.output.parsed_text import collect_pieces
from quire.text.tools._render_calls import call_frame
from quire.text.tools.parser import ToolParser
from quire.tool_grammar import call_grammar
from quire.tool_grammar.parameter_schemas import arguments_schema
from tests.pure.tool_grammar.tools import DECLARED, TOOLS, arguments
from tests.pure.tool_grammar.walking import Trial, rng
from tests.pure.tools.rendering import CallToRender, render_calls
from tests.pure.tools.samples import FORMATS, dialect_of

EVERY = [*FORMATS, "json"]


def of(name):
    return JSON_LIST_FORMAT if name == "json" else dialect_of(name)


def literals(dialect):
    """Texts by which calls go on and end."""
    how = dialect.template
    made = ['"', "}", '"}', "]", *[how.after] * 4, how.between, *how.call.split("«arguments»")[1:]]
    for part in (how.param, how.call):
        made += [piece.partition("«")[0] for piece in part.split("»")]
    return [text for text in made if text and "«" not in text]


def made_calls(rand):
    names = rand.choices(list(DECLARED), k=rand.randrange(1, 4))
    return [CallToRender(name, arguments(rand, name)) for name in names]


@pytest.fixture(scope="module", params=EVERY)
def trial(request):
    dialect = of(request.param)
    return dialect, Trial(call_grammar.calls_grammar(dialect, list(DECLARED.values())))


def test_what_a_model_writes_is_allowed(trial, often):
    dialect, form = trial
    for seed in range(12 * often):
        asked = made_calls(rng(seed))
        text = render_calls(dialect, asked)
        assert form.accepts(text), form.taken(text)


def is_torn(text, dialect):
    """A string within JSON between tags holds a tag: there readers see the end of the value."""
    end = dialect.template.param.partition("«value»")[2].strip()
    whole = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    return dialect.template.notation == "params" and text.count(end[:4]) != whole.count(end[:4])


def said_in(text, dialect):
    """What the dialect's reader takes from a text; every call is whole and as declared."""
    speech = collect_pieces(ToolParser(dialect, TOOLS).push(text, last=True))
    assert not speech.notes, (text, speech)
    for call in speech.calls:
        assert call.outcome == "whole", (text, call)
        schema = arguments_schema(DECLARED[call.name].parameters)
        jsonschema.validate(json.loads(call.arguments), schema)
    return speech


def test_what_is_allowed_reads_as_calls_that_the_schemas_allow(trial, often):
    dialect, form = trial
    texts = [form.walk(rng(seed), literals(dialect)) for seed in range(20 * often)]
    texts = [text for text in texts if text is not None and not is_torn(text, dialect)]
    assert len(texts) >= 3
    for text in texts:
        speech = said_in(text, dialect)
        assert speech.calls, text
        assert not speech.text.strip(), (text, speech)


def test_one_call_only_is_one_call_only(trial):
    dialect, _ = trial
    form = Trial(call_grammar.calls_grammar(dialect, list(DECLARED.values()), most=1))
    one = CallToRender("get_weather", {"city": "Rome"})
    assert form.accepts(render_calls(dialect, [one]))
    assert not form.accepts(render_calls(dialect, [one, one]))


@pytest.fixture(scope="module", params=[name for name in EVERY if name not in ("json", "openai")])
def loose(request):
    dialect = of(request.param)
    return dialect, Trial(call_grammar.text_with_calls_grammar(dialect, list(DECLARED.values())))


@pytest.mark.parametrize(
    "text", ["", "Hello.", "a < b, {x}, [y]\n\nand 汉 `code`", "It is:\n 1. x"]
)
def test_text_without_calls_is_as_free_as_ever(loose, text):
    assert loose[1].accepts(text)


def test_calls_may_follow_text(loose, often):
    dialect, form = loose
    for seed in range(4 * often):
        text = "I look it up.\n" + render_calls(dialect, made_calls(rng(seed)))
        assert form.accepts(text), form.taken(text)


def test_a_call_of_what_was_not_declared_cannot_be_written(loose):
    dialect, form = loose
    for name in ("forecast", "get_weathers", "get"):
        assert not form.accepts(
            "So: \n" + render_calls(dialect, [CallToRender(name, {"city": "Rome"})])
        )
    assert not form.accepts(
        "\n" + render_calls(dialect, [CallToRender("get_weather", {"city": "x", "sky": "y"})])
    )


def test_what_calls_of_free_text_say_the_schemas_allow(loose, often):
    dialect, form = loose
    marks = [mark for one in dialect.syntaxes for mark in one.begin]
    begin = "So:\n" + dialect.template.before + call_frame(dialect, "order").begin
    read = 0
    for seed in range(10 * often):
        more = [*literals(dialect), *marks, "\n"]
        text = form.walk(rng(seed), more, most=2500, ends=0.1, begin=begin)
        if text is not None and not is_torn(text, dialect):
            assert said_in(text, dialect).calls
            read += 1
    assert read
