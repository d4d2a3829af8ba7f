import json

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from quire.server.app_state import MIN_PROMPT_CHAR_LIMIT
from quire.server.options import ServerOptions
from tests.server.harness import Server

HELLO = [{"role": "user", "content": "Say something nice."}]
TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
}
EVENTS = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


def ask(claude, messages=HELLO, **more):
    return claude.messages.create(model="tiny", max_tokens=100, messages=messages, **more)


def streamed(http, **body):
    """The events as (name of the event line, its data), each in the form of the official types."""
    body = {"model": "tiny", "max_tokens": 100, "messages": HELLO, "stream": True, **body}
    with http.stream("POST", "/v1/messages", json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read().decode()
    blocks = raw.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        first, second = block.split("\n")
        data = json.loads(second.removeprefix("data: "))
        EVENTS.validate_python(data)
        found.append((first.removeprefix("event: "), data))
    return found


# -- one answer -------------------------------------------------------------------------------


def test_an_answer_is_what_the_official_type_says(claude, server):
    got = ask(claude)
    Message.model_validate(got.model_dump())
    assert got.id.startswith("msg")
    assert (got.type, got.role, got.model) == ("message", "assistant", "tiny")
    assert [block.type for block in got.content] == ["text"]
    assert got.content[0].text == server.answer(HELLO)
    assert (got.stop_reason, got.stop_sequence) == ("end_turn", None)


def test_cached_tokens_are_counted_apart(claude, server):
    messages = [{"role": "user", "content": "the same long words again and again"}]
    ask(claude, messages)
    usage = ask(claude, messages).usage
    assert usage.cache_read_input_tokens > 0
    assert usage.input_tokens + usage.cache_read_input_tokens == len(server.chat_ids(messages))
    assert usage.cache_creation_input_tokens == 0


def test_the_limit_of_tokens_is_told(claude):
    got = claude.messages.create(model="tiny", max_tokens=3, messages=HELLO)
    assert got.stop_reason == "max_tokens"
    assert got.usage.output_tokens == 3


def test_the_stop_sequence_that_ended_it_is_told(claude, server):
    whole = server.answer(HELLO)
    stop = whole[4:7]
    got = ask(claude, stop_sequences=["never there", stop])
    assert got.content[0].text == whole[: whole.index(stop)]
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", stop)


def test_an_answer_without_a_word_has_an_empty_block(claude, server):
    got = ask(claude, stop_sequences=[server.answer(HELLO)[0]])
    assert [block.text for block in got.content] == [""]


@pytest.mark.parametrize(
    "system", ["Be kind.", [{"type": "text", "text": "Be", "cache_control": None}]]
)
def test_the_system_text_stands_first(claude, server, system):
    got = ask(claude, system=system)
    text = system if isinstance(system, str) else "Be"
    assert got.content[0].text == server.answer([{"role": "system", "content": text}, *HELLO])


def test_a_billing_line_is_not_part_of_the_system_text(claude, server):
    line = "x-anthropic-billing-header: cc_version=1; cch=2;"
    expected = server.answer([{"role": "system", "content": "Be kind."}, *HELLO])
    blocks = [{"type": "text", "text": line}, {"type": "text", "text": "Be kind."}]
    assert ask(claude, system=blocks).content[0].text == expected
    assert ask(claude, system=f"{line}\nBe kind.").content[0].text == expected


def test_blocks_of_text_are_joined(claude, server):
    parts = [{"type": "text", "text": "Who are"}, {"type": "text", "text": "you?"}]
    messages = [{"role": "user", "content": parts}]
    assert ask(claude, messages).content[0].text == server.answer(messages)


def test_a_last_word_of_the_assistant_is_gone_on_with(claude, server):
    messages = [*HELLO, {"role": "assistant", "content": "The best"}]
    text = server.tokenizer.template().render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    ids = server.tokenizer.encode(text, add_special_tokens=False)
    assert ask(claude, messages).content[0].text == server.model.text(ids)


def test_template_variables_are_honoured(claude, server):
    got = ask(claude, extra_body={"chat_template_kwargs": {"shout": True}})
    assert got.content[0].text == server.answer(HELLO, shout=True)


def test_tools_reach_the_template_in_the_form_of_the_chat_route(claude, server):
    got = ask(claude, tools=[TOOL | {"strict": True}])
    function = {"name": "add", "parameters": TOOL["input_schema"], "description": "Adds."}
    text = server.tokenizer.template().render(HELLO, [{"type": "function", "function": function}])
    ids = server.tokenizer.encode(text, add_special_tokens=False)
    assert got.content[0].text == server.model.text(ids)


# -- a stream ---------------------------------------------------------------------------------


def test_events_come_in_their_order(http, server):
    events = streamed(http)
    names = [name for name, _ in events]
    deltas = names.count("content_block_delta")
    assert deltas >= 1
    assert names == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [data["type"] for _, data in events] == names
    start = events[0][1]["message"]
    usage = start["usage"]
    prompt = len(server.chat_ids(HELLO))
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    assert start["content"] == []
    assert start["stop_reason"] is None


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("extra", [{}, {"max_tokens": 9}, {"stop_sequences": ["at", "汉"]}])
def test_a_stream_says_what_the_whole_answer_says(claude, place, extra):
    messages = [{"role": "user", "content": f"number {place}"}]
    asked = {"model": "tiny", "max_tokens": 100, "messages": messages, **extra}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        got = stream.get_final_message()
    assert text == whole.content[0].text == got.content[0].text
    assert (got.stop_reason, got.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert got.usage.output_tokens == whole.usage.output_tokens


def test_a_stream_without_a_word_has_an_empty_block(http, server):
    events = streamed(http, stop_sequences=[server.answer(HELLO)[0]])
    assert [name for name, _ in events] == [
        *("message_start", "content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


def test_a_fault_of_the_engine_is_an_error_of_the_stream(tokenizer):
    with (
        Server(tokenizer, step_s=0.005).running() as broken,
        anthropic.Anthropic(base_url=broken.url, api_key="none", max_retries=0) as made,
    ):
        stream = made.messages.create(model="tiny", max_tokens=400, messages=HELLO, stream=True)
        next(iter(stream))
        broken.executor.fail_with = RuntimeError("at /secret/place")
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(stream)
    assert caught.value.body["error"]["type"] == "api_error"
    assert "/secret" not in str(caught.value)


def test_a_client_that_goes_away_ends_its_message(server, http):
    body = {"model": "tiny", "max_tokens": 400, "messages": HELLO, "stream": True}
    with http.stream("POST", "/v1/messages", json=body) as response:
        next(response.iter_lines())
    server.wait_idle()


# -- counting ---------------------------------------------------------------------------------


def test_tokens_are_counted_without_answering(claude, server):
    got = claude.messages.count_tokens(model="tiny", messages=HELLO, system="Be kind.")
    system = [{"role": "system", "content": "Be kind."}]
    assert got.input_tokens == len(server.chat_ids([*system, *HELLO]))


def test_a_conversation_that_is_too_long_is_counted(claude, server):
    messages = [{"role": "user", "content": "word " * 1000}]
    got = claude.messages.count_tokens(model="tiny", messages=messages)
    assert got.input_tokens == len(server.chat_ids(messages))


def test_what_would_take_minutes_to_count_is_refused(http):
    messages = [{"role": "user", "content": "x" * (MIN_PROMPT_CHAR_LIMIT + 1)}]
    got = http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": messages})
    assert got.status_code == 400
    assert "characters" in got.json()["error"]["message"]


# -- refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "kind", "word"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": 3}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "boss", "content": ""}]}, 400, "invalid_request_error", "role"),
        ({"temperature": 3}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop"),
        ({"stop_sequences": ["x"] * 65}, 400, "invalid_request_error", "stop_sequences"),
        ({"thinking": {"type": "deep"}}, 400, "invalid_request_error", "thinking"),
        ({"tool_choice": {"type": "some"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tools": [{"name": "x"}]}, 400, "invalid_request_error", "input_schema"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 501, "api_error", "tools"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tools must be given"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
            400,
            "invalid_request_error",
            "'x'",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto"}},
            400,
            "invalid_request_error",
            "--tool-call-parser",
        ),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            400,
            "invalid_request_error",
            "format",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 5}},
            400,
            "invalid_request_error",
            "budget",
        ),
        ({"container": "c"}, 501, "api_error", "container"),
        ({"speed": "fast"}, 501, "api_error", "speed"),
        ({"model": "other"}, 404, "not_found_error", "other"),
    ],
)
def test_what_cannot_be_done_is_refused_in_this_dialects_form(http, body, status, kind, word):
    asked = {"model": "tiny", "max_tokens": 9, "messages": HELLO, **body}
    got = http.post("/v1/messages", json={k: v for k, v in asked.items() if v is not None})
    assert got.status_code == status, got.text
    assert got.json()["type"] == "error"
    assert got.json()["error"]["type"] == kind
    assert word in got.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        ([{"type": "image", "source": {"type": "url", "url": "http://x"}}], 400),
        ([{"type": "document", "source": {"type": "text", "data": "x"}}], 501),
        ([{"type": "text"}], 400),
        (["text"], 400),
        ([{"type": "tool_result", "content": "3"}], 400),
        ([{"type": "tool_result", "tool_use_id": "1", "content": 3}], 400),
    ],
)
def test_blocks_that_cannot_be_read_are_refused_with_their_place(http, content, status):
    messages = [*HELLO, {"role": "user", "content": content}]
    body = {"model": "tiny", "max_tokens": 9, "messages": messages}
    got = http.post("/v1/messages", json=body)
    assert got.status_code == status, got.text
    assert "messages" in got.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_faults_before_the_body_is_read_have_this_dialects_form(http, path):
    for got in (http.post(path, content=b"{"), http.post(path, json=[]), http.get(path)):
        assert 400 <= got.status_code < 500
        assert got.json()["type"] == "error"


