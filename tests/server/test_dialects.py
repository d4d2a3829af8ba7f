"""What the dialects say of reasoning and tool calls, and how they read them in a history: without
a server, because no model of the tests writes any."""

import functools
import json

import openai.types.responses as oai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from quire.server.formats.messages_formatter import MessagesFormatter
from quire.server.formats.messages_request import AnthropicMessagesRequest
from quire.server.formats.responses_formatter import ResponsesFormatter, build_response_body
from quire.server.formats.responses_request import ResponsesRequest
from quire.server.generation.events import (
    ChoiceDelta,
    ChoiceFinish,
    DeltaToolCall,
    FinalEvent,
    FullChoice,
    FullResponse,
    PromptEvent,
    TokenUsage,
)

CALLS = [
    ChoiceDelta(0, tool_call=DeltaToolCall(0, "call_1", "add")),
    ChoiceDelta(0, tool_call=DeltaToolCall(0, arguments='{"a"')),
    ChoiceDelta(0, tool_call=DeltaToolCall(0, arguments=": 1}")),
    ChoiceDelta(0, tool_call=DeltaToolCall(1, "call_2", "sub", "{}")),
]
SAID = [
    [PromptEvent(0, [1, 2, 3, 4, 5], 2)],
    [ChoiceDelta(0, reasoning="Let me ", token_ids=[7])],
    [ChoiceDelta(0, reasoning="think.", token_ids=[8, 9])],
    [ChoiceDelta(0, "The sum", [10])],
    [ChoiceDelta(0, " is", [11]), *CALLS],
    [ChoiceFinish(0, "tool_calls")],
    [
        FinalEvent(
            TokenUsage(prompt_tokens=5, completion_tokens=9, cached_tokens=2, reasoning_tokens=3)
        )
    ],
]
WHOLE = FullResponse(
    prompts=[SAID[0][0]],
    choices=[
        FullChoice(
            0,
            text="The sum is",
            reasoning="Let me think.",
            tool_calls=[
                DeltaToolCall(0, "call_1", "add", '{"a": 1}'),
                DeltaToolCall(1, "call_2", "sub", "{}"),
            ],
            token_ids=[7, 8, 9, 10, 11],
            finish_reason="tool_calls",
        )
    ],
    final=SAID[-1][0],
)


validator = functools.cache(TypeAdapter)


def parse(raw, kind):
    found = []
    for block in raw.decode().split("\n\n")[:-1]:
        first, second = block.split("\n")
        data = json.loads(second.removeprefix("data: "))
        validator(kind).validate_python(data)
        assert first == f"event: {data['type']}"
        found.append(data)
    return found


# -- responses --------------------------------------------------------------------------------


def response_shape():
    return ResponsesFormatter(
        build_response_body(id="resp_abc", model="tiny", stored=False, asked={}, used={})
    )


def response_events():
    shape = response_shape()
    raw = shape.format_start() + b"".join(shape.format_events(batch) for batch in SAID)
    return parse(raw, oai.ResponseStreamEvent)


def test_thoughts_text_and_calls_are_items_in_their_order():
    events = response_events()
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event for event in events if event["type"].endswith("item.added")]
    done = [event for event in events if event["type"].endswith("item.done")]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert [event["item"]["id"] for event in added] == [event["item"]["id"] for event in done]


def test_the_response_holds_what_its_items_said():
    got = oai.Response.model_validate(response_events()[-1]["response"])
    thought, message, first, second = got.output
    assert thought.content[0].text == "Let me think."
    assert message.content[0].text == got.output_text == "The sum is"
    assert (first.call_id, first.name, first.arguments) == ("call_1", "add", '{"a": 1}')
    assert (second.call_id, second.name, second.arguments) == ("call_2", "sub", "{}")
    assert got.usage.output_tokens_details.reasoning_tokens == 3
    assert got.usage.input_tokens_details.cached_tokens == 2


def test_a_response_is_the_same_streamed_or_not():
    streamed = response_events()[-1]["response"]
    whole = response_shape().format_full(WHOLE)
    for one in (streamed, whole):
        one.pop("created_at"), one.pop("completed_at")
    assert whole == streamed


