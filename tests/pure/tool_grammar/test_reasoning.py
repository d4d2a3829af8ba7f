"""The grammar of an answer begins where its reasoning ends, in every format."""

import pytest

from quire.grammar.grammar_ast import JsonNode, LiteralNode
from quire.text.output.parsed_text import collect_pieces
from quire.text.output.parser_chain import ParserChain
from quire.text.reasoning.parser import ReasoningParser
from quire.text.reasoning.select import REASONING_FORMATS, select_reasoning_format
from quire.text.tools import kimi_k2
from quire.text.tools.parser import ToolParser
from quire.text.tools.select import select_tool_parser
from quire.tool_grammar import call_grammar
from quire.tool_grammar.after_reasoning import AnswerGrammar, answer_with_reasoning, thinking_budget
from quire.tool_grammar.call_plan import plan_tool_calls
from quire.tool_grammar.tool_choice import ToolChoicePolicy
from tests.pure.tool_grammar.tools import DECLARED, TOOLS
from tests.pure.tool_grammar.walking import Trial
from tests.pure.tools.rendering import CallToRender, render_calls
from tests.pure.tools.samples import format_of

CALL = call_grammar.calls_grammar(kimi_k2.FORMAT, [DECLARED["now"]])
WRITTEN = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
OBJECT = JsonNode('{"type": "object", "properties": {"a": {"type": "integer"}}}')
EVERY = sorted(set(REASONING_FORMATS.names()) - {"minimax_m2_append_think"})
"""Formats that separate reasoning from content."""


def trial(
    name, prompt="", *, content=OBJECT, calls=None, variables=None, continued_text="", openers=()
):
    grammar = answer_with_reasoning(
        AnswerGrammar(content, calls, openers=openers),
        select_reasoning_format(name),
        prompt,
        variables,
        continued_text=continued_text,
    )
    return Trial(grammar)


def test_reasoning_that_the_prompt_opened_comes_first():
    grammar = trial("qwen3", "...<think>\n")
    assert grammar.accepts('I think {x}.\n</think>\n\n{"a": 1}')
    assert not grammar.accepts('{"a": 1}')
    assert not grammar.accepts("I think</think>So")


def test_without_a_mark_in_the_prompt_reasoning_is_optional():
    grammar = trial("qwen3", "assistant\n")
    assert grammar.accepts('{"a": 1}')
    assert grammar.accepts('<think>\nHm.\n</think>\n{"a": 1}')
    assert not grammar.accepts("<think>Hm.</think>")
    assert not grammar.accepts('Hm. {"a": 1}')


def test_a_prompt_that_closed_reasoning_excludes_it():
    grammar = trial("qwen3", "<think>\n\n</think>\n\n")
    assert grammar.accepts('{"a": 1}')
    assert not grammar.accepts('<think>a</think>{"a": 1}')


def test_implied_reasoning_is_required():
    assert not trial("deepseek_r1", "x").accepts('{"a": 1}')
    assert trial("deepseek_r1", "x").accepts('Hm</think>{"a": 1}')
    assert trial("deepseek_v3", "x").accepts('{"a": 1}')
    assert not trial("deepseek_v3", "x", variables={"thinking": True}).accepts('{"a": 1}')


def test_a_continued_message_has_no_reasoning():
    assert trial("qwen3", 'x{"b": ', continued_text='{"b": ').accepts('{"a": 1}')


def test_marks_around_content_are_optional():
    grammar = trial("hunyuan_a13b", "x")
    assert grammar.accepts('<think>\na\n</think>\n<answer>\n{"a": 1}\n</answer>')
    assert grammar.accepts('<think>\na\n</think>\n{"a": 1}')
    assert trial("hunyuan_a13b", "x<answer>\n").accepts('{"a": 1}\n</answer>')


def test_a_section_of_calls_ends_reasoning_in_formats_with_breaks():
    grammar = trial("kimi_k2", "<think>", content=None, calls=CALL)
    assert grammar.accepts("I ask.</think>" + WRITTEN)
    assert grammar.accepts("I ask." + WRITTEN)
    only_content = trial("kimi_k2", "<think>")
    assert not only_content.accepts("I ask." + WRITTEN)
    assert not only_content.accepts('I ask. <|tool_calls_section_begin|></think>{"a": 1}')


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tools", ["hermes", "qwen3_coder", "glm45", "deepseek_v4", "minimax_m3"])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "granite", "gemma4"])
def test_forced_calls_may_end_reasoning_and_their_markup_is_not_in_it(name, tools):
    tool_format = format_of(tools)
    plan = plan_tool_calls(
        select_tool_parser(tools), TOOLS, ToolChoicePolicy("required", is_explicit=True)
    )
    reasoning_format = select_reasoning_format(name)
    opening, mode = reasoning_format.prompt_endings[0]
    grammar = Trial(answer_with_reasoning(plan.answer, reasoning_format, opening))
    calls = render_calls(tool_format, [CallToRender("now", {})])
    close = next(iter(reasoning_format.modes[mode].transitions))
    mark = tool_format.syntaxes[0].begin[0]
    assert grammar.accepts("I ask." + calls)
    assert grammar.accepts(f"I ask.{close}{calls}")
    assert not grammar.accepts(f"I write {mark} so.{close}{calls}")
    for text in ("I ask." + calls, f"I ask.{close}{calls}"):
        reader = ParserChain(
            ReasoningParser(reasoning_format, opening, openers=plan.openers), plan.parser()
        )
        parsed = collect_pieces(reader.push(text, last=True))
        assert (parsed.reasoning, parsed.text) == ("I ask.", "")
        assert [call.name for call in parsed.calls] == ["now"]


