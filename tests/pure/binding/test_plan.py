"""What is decided of calls: who writes them how, and who reads them."""

import pytest

from quire.binding.choice import Choice, choice
from quire.binding.plan import plan
from quire.binding.reasoning import ANY_TEXT
from quire.binding.rules import whole_form
from quire.errors import RequestError, Unsupported
from quire.grammar.forms import Json, Tags
from quire.grammar.words import House
from quire.text.forced import Arguments
from quire.text.readers import Began
from quire.text.speech import Call, gather
from quire.text.tools.choose import Chosen, choose
from quire.text.tools.machine import Parser
from tests.pure.binding.tools import TOOLS, function
from tests.pure.binding.walking import Trial

NAMES = ["get_weather", "now"]
WEATHER, NOW = TOOLS[0], TOOLS[1]
FORCED = Choice("required", said=True)
CITY = '{"city": "Rome"}'


def strict(tool):
    return {**tool, "function": {**tool["function"], "strict": True}}


# -- tool_choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (None, Choice("auto")),
        ("auto", Choice("auto", said=True)),
        ("none", Choice("none", said=True)),
        ("required", FORCED),
        ({"type": "function", "function": {"name": "now"}}, Choice("required", True, "now")),
        ({"type": "function", "name": "now"}, Choice("required", True, "now")),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "now"}],
            },
            Choice("auto", True, allowed=frozenset({"now"})),
        ),
    ],
)
def test_a_choice_is_understood(given, made):
    assert choice(given, NAMES) == made


