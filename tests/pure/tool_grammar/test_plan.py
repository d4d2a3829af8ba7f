"""What is decided of calls: who writes them how, and who reads them."""

import pytest

from quire.errors import RequestError, Unsupported
from quire.grammar.frontends.from_params import StructuredDefaults
from quire.grammar.grammar_ast import JsonNode, TaggedTextNode
from quire.text.output.answer_parser import PromptTail
from quire.text.output.json_tool_parser import JsonArgumentsParser
from quire.text.output.parsed_text import ParsedCallDelta, collect_pieces
from quire.text.tools.parser import ToolParser
from quire.text.tools.select import ToolParserFactory, select_tool_parser
from quire.tool_grammar.after_reasoning import ANY_TEXT
from quire.tool_grammar.call_plan import plan_tool_calls
from quire.tool_grammar.prompt_constraints import answer_grammar
from quire.tool_grammar.tool_choice import ToolChoicePolicy, parse_tool_choice
from tests.pure.tool_grammar.tools import TOOLS, function
from tests.pure.tool_grammar.walking import Trial

NAMES = ["get_weather", "now"]
WEATHER, NOW = TOOLS[0], TOOLS[1]
FORCED = ToolChoicePolicy("required", is_explicit=True)
CITY = '{"city": "Rome"}'


def strict(tool):
    return {**tool, "function": {**tool["function"], "strict": True}}


# -- tool_choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (None, ToolChoicePolicy("auto")),
        ("auto", ToolChoicePolicy("auto", is_explicit=True)),
        ("none", ToolChoicePolicy("none", is_explicit=True)),
        ("required", FORCED),
        (
            {"type": "function", "function": {"name": "now"}},
            ToolChoicePolicy("required", True, "now"),
        ),
        ({"type": "function", "name": "now"}, ToolChoicePolicy("required", True, "now")),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "now"}],
            },
            ToolChoicePolicy("auto", True, allowed=frozenset({"now"})),
        ),
    ],
)
def test_a_choice_is_understood(given, made):
    assert parse_tool_choice(given, NAMES) == made


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
        parse_tool_choice(given, NAMES)


def test_a_choice_of_what_would_run_in_the_server_is_refused_as_such():
    with pytest.raises(Unsupported):
        parse_tool_choice({"type": "web_search_preview"}, NAMES)


def test_no_call_can_be_asked_for_without_tools():
    with pytest.raises(RequestError, match="tools must be given"):
        parse_tool_choice("required", [])


# -- plans ----------------------------------------------------------------------------------------


def test_nothing_is_bound_or_read_where_nothing_asks_for_it():
    assert plan_tool_calls(None, TOOLS, ToolChoicePolicy("auto")).answer is None
    assert not plan_tool_calls(None, TOOLS, ToolChoicePolicy("auto")).parses_calls
    assert not plan_tool_calls(
        select_tool_parser("hermes"), TOOLS, ToolChoicePolicy("none")
    ).parses_calls
    assert (
        plan_tool_calls(select_tool_parser("hermes"), TOOLS, ToolChoicePolicy("auto")).answer
        is None
    )
    assert plan_tool_calls(
        select_tool_parser("hermes"), TOOLS, ToolChoicePolicy("auto")
    ).parses_calls


def test_without_a_parser_calls_are_a_json_list():
    made = plan_tool_calls(None, TOOLS, FORCED)
    assert Trial(made.answer.combined()).accepts(
        f'[{{"name": "get_weather", "parameters": {CITY}}}]'
    )
    said = collect_pieces(made.parser().push('[{"name": "now", "parameters": {}}]', last=True))
    assert [call.name for call in said.calls] == ["now"]


def test_without_a_parser_a_function_that_is_named_is_its_arguments():
    made = plan_tool_calls(None, TOOLS, ToolChoicePolicy("required", True, "get_weather"))
    assert Trial(made.answer.combined()).accepts(CITY)
    said = collect_pieces(made.parser().push(CITY, last=True))
    assert [(call.name, call.arguments, call.outcome) for call in said.calls] == [
        ("get_weather", CITY, "whole")
    ]


def test_a_schema_that_the_dialect_cannot_write_is_forced_as_json():
    odd = function("f", {"a": {"type": "string", "format": "date"}}, ["a"])
    assert plan_tool_calls(select_tool_parser("qwen3_coder"), [odd], FORCED).as_json_list
    assert plan_tool_calls(select_tool_parser("hermes"), [odd], FORCED).parser_factory is not None