def test_calls_of_muse_have_the_header_of_their_message():
    plan = plan_tool_calls(
        select_tool_parser("muse"), TOOLS, ToolChoicePolicy("required", is_explicit=True)
    )
    reasoning_format = select_reasoning_format("muse")
    grammar = Trial(answer_with_reasoning(plan.answer, reasoning_format, "<|start|>assistant"))
    call = " to=now<|message|>" + render_calls(format_of("muse"), [CallToRender("now", {})])
    thought = " to=self<|message|>Hm.<|eom|><|start|>assistant"
    for text in (call, thought + call):
        assert grammar.accepts(text), grammar.taken(text)
        reader = ParserChain(ReasoningParser(reasoning_format, "<|start|>assistant"), plan.parser())
        parsed = collect_pieces(reader.push(text, last=True))
        assert (parsed.text, [one.name for one in parsed.calls]) == ("", ["now"])
    assert not grammar.accepts(" to=user<|message|>Hi.")


def test_each_closing_mark_ends_reasoning():
    grammar = trial("granite", "x")
    for close in ("Here is my response:", "Here's my response:"):
        assert grammar.accepts(f'Here is my thought process: a {close}{{"a": 1}}')


def test_the_last_message_of_channels_has_the_grammar():
    grammar = trial(
        "gpt_oss", "<|start|>assistant", calls=LiteralNode("<|channel|>commentary to=functions.f")
    )
    final = '<|channel|>final<|message|>{"a": 1}'
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert grammar.accepts(final)
    assert grammar.accepts(thought + final)
    assert grammar.accepts(thought + "<|channel|>commentary to=functions.f")
    assert not grammar.accepts('{"a": 1}')
    assert not grammar.accepts("<|channel|>final<|message|>Hm.")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("prompt", ["", "opened"])
def test_allowed_text_parses_to_reasoning_and_valid_content(name, prompt):
    reasoning_format = select_reasoning_format(name)
    opening = next(
        iter({**reasoning_format.modes[reasoning_format.default_mode({})].initial_transitions}),
        "<think>",
    )
    prompt = opening if prompt else ""
    grammar = trial(name, prompt, variables={"enable_thinking": True})
    machine = ReasoningParser(reasoning_format, prompt, {"enable_thinking": True})
    close = next(
        (mark for mark, turn in machine.mode.transitions.items() if turn.keep != "after"), ""
    )
    texts = ['{"a": 1}', f'Hm{close}\n{{"a": 1}}', f'{opening}Hm</think>{{"a": 1}}']
    for text in (one for one in texts if grammar.accepts(one)):
        reader = ParserChain(ReasoningParser(reasoning_format, prompt, {"enable_thinking": True}))
        parsed = collect_pieces(reader.push(text, last=True))
        assert parsed.text.strip() == '{"a": 1}', (text, parsed)


def test_forced_calls_after_reasoning_are_parsed():
    grammar = trial("kimi_k2", "<think>", content=None, calls=CALL)
    text = "I ask.</think>\n" + WRITTEN
    assert grammar.accepts(text)
    reader = ParserChain(
        ReasoningParser(select_reasoning_format("kimi_k2"), "<think>"),
        ToolParser(kimi_k2.FORMAT, TOOLS),
    )
    parsed = collect_pieces(reader.push(text, last=True))
    assert (parsed.reasoning, [call.name for call in parsed.calls]) == ("I ask.", ["now"])


# -- budgets --------------------------------------------------------------------------------------


def encode(mark):
    return [*mark.encode()]


@pytest.mark.parametrize(
    ("name", "prompt", "begin", "end"),
    [
        ("qwen3", "<think>\n", None, "</think>"),
        ("qwen3", "x", "<think>", "</think>"),
        ("deepseek_r1", "x", None, "</think>"),
        ("mistral", "x", "[THINK]", "[/THINK]"),
        ("kimi_k2", "<think>", None, "</think>"),
        ("gpt_oss", "<|start|>assistant", "<|channel|>analysis<|message|>", "<|end|>"),
        ("gpt_oss", "<|channel|>analysis<|message|>", None, "<|end|>"),
        ("minimax_m2_append_think", "<think>\n", None, "</think>"),
    ],
)
def test_a_budget_has_the_marks_of_the_format(name, prompt, begin, end):
    budget = thinking_budget(5, select_reasoning_format(name), encode, prompt)
    assert budget.max_tokens == 5
    assert budget.start_token_ids == (None if begin is None else tuple(encode(begin)))
    assert budget.end_token_ids == tuple(encode(end))


@pytest.mark.parametrize(
    ("name", "prompt", "others"),
    [
        ("qwen3", "<think>\n", ()),
        ("kimi_k2", "<think>", ("<|tool_calls_section_begin|>",)),
        ("kimi_k3", "x", ("<|open|>tools<|sep|>",)),
        ("gpt_oss", "x", ("<|return|>", "<|call|>", "<|start|>", "<|channel|>")),
        ("muse", " to=self<|message|>", ("<|eot|>", "<|end_of_text|>", "<|start|>")),
    ],
)
def test_a_budget_has_all_marks_that_end_reasoning(name, prompt, others):
    budget = thinking_budget(5, select_reasoning_format(name), encode, prompt)
    assert budget.other_end_token_ids == tuple(tuple(encode(one)) for one in others)


def test_a_mark_whose_last_token_takes_in_the_end_of_the_line_ends_reasoning_too():
    def merge(text):
        return [text[:-2], text[-2:]] if text.endswith(">\n") else [*text]

    budget = thinking_budget(5, select_reasoning_format("qwen3"), merge, "<think>")
    assert budget.other_end_token_ids == (("</think", ">\n"),)