@pytest.mark.parametrize(
    "given",
    [
        *("some", 5, {}, {"type": "function"}, {"type": "function", "function": {"name": "x"}}),
        {"type": "allowed_tools", "mode": "never", "tools": [{"name": "now"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]},
    ],
)
def test_a_choice_that_means_nothing_is_refused(given):
    with pytest.raises(RequestError):
        choice(given, NAMES)


def test_a_choice_of_what_would_run_in_the_server_is_refused_as_such():
    with pytest.raises(Unsupported):
        choice({"type": "web_search_preview"}, NAMES)


def test_no_call_can_be_asked_for_without_tools():
    with pytest.raises(RequestError, match="tools must be given"):
        choice("required", [])


# -- plans ----------------------------------------------------------------------------------------


def test_nothing_is_bound_or_read_where_nothing_asks_for_it():
    assert plan(None, TOOLS, Choice("auto")).bound is None
    assert not plan(None, TOOLS, Choice("auto")).reads
    assert not plan(choose("hermes"), TOOLS, Choice("none")).reads
    assert plan(choose("hermes"), TOOLS, Choice("auto")).bound is None
    assert plan(choose("hermes"), TOOLS, Choice("auto")).reads


def test_without_a_parser_calls_are_a_json_list():
    made = plan(None, TOOLS, FORCED)
    assert Trial(made.bound.form()).accepts(f'[{{"name": "get_weather", "parameters": {CITY}}}]')
    said = gather(made.reader().push('[{"name": "now", "parameters": {}}]', last=True))
    assert [call.name for call in said.calls] == ["now"]


def test_without_a_parser_a_function_that_is_named_is_its_arguments():
    made = plan(None, TOOLS, Choice("required", True, "get_weather"))
    assert Trial(made.bound.form()).accepts(CITY)
    said = gather(made.reader().push(CITY, last=True))
    assert [(call.name, call.arguments, call.end) for call in said.calls] == [
        ("get_weather", CITY, "whole")
    ]


def test_a_schema_that_the_dialect_cannot_write_is_forced_as_json():
    odd = function("f", {"a": {"type": "string", "format": "date"}}, ["a"])
    assert plan(choose("qwen3_coder"), [odd], FORCED).listed
    assert plan(choose("hermes"), [odd], FORCED).own is not None


def test_a_plug_in_that_says_nothing_of_writing_has_calls_forced_as_json():
    odd = Chosen("own", lambda *a, **k: None, None)
    assert plan(odd, TOOLS, FORCED).listed
    with pytest.raises(RequestError, match="'own'"):
        plan(odd, [strict(NOW)], Choice("auto"))


def test_strict_functions_bind_calls_and_leave_text_free():
    made = plan(choose("hermes"), [strict(WEATHER), NOW], Choice("auto"))
    assert isinstance(made.bound.calls, Tags)
    form = Trial(made.bound.form())
    assert form.accepts("Hello <b>")
    assert not form.accepts('<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>')


def test_strict_functions_that_the_dialect_cannot_write_are_refused_by_name():
    odd = strict(function("f", {"a": {"type": "string", "format": "date"}}, ["a"]))
    with pytest.raises(RequestError, match=r"qwen3_coder.*'a'"):
        plan(choose("qwen3_coder"), [odd], Choice("auto"))


def test_a_function_that_need_not_be_strict_may_be_called_with_anything():
    odd = function("f", {"a": {"type": "string", "format": "date"}}, ["a"])
    made = plan(choose("mimo"), [strict(NOW), odd], Choice("auto"))
    text = "<tool_call><function=f><parameter=a>soon</parameter></function></tool_call>"
    assert Trial(made.bound.form()).accepts(text)


def test_a_form_of_the_content_leaves_calls_possible():
    form = Json('{"type": "object", "properties": {"x": {"type": "integer"}}}')
    made = plan(choose("hermes"), [NOW], Choice("auto"), content=form)
    trial = Trial(made.bound.form())
    assert trial.accepts('{"x": 1}')
    assert trial.accepts('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not trial.accepts("Hello")


def test_forced_calls_leave_no_room_for_content():
    made = plan(choose("hermes"), TOOLS, FORCED, content=Json("true"))
    assert made.bound.content is None


def test_only_functions_that_are_allowed_can_be_called():
    some = Choice("auto", True, allowed=frozenset({"now"}))
    form = Trial(plan(choose("hermes"), TOOLS, some).bound.form())
    assert form.accepts('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not form.accepts(
        f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>'
    )


def test_text_of_messages_with_channels_is_free_in_the_last():
    made = plan(choose("openai"), [strict(NOW)], Choice("auto"))
    assert made.bound.content == ANY_TEXT


def test_an_end_token_that_ends_a_call_is_left_to_the_end_of_the_text():
    made = plan(choose("openai"), [NOW], FORCED, ends={"<|call|>"})
    assert Trial(made.bound.form()).accepts(
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    )


# -- the reader of bare arguments -----------------------------------------------------------------


def test_arguments_are_told_as_they_come():
    reader = Arguments("f", lambda: "1")
    assert [piece.call for piece in reader.push(' {"a"', last=False)] == [
        Call(0, "chatcmpl-tool-1", "f"),
        Call(0, arguments='{"a"'),
    ]
    assert [piece.call for piece in reader.push(": 1}", last=True)] == [
        Call(0, arguments=": 1}"),
        Call(0, end="whole"),
    ]


@pytest.mark.parametrize(("text", "end"), [('{"a": ', "cut"), ("[1]", "broken")])
def test_arguments_that_are_none_do_not_end_whole(text, end):
    (call,) = gather(Arguments("f").push(text, last=True)).calls
    assert call.end == end


def test_a_text_of_nothing_is_no_call():
    assert Arguments("f").push(" \n", last=True) == []


def test_what_reads_a_list_is_the_machine_of_all_dialects():
    assert isinstance(plan(None, TOOLS, FORCED).reader(), Parser)


def test_calls_are_written_as_the_house_has_its_json():
    bound = plan(None, TOOLS, Choice("required", True, "get_weather")).bound
    plain, compact = (
        Trial(whole_form(bound, None, Began(), House(disable_any_whitespace=one)))
        for one in (False, True)
    )
    assert plain.accepts('{"city": "Rome"}')
    assert not compact.accepts('{"city": "Rome"}')
    assert compact.accepts('{"city":"Rome"}')
