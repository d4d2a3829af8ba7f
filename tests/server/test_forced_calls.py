"""Forced calls, strict functions and budgets of thought, end to end on the embedded model: with a
parser and without one, in every dialect, streamed as unstreamed.
"""

import json

import anthropic
import jsonschema
import openai
import pytest

from tests.server.running import SMALL, serving

FLAGS = "--reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser hermes"
WEATHER = {
    "name": "get_weather",
    "description": "Current weather in a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Oslo"]},
            "days": {"type": "integer", "minimum": 3, "maximum": 5},
        },
        "required": ["city", "days"],
    },
}
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    },
}
SCHEMAS = {one["name"]: one["parameters"] for one in (WEATHER, ADD)}
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, ADD)]
ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": "embedded", "temperature": 0, "max_tokens": 500}
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module", params=["hermes", "no parser"])
def running(request):
    if request.param == "no parser":
        made = request.getfixturevalue("real_server")
        made.reads = False
        yield made
        return
    with serving("embedded", *SMALL, *FLAGS.split()) as made:
        made.reads = True
        yield made


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        made.reads = running.reads
        yield made


def create(client, **more):
    return client.chat.completions.create(messages=ASK, tools=TOOLS, **GREEDY, **more)


def check(calls):
    """Every call is of a declared function, with arguments that its schema allows."""
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in calls]


def test_a_required_call_comes_where_the_model_would_not_have_called(client):
    assert not create(client).choices[0].message.tool_calls
    answer = create(client, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert len(check(answer.message.tool_calls)) == 1
    assert answer.message.content is None
    assert answer.finish_reason == "tool_calls"


def test_a_function_that_was_named_is_called_once_and_the_answer_just_stops(client):
    answer = create(client, tool_choice=NAMED).choices[0]
    assert check(answer.message.tool_calls) == ["add"]
    assert answer.message.content is None
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_stream_of_forced_calls_says_what_the_whole_answer_says(client, choice):
    asked = {"tool_choice": choice, "parallel_tool_calls": False}
    whole = create(client, **asked).choices[0]
    (call,) = whole.message.tool_calls
    for _ in range(5):  # a busy machine may send in one piece what was written in several
        chunks = [one.choices[0] for one in create(client, **asked, stream=True) if one.choices]
        news = [call for one in chunks for call in one.delta.tool_calls or ()]
        assert "".join(one.function.arguments or "" for one in news) == call.function.arguments
        assert [one.function.name for one in news if one.function.name] == [call.function.name]
        if len(news) > 2:
            break
    assert len(news) > 2  # the arguments come as they are written
    assert chunks[-1].finish_reason == whole.finish_reason
    assert not "".join(one.delta.content or "" for one in chunks)


def test_only_tools_that_are_allowed_are_called(client):
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": some}
    answer = create(client, tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert check(answer.message.tool_calls) == ["add"]


def test_every_answer_of_several_is_a_call(client):
    more = {"temperature": 1, "n": 3, "seed": 7, "tool_choice": NAMED, "max_tokens": 300}
    answer = client.chat.completions.create(messages=ASK, tools=TOOLS, **{**GREEDY, **more})
    assert [check(one.message.tool_calls) for one in answer.choices] == [["add"]] * 3


def test_a_format_of_the_content_does_not_keep_calls_from_being_forced(client):
    said = {"type": "json_object"}
    answer = create(client, tool_choice=NAMED, response_format=said).choices[0]
    assert check(answer.message.tool_calls) == ["add"]


def test_responses_force_calls_in_their_words(client):
    tools = [{"type": "function", **one, "strict": False} for one in (WEATHER, ADD)]
    for choice in ("required", {"type": "function", "name": "add"}):
        answer = client.responses.create(
            model="embedded",
            input="Hi",
            temperature=0,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_output_tokens=500,
        )
        (call,) = (item for item in answer.output if item.type == "function_call")
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        assert answer.status == "completed"


def test_messages_force_calls_in_their_words(running):
    tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in (WEATHER, ADD)]
    asked = {"model": "embedded", "max_tokens": 500, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
            choice = choice | {"disable_parallel_tool_use": True}
            answer = client.messages.create(messages=ASK, tools=tools, tool_choice=choice, **asked)
            (call,) = (block for block in answer.content if block.type == "tool_use")
            jsonschema.validate(call.input, SCHEMAS[call.name])
            assert answer.stop_reason == "tool_use"


def test_a_schema_that_nobody_can_keep_is_refused_with_its_place(client):
    bad = {"type": "object", "properties": {"a": {"$ref": "https://example.com/x.json"}}}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "f", "parameters": bad}}]
    for stream in (False, True):
        with pytest.raises(
            openai.BadRequestError, match=r"tools\[1\].function.parameters"
        ) as error:
            client.chat.completions.create(
                messages=ASK, tools=tools, tool_choice="required", stream=stream, **GREEDY
            )
        assert error.value.param == "tools[1].function.parameters"


