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
    ("given", "policy"),
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
def test_tool_choice_is_parsed(given, policy):
    assert parse_tool_choice(given, NAMES) == policy


@pytest.mark.parametrize(
    "given",
    [
        *("some", 5, {}, {"type": "function"}, {"type": "function", "function": {"name": "x"}}),
        {"type": "allowed_tools", "mode": "never", "tools": [{"name": "now"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]},
    ],
)
def test_an_invalid_tool_choice_is_refused(given):
    with pytest.raises(RequestError):
        parse_tool_choice(given, NAMES)


def test_a_choice_of_a_server_side_tool_is_refused():
    with pytest.raises(Unsupported):
        parse_tool_choice({"type": "web_search_preview"}, NAMES)


def test_required_without_tools_is_refused():
    with pytest.raises(RequestError, match="tools must be given"):
        parse_tool_choice("required", [])


# -- plans ----------------------------------------------------------------------------------------


def test_without_tools_there_is_no_grammar_and_no_parser():
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
    parser = plan_tool_calls(None, TOOLS, FORCED)
    assert Trial(parser.answer.combined()).accepts(
        f'[{{"name": "get_weather", "parameters": {CITY}}}]'
    )
    parsed = collect_pieces(parser.parser().push('[{"name": "now", "parameters": {}}]', last=True))
    assert [call.name for call in parsed.calls] == ["now"]


def test_without_a_parser_a_function_that_is_named_is_its_arguments():
    parser = plan_tool_calls(None, TOOLS, ToolChoicePolicy("required", True, "get_weather"))
    assert Trial(parser.answer.combined()).accepts(CITY)
    parsed = collect_pieces(parser.parser().push(CITY, last=True))
    assert [(call.name, call.arguments, call.outcome) for call in parsed.calls] == [
        ("get_weather", CITY, "whole")
    ]


def test_a_schema_that_the_format_cannot_express_is_forced_as_json():
    odd = function("f", {"a": {"type": "string", "format": "date"}}, ["a"])
    assert plan_tool_calls(select_tool_parser("qwen3_coder"), [odd], FORCED).as_json_list
    assert plan_tool_calls(select_tool_parser("hermes"), [odd], FORCED).parser_factory is not None


def test_a_plug_in_without_a_template_has_calls_forced_as_json():
    odd = ToolParserFactory("own", lambda *a, **k: None, None)
    assert plan_tool_calls(odd, TOOLS, FORCED).as_json_list
    with pytest.raises(RequestError, match="'own'"):
        plan_tool_calls(odd, [strict(NOW)], ToolChoicePolicy("auto"))


def test_strict_functions_constrain_calls_and_not_text():
    parser = plan_tool_calls(
        select_tool_parser("hermes"), [strict(WEATHER), NOW], ToolChoicePolicy("auto")
    )
    assert isinstance(parser.answer.calls, TaggedTextNode)
    grammar = Trial(parser.answer.combined())
    assert grammar.accepts("Hello <b>")
    assert not grammar.accepts(
        '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    )


def test_strict_functions_that_the_format_cannot_express_are_refused_by_name():
    odd = strict(function("f", {"a": {"type": "string", "format": "date"}}, ["a"]))
    with pytest.raises(RequestError, match=r"qwen3_coder.*'a'"):
        plan_tool_calls(select_tool_parser("qwen3_coder"), [odd], ToolChoicePolicy("auto"))


def test_a_function_that_is_not_strict_may_be_called_with_anything():
    odd = function("f", {"a": {"type": "string", "format": "date"}}, ["a"])
    parser = plan_tool_calls(
        select_tool_parser("mimo"), [strict(NOW), odd], ToolChoicePolicy("auto")
    )
    text = "<tool_call><function=f><parameter=a>soon</parameter></function></tool_call>"
    assert Trial(parser.answer.combined()).accepts(text)


def test_a_response_format_leaves_calls_possible():
    grammar = JsonNode('{"type": "object", "properties": {"x": {"type": "integer"}}}')
    parser = plan_tool_calls(
        select_tool_parser("hermes"), [NOW], ToolChoicePolicy("auto"), content=grammar
    )
    trial = Trial(parser.answer.combined())
    assert trial.accepts('{"x": 1}')
    assert trial.accepts('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not trial.accepts("Hello")


def test_forced_calls_exclude_content():
    parser = plan_tool_calls(select_tool_parser("hermes"), TOOLS, FORCED, content=JsonNode("true"))
    assert parser.answer.content is None


def test_only_allowed_functions_can_be_called():
    some = ToolChoicePolicy("auto", True, allowed=frozenset({"now"}))
    grammar = Trial(plan_tool_calls(select_tool_parser("hermes"), TOOLS, some).answer.combined())
    assert grammar.accepts('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not grammar.accepts(
        f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>'
    )


def test_the_last_message_of_channels_is_unconstrained_text():
    parser = plan_tool_calls(select_tool_parser("openai"), [strict(NOW)], ToolChoicePolicy("auto"))
    assert parser.answer.content == ANY_TEXT


def test_an_end_token_that_ends_a_call_is_not_in_the_grammar():
    parser = plan_tool_calls(select_tool_parser("openai"), [NOW], FORCED, eos_texts={"<|call|>"})
    assert Trial(parser.answer.combined()).accepts(
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    )


# -- the reader of bare arguments -----------------------------------------------------------------


def test_arguments_are_emitted_as_they_arrive():
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
def test_invalid_arguments_are_cut_or_broken(text, end):
    (call,) = collect_pieces(JsonArgumentsParser("f").push(text, last=True)).calls
    assert call.outcome == end


def test_an_empty_text_is_no_call():
    assert JsonArgumentsParser("f").push(" \n", last=True) == []


def test_a_json_list_is_parsed_by_the_tool_parser():
    assert isinstance(plan_tool_calls(None, TOOLS, FORCED).parser(), ToolParser)


def test_forced_calls_follow_the_whitespace_defaults():
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