def test_what_is_not_built_is_not_tried_again(http):
    body = {"model": "tiny", "max_tokens": 9, "messages": HELLO, "speed": "fast"}
    assert http.post("/v1/messages", json=body).headers["x-should-retry"] == "false"


def test_fields_that_change_nothing_are_told(http):
    body = {
        "model": "tiny",
        "max_tokens": 1025,
        "messages": HELLO,
        "metadata": {"user_id": "me"},
        "cache_control": {"type": "ephemeral"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "no_such_field": 1,
    }
    got = http.post("/v1/messages", json=body)
    assert got.status_code == 200, got.text
    told = got.headers["x-quire-ignored"].split(",")
    assert sorted(told) == [
        *("cache_control", "metadata", "no_such_field", "thinking.budget_tokens")
    ]


@pytest.mark.parametrize("name", ["mine", "汉"])
def test_a_message_bears_the_name_that_was_wished(http, name):
    body = {"model": "tiny", "max_tokens": 9, "messages": HELLO, "request_id": name}
    got = http.post("/v1/messages", json=body)
    assert got.json()["id"] == f"msg_{name}"
    assert got.headers.get("request-id") == ("msg_mine" if name == "mine" else None)


@pytest.mark.parametrize("name", ["api_key", "auth_token"])
def test_the_key_comes_in_either_header(tokenizer, name):
    with Server(tokenizer, options=ServerOptions(api_key=("secret",))).running() as locked:
        with anthropic.Anthropic(base_url=locked.url, max_retries=0, **{name: "secret"}) as made:
            assert ask(made).role == "assistant"
        with (
            anthropic.Anthropic(base_url=locked.url, max_retries=0, **{name: "wrong"}) as made,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            ask(made)
    assert caught.value.body["error"]["type"] == "authentication_error"