# -- where a parser reads -------------------------------------------------------------------------


@pytest.fixture
def reading(client):
    if not client.reads:
        pytest.skip("needs the parsers")
    return client


def test_thoughts_come_before_a_forced_call(reading):
    answer = create(reading, tool_choice="required", parallel_tool_calls=False)
    message = answer.choices[0].message
    assert message.reasoning
    assert check(message.tool_calls)


def test_strict_functions_are_called_as_declared_or_not_at_all(reading):
    strict = [{"type": "function", "function": {**one, "strict": True}} for one in (WEATHER, ADD)]
    ask = [{"role": "user", "content": "What is the weather in Rome?"}]
    answer = reading.chat.completions.create(messages=ask, tools=strict, **GREEDY).choices[0]
    assert check(answer.message.tool_calls) == ["get_weather"]
    assert answer.finish_reason == "tool_calls"
    talk = reading.chat.completions.create(messages=ASK, tools=strict, **GREEDY).choices[0]
    plain = reading.chat.completions.create(messages=ASK, tools=TOOLS, **GREEDY).choices[0]
    assert talk.message.content == plain.message.content


def test_with_a_format_the_answer_is_in_that_format_or_calls(reading):
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    said = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for ask in ("What is the weather in Rome?", "What is the capital of France?"):
        message = (
            reading.chat.completions.create(
                messages=[{"role": "user", "content": ask}],
                tools=TOOLS,
                response_format=said,
                **GREEDY,
            )
            .choices[0]
            .message
        )
        if message.tool_calls:
            assert check(message.tool_calls)
        else:
            jsonschema.validate(json.loads(message.content), schema)


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_thoughts_end_when_their_budget_is_spent(reading, budget):
    ask = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = {"messages": ask, **GREEDY, "extra_body": {"thinking_token_budget": budget}}
    for tools in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"}):
        answer = reading.chat.completions.create(**asked, **tools)
        told = answer.usage.completion_tokens_details.reasoning_tokens
        assert told == budget, answer
        message = answer.choices[0].message
        assert message.content or message.tool_calls


def test_no_effort_is_no_thought(reading):
    asked = {"messages": ASK, **GREEDY}
    answer = reading.chat.completions.create(**asked, reasoning_effort="none")
    assert answer.choices[0].message.reasoning is None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_messages_keep_the_budget_that_they_ask_for(reading, running):
    def tokens(thinking):
        asked = {"model": "embedded", "max_tokens": 2000, "messages": ASK, "temperature": 0}
        got = reading._client.post(
            f"{running.url}/v1/messages", json={**asked, "thinking": thinking}
        )
        assert got.status_code == 200, got.text
        assert "x-quire-ignored" not in got.headers
        return [block["type"] for block in got.json()["content"]]

    assert "thinking" in tokens({"type": "enabled", "budget_tokens": 1024})
    assert "thinking" not in tokens({"type": "disabled"})
