"""The official `openai` client, with its strict validation of every answer on."""

import asyncio
import json

import httpx
import openai
import pytest

from tests.clients.cases import QUESTIONS, TOOL, WEATHER, ask, check_tool_text
from tests.clients.conftest import KEY, MODEL

TOOLS = [{"type": "function", "function": TOOL}]
CASES = {
    **{name: dict(messages=ask(text)) for name, text in QUESTIONS.items()},
    "a tool": dict(messages=ask(WEATHER), tools=TOOLS, tool_choice="none"),
    "logprobs": dict(messages=ask("What is 31 + 44?"), logprobs=True, top_logprobs=3),
    "choices": dict(messages=ask("Tell me a joke."), n=3, seed=7, temperature=1),
    "a seed": dict(messages=ask("Tell me a joke."), seed=1234, temperature=0.9, top_p=0.95),
    "a stop string": dict(messages=ask("What is the capital of France?"), stop=["is Par", "zz"]),
    "a limit": dict(messages=ask("Tell me a joke."), max_completion_tokens=11),
    "penalties": dict(
        messages=ask("Tell me a joke."),
        frequency_penalty=0.7,
        presence_penalty=0.3,
        logit_bias={"1000": 2},
    ),
    "a system and parts": dict(
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "Who are you?"},
        ]
    ),
    "extra fields": dict(
        messages=ask("What is the capital of France?"),
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.05,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
}


def with_defaults(case):
    return {"model": MODEL, "temperature": 0, **case}


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


@pytest.fixture(scope="module")
def lenient(served):
    """For completions: the client's own types lack the nulls that OpenAI's server sends too."""
    with openai.OpenAI(base_url=served.v1, api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def joined(chunks):
    """(text, finish reason, logprobs of tokens) by choice."""
    found = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text, finish, tokens = found.get(choice.index, ("", None, []))
            assert finish is None, "news after the end of a choice"
            logprobs = choice.logprobs.content if choice.logprobs else []
            content = choice.delta.content or ""
            found[choice.index] = (text + content, choice.finish_reason, tokens + (logprobs or []))
    return found


def of_whole(answer):
    return {
        c.index: (
            c.message.content,
            c.finish_reason,
            (c.logprobs.content or []) if c.logprobs else [],
        )
        for c in answer.choices
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_stream_says_what_the_whole_answer_says(client, case):
    asked = with_defaults(case)
    whole = client.chat.completions.create(**asked)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    assert joined(chunks[:-1]) == of_whole(whole)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len(whole.choices) == case.get("n", 1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_tokens_are_the_same_too(client, case):
    asked = with_defaults(case)
    extra = {**asked.pop("extra_body", {}), "return_token_ids": True}
    whole = client.chat.completions.create(**asked, extra_body=extra)
    ids = {}
    prompt = None
    for chunk in client.chat.completions.create(**asked, extra_body=extra, stream=True):
        prompt = prompt or getattr(chunk, "prompt_token_ids", None)
        for choice in chunk.choices:
            ids.setdefault(choice.index, []).extend(getattr(choice, "token_ids", None) or [])
    assert ids == {c.index: c.token_ids for c in whole.choices}
    assert prompt == whole.prompt_token_ids
    assert sum(map(len, ids.values())) == whole.usage.completion_tokens


@pytest.mark.parametrize("text", ["Once upon a time", ["The capital of", "1 + 1 ="]])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"echo": True, "logprobs": 2},
        {"n": 2, "seed": 3, "temperature": 0.8},
        {"stop": "a"},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
    ],
    ids=str,
)
def test_completions_stream_as_they_are_whole(lenient, text, extra):
    asked = {"model": MODEL, "prompt": text, "temperature": 0, "max_tokens": 24, **extra}
    whole = lenient.completions.create(**asked)
    texts, ends, tokens = {}, {}, {}
    for chunk in lenient.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ends[choice.index] = choice.finish_reason
            if choice.logprobs:
                tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens)
    assert texts == {c.index: c.text for c in whole.choices}
    assert ends == {c.index: c.finish_reason for c in whole.choices}
    assert tokens == {c.index: c.logprobs.tokens for c in whole.choices if c.logprobs}


def test_tools_reach_the_template_and_the_model_calls_one(client):
    asked = with_defaults(CASES["a tool"])
    with_tools = client.chat.completions.create(**asked)
    check_tool_text(with_tools.choices[0].message.content)
    without = client.chat.completions.create(
        **{**asked, "tools": openai.omit, "tool_choice": openai.omit}
    )
    assert "<tool_call>" not in without.choices[0].message.content
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens


