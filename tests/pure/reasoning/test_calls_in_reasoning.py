"""A tool call ends reasoning that is not closed, in every pair of formats."""

import itertools

import pytest

from quire.text.output.parsed_text import collect_pieces
from quire.text.output.parser_chain import ParserChain
from quire.text.reasoning.base import ModeKind
from quire.text.reasoning.parser import ReasoningParser
from quire.text.reasoning.select import REASONING_FORMATS, select_reasoning_format
from quire.text.tools._call_openers import call_openers
from tests.pure.tools.rendering import CallToRender, render_calls
from tests.pure.tools.samples import DECLARED, FORMATS, calls_of, format_of, pieces_of, reader

NAMES = [tool["function"]["name"] for tool in DECLARED]
BARE = {"llama3_json", "pythonic", "xlam"}
MESSAGES = {"openai"}


def opening_marks():
    """The first mark that opens reasoning, by format. One name of each format."""
    found = {}
    for name in REASONING_FORMATS.names():
        one = select_reasoning_format(name)
        if one in found or one.channels is not None:
            continue
        for text, mode in one.prompt_endings:
            if one.modes[mode].kind is ModeKind.REASONING:
                found[one] = (name, text)
                break
    return list(found.values())


def read(reasoning, prompt, tools, parts, variables=None):
    chain = ParserChain(
        ReasoningParser(
            select_reasoning_format(reasoning),
            prompt,
            variables,
            openers=call_openers(format_of(tools), NAMES),
        ),
        reader(tools),
    )
    return collect_pieces(pieces_of(chain, parts))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tools", sorted(set(FORMATS) - BARE - MESSAGES))
def test_a_call_ends_reasoning_that_is_not_closed(tools):
    one = format_of(tools)
    calls = [CallToRender("get_weather", {"city": "Rom"}), CallToRender("now", {})]
    text = f"I look.\n{render_calls(one, calls)}"
    for (reasoning, prompt), parts in itertools.product(opening_marks(), ([text], [*text, ""])):
        parsed = read(reasoning, f"assistant\n{prompt}", tools, parts)
        assert (parsed.reasoning, parsed.text.strip()) == ("I look.", ""), reasoning
        assert calls_of(parsed) == [("get_weather", {"city": "Rom"}), ("now", {})], reasoning


@pytest.mark.parametrize("tools", sorted(set(FORMATS) - MESSAGES))
def test_markup_that_no_call_follows_stays_reasoning(tools):
    for form in format_of(tools).syntaxes:
        for mark in () if form.bare else form.begin:
            text = f"I may write {mark} or {mark}\n, see {mark}</think>Hi"
            expected = text.removesuffix("</think>Hi")
            for parts in ([text], [*text, ""], *([text[:i], text[i:]] for i in range(len(text)))):
                parsed = read("deepseek_r1", "<think>", tools, parts)
                assert (parsed.reasoning, parsed.text) == (expected, "Hi"), (mark, parts)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", range(60))
def test_no_split_changes_where_reasoning_ends(place):
    text = 'I <tool_call> look <tool_call>\n {"name": "now", "arguments": {}}</tool_call> x'
    whole = read("qwen3", "<think>", "hermes", [text])
    assert whole.reasoning == "I <tool_call> look"
    assert calls_of(whole) == [("now", {})]
    assert read("qwen3", "<think>", "hermes", [text[:place], text[place:]]) == whole


def test_an_answer_of_a_call_only_has_no_reasoning_in_formats_that_always_reason():
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parsed = read("deepseek_r1", "assistant", "hermes", [text])
    assert (parsed.reasoning, parsed.text, calls_of(parsed)) == ("", "", [("now", {})])


def test_an_undeclared_function_does_not_end_reasoning():
    text = "I write <tool_call>format\n<arg_key>a</arg_key></think>Hi"
    parsed = read("glm45", "<think>", "glm45", [text])
    assert (parsed.text, parsed.calls) == ("Hi", [])


def test_reasoning_that_a_call_ends_is_no_content_where_content_is_forced():
    text = 'I look. <tool_call>{"name": "now", "arguments": {}}</tool_call>'
    forced = {"force_nonempty_content": True}
    parsed = read("nemotron_v3", "<think>", "hermes", [*text, ""], forced)
    assert (parsed.reasoning, parsed.text, calls_of(parsed)) == ("I look.", "", [("now", {})])


def test_muse_reads_calls_of_messages():
    call = render_calls(format_of("muse"), [CallToRender("now", {})])
    text = (
        f" to=self<|message|>I look.<|eom|><|start|>assistant to=now<|message|>{call}<|eom|>"
        f"<|start|>assistant to=now<|message|>{call}<|eom|>"
    )
    for parts in ([text], [*text, ""]):
        parsed = read("muse", "<|start|>assistant", "muse", parts)
        assert (parsed.reasoning, parsed.text.strip()) == ("I look.", "")
        assert calls_of(parsed) == [("now", {})] * 2