def test_a_call_that_is_cut_is_incomplete():
    shape = response_shape()
    for batch in [[SAID[0][0]], CALLS[:2], [ChoiceFinish(0, "length")], SAID[-1]]:
        shape.format_events(batch)
    call = shape.response["output"][-1]
    assert (call["type"], call["status"], call["arguments"]) == (
        *("function_call", "incomplete", '{"a"'),
    )
    assert shape.response["status"] == "incomplete"


def test_an_answer_of_thoughts_alone_has_an_empty_message():
    shape = response_shape()
    for batch in [*SAID[:3], [ChoiceFinish(0, "stop")], SAID[-1]]:
        shape.format_events(batch)
    assert [one["type"] for one in shape.response["output"]] == ["reasoning", "message"]


def test_an_aborted_response_is_cancelled():
    shape = response_shape()
    raw = b"".join(
        shape.format_events(batch) for batch in [SAID[0], [ChoiceFinish(0, "abort")], SAID[-1]]
    )
    last = parse(raw, oai.ResponseStreamEvent)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")


def messages_of(items, **more):
    return (
        ResponsesRequest.model_validate({"input": items, **more})
        .to_generation_request()
        .source.messages
    )


def call(call_id, name="add", arguments="{}"):
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "id": "fc_1",
        "status": "completed",
    }


def chat_call(call_id, name="add", arguments="{}"):
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def thought(*texts):
    parts = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts}


def test_items_of_one_turn_become_one_message():
    items = [
        {"role": "user", "content": "1 + 1?"},
        thought("Hm,", "a sum."),
        {"type": "message", "role": "assistant", "content": "I add."},
        call("1"),
        call("2"),
        {"type": "function_call_output", "call_id": "1", "output": "2"},
        {"type": "function_call_output", "call_id": "2", "output": "3"},
        call("3"),
    ]
    assert messages_of(items) == [
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning": "Hm,\na sum.",
            "tool_calls": [chat_call("1"), chat_call("2")],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "tool", "content": "3", "tool_call_id": "2"},
        {"role": "assistant", "content": "", "tool_calls": [chat_call("3")]},
    ]


def test_thoughts_that_led_to_a_call_stay_with_it():
    items = [{"role": "user", "content": "x"}, thought("Hm."), call("1")]
    assert messages_of(items)[1] == {
        "role": "assistant",
        "content": "",
        "reasoning": "Hm.",
        "tool_calls": [chat_call("1")],
    }


def test_thoughts_that_nobody_can_read_leave_nothing():
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
    items = [{"role": "user", "content": "x"}, sealed, {"role": "user", "content": "y"}]
    assert messages_of(items) == [items[0], items[2]]


def test_thoughts_without_a_word_after_them_are_a_message():
    items = [{"role": "user", "content": "x"}, thought("Hm."), {"role": "user", "content": "y"}]
    assert messages_of(items)[1] == {"role": "assistant", "content": "", "reasoning": "Hm."}


def test_what_a_response_said_can_be_said_back():
    shape = response_shape()
    output = shape.format_full(WHOLE)["output"]
    made = messages_of([{"role": "user", "content": "x"}, *output])[1]
    assert made["reasoning"] == "Let me think."
    assert [one["function"]["name"] for one in made["tool_calls"]] == ["add", "sub"]


def test_settings_of_a_response_reach_the_request():
    body = {
        "input": "x",
        "max_output_tokens": 7,
        "reasoning": {"effort": "low"},
        "truncation": "auto",
        "chat_template_kwargs": {"a": 1},
        "vllm_xargs": {"b": 2},
        "cache_salt": "s",
        "priority": 3,
        "tool_choice": {"type": "function", "name": "add"},
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    }
    asked = ResponsesRequest.model_validate(body).to_generation_request()
    assert asked.sampling == {
        "max_tokens": 7,
        "truncate_prompt_tokens": -1,
        "extra_args": {"b": 2},
    }
    assert asked.source.reasoning_effort == "low"
    assert asked.source.template_variables == {"a": 1}
    assert (asked.salt, asked.priority, asked.parallel_tool_calls) == ("s", 3, False)
    assert asked.tool_choice == {"type": "function", "function": {"name": "add"}}
    assert asked.structure.params.json == {}
    assert asked.structure.param == "text.format.schema"


