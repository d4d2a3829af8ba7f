"""The official `openai` client on /v1/responses, with its strict validation on."""

import openai
import pytest

from tests.clients.cases import QUESTIONS, TOOL, WEATHER, ask, check_tool_text
from tests.clients.conftest import KEY, MODEL

TOOLS = [{"type": "function", "strict": False, **TOOL}]
TURNS = [
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello Ada."},
    {"role": "user", "content": [{"type": "input_text", "text": "What is my name?"}]},
]
CASES = {
    **{name: dict(input=text) for name, text in QUESTIONS.items()},
    "instructions": dict(input="Who are you?", instructions="You are a helpful assistant."),
    "items": dict(input=TURNS),
    "a tool": dict(input=WEATHER, tools=TOOLS, tool_choice="none"),
    "a limit": dict(input="Tell me a joke.", max_output_tokens=16),
    "logprobs": dict(
        input="What is 2 + 2?", top_logprobs=2, include=["message.output_text.logprobs"]
    ),
    "extra fields": dict(input="Tell me a joke.", extra_body={"seed": 3, "top_k": 5, "stop": "."}),
}


def with_defaults(case):
    return {"model": MODEL, "temperature": 0, "store": False, **case}


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(
        base_url=served.v1,
        api_key=KEY,
        max_retries=0,
        timeout=60,
        _strict_response_validation=True,
    ) as made:
        yield made


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_stream_says_what_the_whole_answer_says(client, case):
    asked = with_defaults(case)
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    last = events[-1].response
    assert text == whole.output_text == last.output_text
    assert last.status == whole.status
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.usage.input_tokens == whole.usage.input_tokens
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[-1].type == f"response.{whole.status}"


@pytest.mark.parametrize("name", ["a capital", "items", "logprobs"])
def test_the_stream_helper_builds_the_whole_answer(client, name):
    asked = with_defaults(CASES[name])
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        built = stream.get_final_response()
    assert built.output_text == whole.output_text
    assert [item.type for item in built.output] == [item.type for item in whole.output]


def test_chat_says_the_same(client):
    whole = client.responses.create(**with_defaults(CASES["a capital"]))
    chat = client.chat.completions.create(
        model=MODEL, messages=ask(QUESTIONS["a capital"]), temperature=0
    )
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert whole.usage.input_tokens == chat.usage.prompt_tokens


def test_a_limit_makes_it_incomplete(client):
    got = client.responses.create(**with_defaults(CASES["a limit"]))
    assert got.status == "incomplete"
    assert got.incomplete_details.reason == "max_output_tokens"
    assert got.usage.output_tokens == 16


def test_tools_reach_the_template(client):
    check_tool_text(client.responses.create(**with_defaults(CASES["a tool"])).output_text)


def test_a_function_result_comes_back(client):
    items = [
        {"role": "user", "content": WEATHER},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "get_weather",
            "arguments": '{"city": "Paris"}',
        },
        {"type": "function_call_output", "call_id": "c1", "output": '{"temperature": 21}'},
    ]
    got = client.responses.create(
        **with_defaults(dict(input=items, tools=TOOLS, tool_choice="none"))
    )
    assert "21" in got.output_text


def test_what_was_not_stored_is_not_found(client):
    got = client.responses.create(**with_defaults(CASES["a sum"]))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(got.id)
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
        client.responses.create(
            **with_defaults(dict(input="And then?", previous_response_id=got.id))
        )


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (dict(model="other"), openai.NotFoundError),
        (dict(temperature=-1), openai.BadRequestError),
        (dict(input=[]), openai.BadRequestError),
        (dict(max_output_tokens=0), openai.BadRequestError),
        (dict(tools=TOOLS, tool_choice="always"), openai.BadRequestError),
        (dict(background=True), openai.BadRequestError),
    ],
    ids=str,
)
def test_what_is_wrong_raises_the_clients_own_error(client, change, kind):
    with pytest.raises(kind) as caught:
        client.responses.create(**{**with_defaults(CASES["a capital"]), **change})
    assert caught.value.body["message"]


def test_leaving_a_stream_ends_the_run(client, served):
    extra, before = {"ignore_eos": True}, served.generated()
    stream = client.responses.create(
        model=MODEL, input="a", max_output_tokens=4000, stream=True, extra_body=extra
    )
    with stream:
        for _ in range(6):
            next(stream)
    served.wait_idle()
    assert 2 <= served.generated() - before < 4000  # four events come before the first token
