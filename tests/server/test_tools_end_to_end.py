"""The embedded model calls tools and reasons, through the clients that people have."""

import json

import anthropic
import openai
import pytest

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
FUNCTION = {
    "name": "get_weather",
    "description": "Current weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
GREEDY = {"model": "embedded", "temperature": 0, "max_tokens": 300}


@pytest.fixture(scope="module")
def url(reading_server):
    return reading_server.url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_tool_is_asked_for_its_result_given_and_the_answer_made_of_it(client):
    first = client.chat.completions.create(messages=ASK, tools=TOOLS, **GREEDY).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert first.message.content is None
    assert first.message.reasoning == first.message.reasoning_content != ""
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 18}'}
    then = [*ASK, first.message.model_dump(exclude_none=True), result]
    end = client.chat.completions.create(messages=then, tools=TOOLS, **GREEDY)
    assert "18" in end.choices[0].message.content
    assert end.choices[0].finish_reason == "stop"
    assert end.usage.completion_tokens_details.reasoning_tokens > 0


def test_a_stream_of_reasoning_then_calls_says_what_the_whole_answer_says(client):
    whole = client.chat.completions.create(messages=ASK, tools=TOOLS, **GREEDY)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=ASK, tools=TOOLS, **GREEDY, **more))
    assert chunks[-1].usage == whole.usage
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    kinds = [
        "t" if d.tool_calls else "r" for d in deltas if d.tool_calls or hasattr(d, "reasoning")
    ]
    assert "".join(kinds).strip("t").strip("r") == ""
    message = whole.choices[0].message
    assert "".join(getattr(d, "reasoning", "") for d in deltas) == message.reasoning
    calls = [call for d in deltas for call in d.tool_calls or ()]
    assert "".join(c.function.arguments for c in calls) == message.tool_calls[0].function.arguments
    assert [call.id is None for call in calls] == [False] + [True] * (len(calls) - 1)
    assert chunks[-2].choices[0].finish_reason == "tool_calls"


def test_thinking_is_switched_by_a_variable_of_the_template(client):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = client.chat.completions.create(messages=ASK, tools=TOOLS, **GREEDY, extra_body=off)
    message = answer.choices[0].message
    assert (message.reasoning, len(message.tool_calls)) == (None, 1)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_responses_have_items_of_reasoning_and_calls(client):
    tool = {"type": "function", **FUNCTION}
    answer = client.responses.create(
        model="embedded", input=ASK[0]["content"], temperature=0, tools=[tool]
    )
    assert [item.type for item in answer.output] == ["reasoning", "function_call"]
    call = answer.output[1]
    assert json.loads(call.arguments) == {"city": "Paris"}
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"temperature": 18}',
    }
    given = [*ASK, *(item.model_dump(exclude_none=True) for item in answer.output), result]
    end = client.responses.create(model="embedded", input=given, temperature=0, tools=[tool])
    assert "18" in end.output_text


def test_messages_have_blocks_of_thinking_and_tool_use(url):
    tool = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
    tool["description"] = FUNCTION["description"]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        asked = {"model": "embedded", "max_tokens": 300, "extra_body": {"temperature": 0}}
        answer = client.messages.create(messages=ASK, tools=[tool], **asked)
        assert [block.type for block in answer.content] == ["thinking", "tool_use"]
        assert answer.content[1].input == {"city": "Paris"}
        assert answer.stop_reason == "tool_use"
        with client.messages.stream(messages=ASK, tools=[tool], **asked) as stream:
            whole = stream.get_final_message()
        assert [block.type for block in whole.content] == ["thinking", "tool_use"]
        assert whole.content[0].thinking == answer.content[0].thinking
        assert whole.content[1].input == {"city": "Paris"}
