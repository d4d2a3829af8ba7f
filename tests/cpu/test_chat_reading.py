"""LLM.chat reads reasoning and tool calls in what the embedded model writes."""

import dataclasses
import json

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
GREEDY = SamplingParams(temperature=0, max_tokens=200)
BOTH = {"tools": TOOLS, "tool_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.fixture(scope="module")
def llm():
    return LLM("embedded", max_model_len=1024, kv_cache_memory_bytes=1 << 26)


def answer(llm, messages, params=GREEDY, **named):
    return llm.chat(messages, params, use_tqdm=False, **named)[0].outputs[0]


def test_without_parsers_the_text_is_all_there_is(llm):
    out = answer(llm, ASK, tools=TOOLS)
    assert "</think>" in out.text
    assert "<tool_call>" in out.text
    assert (out.reasoning, out.tool_calls, out.finish_reason) == (None, [], "stop")


@pytest.mark.parametrize("names", [("hermes", "qwen3"), ("auto", "auto")])
def test_a_tool_is_called_and_its_result_is_answered(llm, names):
    parsers = {"tool_parser": names[0], "reasoning_parser": names[1]}
    out = answer(llm, ASK, tools=TOOLS, **parsers)
    (call,) = out.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert "Paris" in out.reasoning
    assert (out.text, out.finish_reason, out.notes) == ("", "tool_calls", [])
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 18}'}
    said = {"role": "assistant", "content": "", "tool_calls": [dataclasses.asdict(call)]}
    end = answer(llm, [*ASK, said, result], tools=TOOLS, **parsers)
    assert "18" in end.text
    assert (end.tool_calls, end.finish_reason) == ([], "stop")


def test_each_parser_works_alone(llm):
    calls = answer(llm, ASK, tools=TOOLS, tool_parser="hermes")
    assert calls.reasoning is None
    assert calls.text.startswith("<think>")
    assert len(calls.tool_calls) == 1
    thoughts = answer(llm, ASK, tools=TOOLS, reasoning_parser="qwen3")
    assert thoughts.text.startswith("<tool_call>")
    assert (thoughts.tool_calls, thoughts.finish_reason) == ([], "stop")


def test_special_tokens_are_in_the_text_only_if_requested(llm):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    assert "<|im_" not in answer(llm, ASK, params, **BOTH).text
    params.skip_special_tokens = False
    assert "<|im_" in answer(llm, ASK, params, reasoning_parser="qwen3").text
    assert params.skip_special_tokens is False


def test_a_call_that_the_length_cuts_is_no_reason_to_call(llm):
    whole = answer(llm, ASK, **BOTH)
    for most in range(1, len(whole.token_ids)):
        out = answer(llm, ASK, SamplingParams(temperature=0, max_tokens=most), **BOTH)
        assert out.finish_reason == "length"
        assert whole.reasoning.startswith(out.reasoning or "")
        assert not out.text or (out.notes and out.text.startswith("<tool_call>"))


def test_an_answer_that_continues_is_parsed_further(llm):
    begun = [*ASK, {"role": "assistant", "content": "<think>\nget_weather fits."}]
    out = answer(llm, begun, add_generation_prompt=False, continue_final_message=True, **BOTH)
    assert "<think>" not in out.text + (out.reasoning or "")
    assert len(out.tool_calls) == 1


def test_several_answers_to_several_conversations_are_each_read(llm):
    params = [SamplingParams(n=2, top_k=1, max_tokens=200), GREEDY]
    first, second = llm.chat([ASK, ASK], params, use_tqdm=False, **BOTH)
    assert [len(one.tool_calls) for one in (*first.outputs, *second.outputs)] == [1, 1, 1]


def test_unknown_parsers_and_answers_without_text_are_refused(llm):
    with pytest.raises(ConfigError, match="did you mean hermes"):
        answer(llm, ASK, tool_parser="hermess")
    with pytest.raises(RequestError, match="detokenize"):
        answer(llm, ASK, SamplingParams(detokenize=False), **BOTH)