def test_a_plug_in_that_says_nothing_of_writing_has_calls_forced_as_json():
    odd = ToolParserFactory("own", lambda *a, **k: None, None)
    assert plan_tool_calls(odd, TOOLS, FORCED).as_json_list
    with pytest.raises(RequestError, match="'own'"):
        plan_tool_calls(odd, [strict(NOW)], ToolChoicePolicy("auto"))


def test_strict_functions_bind_calls_and_leave_text_free():
    made = plan_tool_calls(
        select_tool_parser("hermes"), [strict(WEATHER), NOW], ToolChoicePolicy("auto")
    )
    assert isinstance(made.answer.calls, TaggedTextNode)
    form = Trial(made.answer.combined())
    assert form.accepts("Hello <b>")
    assert not form.accepts('<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>')


def test_strict_functions_that_the_dialect_cannot_write_are_refused_by_name():
    odd = strict(function("f", {"a": {"type": "string", "format": "date"}}, ["a"]))
    with pytest.raises(RequestError, match=r"qwen3_coder.*'a'"):
        plan_tool_calls(select_tool_parser("qwen3_coder"), [odd], ToolChoicePolicy("auto"))


def test_a_function_that_need_not_be_strict_may_be_called_with_anything():
    odd = function("f", {"a": {"type": "string", "format": "date"}}, ["a"])
    made = plan_tool_calls(select_tool_parser("mimo"), [strict(NOW), odd], ToolChoicePolicy("auto"))
    text = "<tool_call><function=f><parameter=a>soon</parameter></function></tool_call>"
    assert Trial(made.answer.combined()).accepts(text)


def test_a_form_of_the_content_leaves_calls_possible():
    form = JsonNode('{"type": "object", "properties": {"x": {"type": "integer"}}}')
    made = plan_tool_calls(
        select_tool_parser("hermes"), [NOW], ToolChoicePolicy("auto"), content=form
    )
    trial = Trial(made.answer.combined())
    assert trial.accepts('{"x": 1}')
    assert trial.accepts('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not trial.accepts("Hello")


def test_forced_calls_leave_no_room_for_content():
    made = plan_tool_calls(select_tool_parser("hermes"), TOOLS, FORCED, content=JsonNode("true"))
    assert made.answer.content is None


def test_only_functions_that_are_allowed_can_be_called():
    some = ToolChoicePolicy("auto", True, allowed=frozenset({"now"}))
    form = Trial(plan_tool_calls(select_tool_parser("hermes"), TOOLS, some).answer.combined())
    assert form.accepts('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not form.accepts(
        f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>'
    )


def test_text_of_messages_with_channels_is_free_in_the_last():
    made = plan_tool_calls(select_tool_parser("openai"), [strict(NOW)], ToolChoicePolicy("auto"))
    assert made.answer.content == ANY_TEXT


def test_an_end_token_that_ends_a_call_is_left_to_the_end_of_the_text():
    made = plan_tool_calls(select_tool_parser("openai"), [NOW], FORCED, ends={"<|call|>"})
    assert Trial(made.answer.combined()).accepts(
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    )


# -- the reader of bare arguments -----------------------------------------------------------------


def test_arguments_are_told_as_they_come():
    reader = JsonArgumentsParser("f", lambda: "1")
    assert [piece.call for piece in reader.push(' {"a"', last=False)] == [
        ParsedCallDelta(0, "chatcmpl-tool-1", "f"),
        ParsedCallDelta(0, arguments='{"a"'),
    ]
    assert [piece.call for piece in reader.push(": 1}", last=True)] == [
        ParsedCallDelta(0, arguments=": 1}"),
        ParsedCallDelta(0, outcome="whole"),
    ]


@pytest.mark.parametrize(("text", "end"), [('{"a": ', "cut"), ("[1]", "broken")])
def test_arguments_that_are_none_do_not_end_whole(text, end):
    (call,) = collect_pieces(JsonArgumentsParser("f").push(text, last=True)).calls
    assert call.outcome == end


def test_a_text_of_nothing_is_no_call():
    assert JsonArgumentsParser("f").push(" \n", last=True) == []


def test_what_reads_a_list_is_the_machine_of_all_dialects():
    assert isinstance(plan_tool_calls(None, TOOLS, FORCED).parser(), ToolParser)


def test_calls_are_written_as_the_house_has_its_json():
    bound = plan_tool_calls(None, TOOLS, ToolChoicePolicy("required", True, "get_weather")).answer
    plain, compact = (
        Trial(
            answer_grammar(
                bound, None, PromptTail(), StructuredDefaults(disable_any_whitespace=one)
            )
        )
        for one in (False, True)
    )
    assert plain.accepts('{"city": "Rome"}')
    assert not compact.accepts('{"city": "Rome"}')
    assert compact.accepts('{"city":"Rome"}')