# -- messages ---------------------------------------------------------------------------------


def message_events():
    shape = MessagesFormatter("msg_abc", "tiny")
    return parse(b"".join(shape.format_events(batch) for batch in SAID), RawMessageStreamEvent)


def test_thoughts_text_and_calls_are_blocks_in_their_order():
    events = message_events()
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    stops = [e["index"] for e in events if e["type"] == "content_block_stop"]
    assert stops == [0, 1, 2, 3]
    deltas = [e["delta"]["type"] for e in events if e["type"] == "content_block_delta"]
    assert deltas == [
        *("thinking_delta", "thinking_delta", "text_delta", "text_delta"),
        *("input_json_delta", "input_json_delta", "input_json_delta"),
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 9,
    }


def test_a_whole_message_holds_the_same_blocks():
    got = Message.model_validate(MessagesFormatter("msg_abc", "tiny").format_full(WHOLE))
    thinking, text, first, second = got.content
    assert (thinking.thinking, text.text) == ("Let me think.", "The sum is")
    assert (first.id, first.name, first.input) == ("call_1", "add", {"a": 1})
    assert (second.id, second.name, second.input) == ("call_2", "sub", {})
    assert got.stop_reason == "tool_use"


@pytest.mark.parametrize("arguments", ["", "[1]", "{", "[" * 100_000])
def test_arguments_that_are_no_object_are_an_empty_one(arguments):
    said = FullResponse(
        WHOLE.prompts,
        [
            FullChoice(
                0, tool_calls=[DeltaToolCall(0, "1", "add", arguments)], finish_reason="tool_calls"
            )
        ],
        WHOLE.final,
    )
    assert MessagesFormatter("msg_abc", "tiny").format_full(said)["content"][0]["input"] == {}


def anthropic_messages(messages, **more):
    body = {"max_tokens": 9, "messages": messages, **more}
    return AnthropicMessagesRequest.model_validate(body).to_generation_request().source.messages


def test_calls_and_their_results_become_messages_of_the_chat_route():
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "2"},
                {
                    "type": "tool_result",
                    "tool_use_id": "2",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "3"},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    assert anthropic_messages(messages) == [
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I add."}],
            "reasoning": "Hm.",
            "tool_calls": [chat_call("1", arguments={"a": 1})],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {
            "role": "tool",
            "tool_call_id": "2",
            "content": [{"type": "text", "text": "no"}],
            "is_error": True,
        },
        {"role": "tool", "tool_call_id": "3", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "go on"}]},
    ]


def test_text_and_results_keep_their_order():
    texts = [{"type": "text", "text": text} for text in ("before", "after")]
    result = {"type": "tool_result", "tool_use_id": "1", "content": "2"}
    messages = [{"role": "user", "content": [texts[0], result, texts[1]]}]
    assert [one["role"] for one in anthropic_messages(messages)] == ["user", "tool", "user"]


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {}),
    ],
)
def test_thinking_is_a_variable_of_the_template(thinking, variables):
    messages = [{"role": "user", "content": "x"}]
    body = {"max_tokens": 2001, "messages": messages, "thinking": thinking}
    asked = AnthropicMessagesRequest.model_validate(body).to_generation_request()
    assert asked.source.template_variables == variables


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_the_choice_of_tools_is_said_in_the_words_of_the_chat_route(choice, expected):
    choice = choice | {"disable_parallel_tool_use": True}
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "tool_choice": choice}
    asked = AnthropicMessagesRequest.model_validate(body).to_generation_request()
    assert asked.tool_choice == expected
    assert asked.parallel_tool_calls is False


def test_effort_is_that_of_the_reasoning():
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    body["output_config"] = {"effort": "low"}
    assert (
        AnthropicMessagesRequest.model_validate(body)
        .to_generation_request()
        .source.reasoning_effort
        == "low"
    )
