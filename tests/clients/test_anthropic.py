"""The official `anthropic` client on /v1/messages, with its strict validation on."""

import asyncio

import pytest

from tests.clients.cases import QUESTIONS, TOOL, WEATHER, ask, check_tool_text
from tests.clients.conftest import KEY, MODEL

anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")

TOOLS = [
    {
        "name": TOOL["name"],
        "description": TOOL["description"],
        "input_schema": TOOL["parameters"],
    }
]
CASES = {
    **{name: dict(messages=ask(text)) for name, text in QUESTIONS.items()},
    "a tool": dict(messages=ask(WEATHER), tools=TOOLS, tool_choice={"type": "none"}),
    "a system": dict(messages=ask("Who are you?"), system="You are a helpful assistant."),
    "system blocks": dict(
        messages=ask("Who are you?"), system=[{"type": "text", "text": "You are helpful."}]
    ),
    "blocks": dict(
        messages=[{"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]}]
    ),
    "turns": dict(
        messages=[
            *ask("My name is Ada."),
            {"role": "assistant", "content": "Hello Ada."},
            *ask("What is my name?"),
        ]
    ),
    "a stop sequence": dict(messages=ask("What is the capital of France?"), stop_sequences=["is"]),
    "a limit": dict(messages=ask("Tell me a joke."), max_tokens=5),
    "top_k and top_p": dict(messages=ask("What is 2 + 2?"), extra_body={"top_k": 1, "top_p": 0.9}),
}


@pytest.fixture(scope="module")
def client(served):
    with anthropic.Anthropic(
        base_url=served.url,
        api_key=KEY,
        max_retries=0,
        timeout=60,
        _strict_response_validation=True,
    ) as made:
        yield made


def with_defaults(case):
    extra = {"extra_body": {"temperature": 0}}
    return {"model": MODEL, "max_tokens": 100, **extra, **case}


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_stream_says_what_the_whole_answer_says(client, case):
    asked = with_defaults(case)
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        built = stream.get_final_message()
    assert text == text_of(whole)
    assert [block.type for block in built.content] == [block.type for block in whole.content]
    assert text_of(built) == text_of(whole)
    assert built.stop_reason == whole.stop_reason
    assert built.stop_sequence == whole.stop_sequence
    assert built.usage.output_tokens == whole.usage.output_tokens

    def prompt(usage):  # the second run finds the first one's prompt in the cache
        return usage.input_tokens + (usage.cache_read_input_tokens or 0)

    assert prompt(built.usage) == prompt(whole.usage)


def test_the_raw_stream_of_events_builds_the_same(client):
    asked = with_defaults(CASES["a sum"])
    whole = client.messages.create(**asked)
    text = ""
    for event in client.messages.create(**asked, stream=True):
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            text += event.delta.text
    assert text == text_of(whole)


def test_a_chat_over_openai_says_the_same(client, served):
    import openai

    whole = text_of(client.messages.create(**with_defaults(CASES["a capital"])))
    with openai.OpenAI(base_url=served.v1, api_key=KEY) as other:
        got = other.chat.completions.create(
            model=MODEL, messages=CASES["a capital"]["messages"], temperature=0, max_tokens=100
        )
    assert got.choices[0].message.content == whole


def test_why_it_stopped(client):
    limit = client.messages.create(**with_defaults(CASES["a limit"]))
    assert (limit.stop_reason, limit.usage.output_tokens) == ("max_tokens", 5)
    stop = client.messages.create(**with_defaults(CASES["a stop sequence"]))
    assert (stop.stop_reason, stop.stop_sequence) == ("stop_sequence", "is")
    end = client.messages.create(**with_defaults(CASES["a capital"]))
    assert (end.stop_reason, end.stop_sequence) == ("end_turn", None)


def test_tools_reach_the_template(client):
    got = client.messages.create(**with_defaults(CASES["a tool"]))
    check_tool_text(text_of(got))


def test_a_tool_result_comes_back(client):
    messages = [
        *ask(WEATHER),
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": '{"temperature": 21}'}
            ],
        },
    ]
    case = dict(messages=messages, tools=TOOLS, tool_choice={"type": "none"})
    assert "21" in text_of(client.messages.create(**with_defaults(case)))


def test_tokens_are_counted_as_they_are_used(client):
    asked = dict(model=MODEL, messages=ask("Count my tokens, please."), system="Be kind.")
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_async_streams(served, client):
    async def main():
        async with anthropic.AsyncAnthropic(
            base_url=served.url, api_key=KEY, max_retries=0, _strict_response_validation=True
        ) as other:

            async def one(text):
                asked = with_defaults(dict(messages=ask(text)))
                whole = await other.messages.create(**asked)
                async with other.messages.stream(**asked) as stream:
                    said = "".join([piece async for piece in stream.text_stream])
                assert said == text_of(whole)

            await asyncio.gather(*(one(text) for text in QUESTIONS.values()))

    asyncio.run(main())


BAD = [
    (dict(max_tokens=0), "BadRequestError", "invalid_request_error"),
    (dict(messages=[]), "BadRequestError", "invalid_request_error"),
    (dict(extra_body={"temperature": 5}), "BadRequestError", "invalid_request_error"),
    (dict(model="other"), "NotFoundError", "not_found_error"),
    (dict(stop_sequences=[""]), "BadRequestError", "invalid_request_error"),
]


@pytest.mark.parametrize(("change", "kind", "name"), BAD, ids=lambda v: str(v)[:40])
def test_what_is_wrong_raises_the_clients_own_error(client, change, kind, name):
    with pytest.raises(getattr(anthropic, kind)) as caught:
        client.messages.create(**{**with_defaults(CASES["a capital"]), **change})
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == name


def test_a_wrong_key_is_an_authentication_error(client):
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client.with_options(api_key="wrong").messages.create(**with_defaults(CASES["a sum"]))
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_a_timeout_is_a_timeout_and_ends_the_run(client, served):
    with pytest.raises(anthropic.APITimeoutError):
        client.with_options(timeout=0.004).messages.create(**with_defaults(CASES["a joke"]))
    served.wait_idle()


def test_leaving_a_stream_ends_the_run(client, served):
    with client.messages.stream(**with_defaults(CASES["a joke"])) as stream:
        for _, event in zip(range(4), stream):
            assert event.type
    served.wait_idle()
