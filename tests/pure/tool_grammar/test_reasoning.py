"""What an answer is bound to begins where its thoughts end, whatever the dialect."""

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
from tests.pure.tools.samples import dialect_of

CALL = call_grammar.calls_grammar(kimi_k2.FORMAT, [DECLARED["now"]])
WRITTEN = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
OBJECT = JsonNode('{"type": "object", "properties": {"a": {"type": "integer"}}}')
EVERY = sorted(set(REASONING_FORMATS.names()) - {"minimax_m2_append_think"})
"""All that tell thoughts from content."""


def trial(name, prompt="", *, content=OBJECT, calls=None, variables=None, begun="", openers=()):
    form = answer_with_reasoning(
        AnswerGrammar(content, calls, openers=openers),
        select_reasoning_format(name),
        prompt,
        variables,
        begun=begun,
    )
    return Trial(form)


def test_thoughts_that_the_prompt_began_come_first():
    form = trial("qwen3", "...<think>\n")
    assert form.accepts('I think {x}.\n</think>\n\n{"a": 1}')
    assert not form.accepts('{"a": 1}')
    assert not form.accepts("I think</think>So")


def test_where_the_prompt_says_nothing_the_model_may_think_or_not():
    form = trial("qwen3", "assistant\n")
    assert form.accepts('{"a": 1}')
    assert form.accepts('<think>\nHm.\n</think>\n{"a": 1}')
    assert not form.accepts("<think>Hm.</think>")
    assert not form.accepts('Hm. {"a": 1}')


def test_where_the_prompt_closed_thoughts_there_are_none():
    form = trial("qwen3", "<think>\n\n</think>\n\n")
    assert form.accepts('{"a": 1}')
    assert not form.accepts('<think>a</think>{"a": 1}')


def test_a_model_that_always_thinks_thinks():
    assert not trial("deepseek_r1", "x").accepts('{"a": 1}')
    assert trial("deepseek_r1", "x").accepts('Hm</think>{"a": 1}')
    assert trial("deepseek_v3", "x").accepts('{"a": 1}')
    assert not trial("deepseek_v3", "x", variables={"thinking": True}).accepts('{"a": 1}')


def test_an_answer_that_goes_on_with_a_message_is_no_thought():
    assert trial("qwen3", 'x{"b": ', begun='{"b": ').accepts('{"a": 1}')


def test_marks_around_content_may_stay():
    form = trial("hunyuan_a13b", "x")
    assert form.accepts('<think>\na\n</think>\n<answer>\n{"a": 1}\n</answer>')
    assert form.accepts('<think>\na\n</think>\n{"a": 1}')
    assert trial("hunyuan_a13b", "x<answer>\n").accepts('{"a": 1}\n</answer>')


def test_a_section_of_calls_ends_thoughts_where_the_dialect_has_it_so():
    form = trial("kimi_k2", "<think>", content=None, calls=CALL)
    assert form.accepts("I ask.</think>" + WRITTEN)
    assert form.accepts("I ask." + WRITTEN)
    only_content = trial("kimi_k2", "<think>")
    assert not only_content.accepts("I ask." + WRITTEN)
    assert not only_content.accepts('I ask. <|tool_calls_section_begin|></think>{"a": 1}')


@pytest.mark.parametrize("tools", ["hermes", "qwen3_coder", "glm45", "deepseek_v4", "minimax_m3"])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "granite", "gemma4"])
def test_forced_calls_may_end_thoughts_and_their_markup_is_not_in_thoughts(name, tools):
    tool_format = dialect_of(tools)
    plan = plan_tool_calls(
        select_tool_parser(tools), TOOLS, ToolChoicePolicy("required", is_explicit=True)
    )
    dialect = select_reasoning_format(name)
    opening, mode = dialect.prompt_endings[0]
    form = Trial(answer_with_reasoning(plan.answer, dialect, opening))
    calls = render_calls(tool_format, [CallToRender("now", {})])
    close = next(iter(dialect.modes[mode].transitions))
    mark = tool_format.syntaxes[0].begin[0]
    assert form.accepts("I ask." + calls)
    assert form.accepts(f"I ask.{close}{calls}")
    assert not form.accepts(f"I write {mark} so.{close}{calls}")
    for text in ("I ask." + calls, f"I ask.{close}{calls}"):
        reader = ParserChain(ReasoningParser(dialect, opening, openers=plan.openers), plan.parser())
        said = collect_pieces(reader.push(text, last=True))
        assert (said.reasoning, said.text) == ("I ask.", "")
        assert [call.name for call in said.calls] == ["now"]