def test_logprobs_rank_and_name_their_tokens(client):
    answer = client.chat.completions.create(**with_defaults(CASES["logprobs"]))
    content = answer.choices[0].logprobs.content
    said = answer.choices[0].message.content
    assert b"".join(bytes(t.bytes) for t in content).decode().startswith(said)
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # greedy
        values = [one.logprob for one in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert all(v <= 0 for v in values)


def test_a_seed_repeats_and_another_differs(client):
    def joke(seed):
        got = client.chat.completions.create(
            model=MODEL, messages=ask("Tell me a story."), seed=seed, temperature=1.5, n=2
        )
        return [c.message.content for c in got.choices]

    first = joke(1)
    assert joke(1) == first
    assert joke(2) != first
    assert first[0] != first[1]


def test_async_streams_and_answers_agree_and_run_together(served):
    async def main():
        async with openai.AsyncOpenAI(
            base_url=served.v1, api_key=KEY, max_retries=0, _strict_response_validation=True
        ) as client:

            async def one(text):
                asked = with_defaults(dict(messages=ask(text)))
                whole = await client.chat.completions.create(**asked)
                stream = await client.chat.completions.create(**asked, stream=True)
                assert joined([chunk async for chunk in stream]) == of_whole(whole)

            await asyncio.gather(*(one(text) for text in QUESTIONS.values()))

    asyncio.run(main())


def test_the_stream_helper_of_the_client_builds_the_whole_answer(client):
    asked = with_defaults(CASES["a sum"])
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        built = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert built.choices[0].message.content == whole.choices[0].message.content


def test_raw_and_streaming_responses(client):
    asked = with_defaults(CASES["a capital"])
    raw = client.chat.completions.with_raw_response.create(**asked)
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    text = raw.parse().choices[0].message.content
    with client.chat.completions.with_streaming_response.create(**asked, stream=True) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    deltas = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    pieces = [c["delta"].get("content") or "" for one in deltas for c in one["choices"]]
    assert "".join(pieces) == text


def test_models_are_listed_and_shown(client):
    (card,) = client.models.list().data
    assert (card.id, card.object, card.owned_by) == (MODEL, "model", "quire")
    assert client.models.retrieve(MODEL) == card
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


BAD = [
    (dict(temperature=-1), openai.BadRequestError, "temperature"),
    (dict(n=0), openai.BadRequestError, "n"),
    (dict(max_completion_tokens=-1), openai.BadRequestError, None),
    (dict(messages=[]), openai.BadRequestError, "messages"),
    (dict(messages=[{"role": "user", "content": [{"type": "x"}]}]), openai.BadRequestError, None),
    (dict(top_logprobs=3), openai.BadRequestError, "top_logprobs"),
    (dict(extra_body={"top_k": "x"}), openai.BadRequestError, "top_k"),
    (dict(model="other"), openai.NotFoundError, "model"),
    (dict(tools=TOOLS, tool_choice="always"), openai.BadRequestError, "tool_choice"),
]


@pytest.mark.parametrize(("change", "kind", "param"), BAD, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_raises_the_clients_own_error(client, change, kind, param, stream):
    asked = {**with_defaults(CASES["a capital"]), **change, "stream": stream}
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**asked)
    if param is not None:
        assert caught.value.param == param
    assert caught.value.body["message"]


@pytest.mark.parametrize("key", ["wrong", KEY[:-1], KEY + "x"])
def test_a_wrong_key_is_an_authentication_error(client, key):
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key=key).models.list()


def test_both_keys_open(client):
    assert client.with_options(api_key="another-key").models.list().data


def test_a_timeout_is_a_timeout_and_ends_the_run(client, served):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).completions.create(
            model=MODEL, prompt="a", max_tokens=4000, extra_body={"ignore_eos": True}
        )
    served.wait_idle()


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_leaving_a_stream_ends_the_run(lenient, served, chunks):
    before = served.generated()
    stream = lenient.completions.create(
        model=MODEL, prompt="a", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    with stream:
        for _ in range(chunks):
            next(stream)
    served.wait_idle()
    assert chunks <= served.generated() - before < 4000


def test_no_server_is_a_connection_error():
    with (
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()


def test_an_embedding_of_a_generating_model(lenient):
    answer = lenient.embeddings.create(model=MODEL, input=["a", "b", "a"])
    first, second, third = (one.embedding for one in answer.data)
    assert first == third != second
    assert sum(x * x for x in first) == pytest.approx(1.0, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


def test_a_key_is_needed_beyond_the_probes(served):
    assert httpx.get(f"{served.url}/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/version"):
        assert httpx.get(served.url + path).status_code == 401, path
