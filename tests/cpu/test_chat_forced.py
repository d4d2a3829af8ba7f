"""LLM.chat forces calls, constrains strict functions and limits reasoning, as the server does."""

import json

import jsonschema
import pytest

from quire import LLM, SamplingParams
from quire.errors import RequestError

ASK = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}, "days": {"minimum": 3}},
    "required": ["city", "days"],
}
WEATHER["properties"]["days"] |= {"type": "integer", "maximum": 5}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
GREEDY = SamplingParams(temperature=0, max_tokens=300)


@pytest.fixture(scope="module")
def llm():
    return LLM("embedded", max_model_len=1024, kv_cache_memory_bytes=1 << 26)


def answer(llm, params=GREEDY, messages=ASK, **named):
    return llm.chat(messages, params, tools=TOOLS, use_tqdm=False, **named)[0].outputs[0]


def check(out):
    (call,) = out.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("parser", [None, "auto", "qwen3_coder", "pythonic", "gemma4"])
@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_calls_are_forced_in_any_dialect_and_without_one(llm, parser, choice):
    out = answer(llm, tool_choice=choice, tool_parser=parser, parallel_tool_calls=False)
    check(out)
    assert (out.text, out.notes) == ("", [])


def test_reasoning_comes_first_and_ends_in_time(llm):
    parsers = {"tool_parser": "auto", "reasoning_parser": "auto"}
    long = answer(llm, tool_choice="required", parallel_tool_calls=False, **parsers)
    check(long)
    brief = SamplingParams(temperature=0, max_tokens=300, thinking_token_budget=3)
    short = answer(llm, brief, tool_choice="required", parallel_tool_calls=False, **parsers)
    check(short)
    assert 0 < len(short.reasoning) < len(long.reasoning)
    assert long.reasoning.startswith(short.reasoning)


def test_every_conversation_is_constrained_after_its_own_prompt(llm):
    talks = [ASK, [{"role": "user", "content": "Hi"}], ASK]
    outputs = llm.chat(
        talks, GREEDY, tools=TOOLS, use_tqdm=False, tool_choice=NAMED, reasoning_parser="qwen3"
    )
    for output in outputs:
        check(output.outputs[0])


@pytest.mark.parametrize(
    ("named", "word"),
    [
        ({"tool_choice": "auto"}, "tool_parser"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'"),
        ({"tool_choice": "some"}, "tool_choice"),
    ],
)
def test_what_cannot_be_chosen_is_refused(llm, named, word):
    with pytest.raises(RequestError, match=word):
        answer(llm, **named)


def test_a_reasoning_budget_needs_the_markers(llm):
    brief = SamplingParams(max_tokens=9, thinking_token_budget=3)
    with pytest.raises(RequestError, match="thinking_token_budget"):
        llm.generate("x", brief, use_tqdm=False)
    with pytest.raises(RequestError, match="thinking_token_budget"):
        answer(llm, brief)