def test_calls_of_muse_have_the_header_of_their_message():
    plan = plan_tool_calls(
        select_tool_parser("muse"), TOOLS, ToolChoicePolicy("required", is_explicit=True)
    )
    dialect = select_reasoning_format("muse")
    form = Trial(answer_with_reasoning(plan.answer, dialect, "<|start|>assistant"))
    call = " to=now<|message|>" + render_calls(dialect_of("muse"), [CallToRender("now", {})])
    thought = " to=self<|message|>Hm.<|eom|><|start|>assistant"
    for text in (call, thought + call):
        assert form.accepts(text), form.taken(text)
        reader = ParserChain(ReasoningParser(dialect, "<|start|>assistant"), plan.parser())
        said = collect_pieces(reader.push(text, last=True))
        assert (said.text, [one.name for one in said.calls]) == ("", ["now"])
    assert not form.accepts(" to=user<|message|>Hi.")


def test_any_of_several_closings_closes():
    form = trial("granite", "x")
    for close in ("Here is my response:", "Here's my response:"):
        assert form.accepts(f'Here is my thought process: a {close}{{"a": 1}}')


def test_messages_with_channels_are_bound_in_the_last():
    form = trial(
        "gpt_oss", "<|start|>assistant", calls=LiteralNode("<|channel|>commentary to=functions.f")
    )
    final = '<|channel|>final<|message|>{"a": 1}'
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert form.accepts(final)
    assert form.accepts(thought + final)
    assert form.accepts(thought + "<|channel|>commentary to=functions.f")
    assert not form.accepts('{"a": 1}')
    assert not form.accepts("<|channel|>final<|message|>Hm.")


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("prompt", ["", "opened"])
def test_what_is_allowed_is_read_as_thoughts_and_that_content(name, prompt):
    dialect = select_reasoning_format(name)
    opening = next(iter({**dialect.modes[dialect.default_mode({})].initial_transitions}), "<think>")
    prompt = opening if prompt else ""
    form = trial(name, prompt, variables={"enable_thinking": True})
    machine = ReasoningParser(dialect, prompt, {"enable_thinking": True})
    close = next(
        (mark for mark, turn in machine.mode.transitions.items() if turn.keep != "after"), ""
    )
    texts = ['{"a": 1}', f'Hm{close}\n{{"a": 1}}', f'{opening}Hm</think>{{"a": 1}}']
    for text in (one for one in texts if form.accepts(one)):
        reader = ParserChain(ReasoningParser(dialect, prompt, {"enable_thinking": True}))
        said = collect_pieces(reader.push(text, last=True))
        assert said.text.strip() == '{"a": 1}', (text, said)


def test_calls_behind_thoughts_are_read_behind_thoughts():
    form = trial("kimi_k2", "<think>", content=None, calls=CALL)
    text = "I ask.</think>\n" + WRITTEN
    assert form.accepts(text)
    reader = ParserChain(
        ReasoningParser(select_reasoning_format("kimi_k2"), "<think>"),
        ToolParser(kimi_k2.FORMAT, TOOLS),
    )
    said = collect_pieces(reader.push(text, last=True))
    assert (said.reasoning, [call.name for call in said.calls]) == ("I ask.", ["now"])


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
def test_a_budget_has_the_marks_of_the_dialect(name, prompt, begin, end):
    made = thinking_budget(5, select_reasoning_format(name), encode, prompt)
    assert made.max_tokens == 5
    assert made.start_token_ids == (None if begin is None else tuple(encode(begin)))
    assert made.end_token_ids == tuple(encode(end))
