import json
import re

import httpx
import openai
import pytest

HELLO = [{"role": "user", "content": "Say something nice."}]
TALK = [
    {"role": "system", "content": "Be kind."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Who are"}, {"type": "text", "text": "you?"}],
    },
]


def streamed(client, **body):
    """(text by choice, finish by choice, chunks) of a stream."""
    texts, finishes, chunks = {}, {}, []
    for chunk in client.chat.completions.create(model="tiny", stream=True, **body):
        chunks.append(chunk)
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                assert choice.index not in finishes, "a choice ended twice"
                finishes[choice.index] = choice.finish_reason
    return texts, finishes, chunks


def test_an_answer_has_the_shape_that_the_official_client_reads(client, server):
    got = client.chat.completions.create(model="tiny", messages=HELLO)
    assert got.id.startswith("chatcmpl-")
    assert got.object == "chat.completion"
    assert got.model == "tiny"
    choice = got.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == server.answer(HELLO)
    assert choice.finish_reason == "stop"
    prompt, said = server.chat_ids(HELLO), server.model.speech(server.chat_ids(HELLO))
    assert got.usage.prompt_tokens == len(prompt)
    assert got.usage.completion_tokens == len(said) + 1  # EOS
    assert got.usage.total_tokens == len(prompt) + len(said) + 1


def test_parts_of_text_are_joined(client, server):
    got = client.chat.completions.create(model="tiny", messages=TALK)
    assert got.choices[0].message.content == server.answer(TALK)


@pytest.mark.parametrize("place", range(12))
@pytest.mark.parametrize(
    "extra", [{}, {"stop": ["at", "汉"]}, {"max_tokens": 9}, {"n": 3}, {"logprobs": True}]
)
def test_a_stream_says_what_the_whole_answer_says(client, place, extra):
    messages = [{"role": "user", "content": f"number {place}"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, **extra)
    texts, finishes, _ = streamed(client, messages=messages, **extra)
    assert texts == {c.index: c.message.content for c in whole.choices}
    assert finishes == {c.index: c.finish_reason for c in whole.choices}


def test_characters_spread_over_tokens_are_never_split(client):
    for place in range(8):
        messages = [{"role": "user", "content": f"汉字 {place}"}]
        for chunk in client.chat.completions.create(model="tiny", messages=messages, stream=True):
            assert all("\ufffd" not in (c.delta.content or "") for c in chunk.choices)


def test_the_first_chunk_has_the_role_and_the_last_the_reason(http):
    body = {"model": "tiny", "messages": HELLO, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        raw = response.read().decode()
    events = raw.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    assert all(e.startswith("data: ") and "\n" not in e for e in events[:-1])
    chunks = [json.loads(e[6:]) for e in events[:-2]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["choices"][0]["finish_reason"] is None
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert "stop_reason" in chunks[-1]["choices"][0]
    assert {c["id"] for c in chunks} == {chunks[0]["id"]}
    assert all("usage" not in c for c in chunks)
    assert all(c["object"] == "chat.completion.chunk" for c in chunks)


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(client):
    whole = client.chat.completions.create(model="tiny", messages=HELLO, n=2)
    _, _, chunks = streamed(client, messages=HELLO, n=2, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(c.usage is None for c in chunks[:-1])


def test_usage_so_far_is_on_every_chunk_when_asked_for(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, _, chunks = streamed(client, messages=HELLO, stream_options=options)
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 0, "the chunk with the role comes before the first token"
    assert chunks[0].usage.prompt_tokens == chunks[0].usage.total_tokens > 0
    assert counts[-1] == counts[-2] > 0


def test_no_chunk_has_usage_if_it_is_not_included(client):
    options = {"include_usage": False, "continuous_usage_stats": True}
    _, _, chunks = streamed(client, messages=HELLO, stream_options=options)
    assert chunks
    assert all(chunk.usage is None for chunk in chunks)


def test_an_answer_has_null_for_ids_that_were_not_requested(client):
    chat = client.chat.completions.create(model="tiny", messages=HELLO).model_dump()
    assert chat["prompt_token_ids"] is chat["choices"][0]["token_ids"] is None
    text = client.completions.create(model="tiny", prompt="Hello").model_dump()["choices"][0]
    assert text["prompt_logprobs"] is text["prompt_token_ids"] is text["token_ids"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_gateway_gets_the_load_in_a_header(server, stream):
    body = {"messages": HELLO, "max_tokens": 2, "stream": stream}
    path = f"{server.url}/v1/chat/completions"
    for wanted, pattern in (
        ("TEXT", r"TEXT named_metrics\.kv_cache_usage_perc=[\d.]+, "
         r"named_metrics\.num_requests_waiting=\d+"),
        ("json", r'JSON {"named_metrics": {"kv_cache_usage_perc": [\d.]+, '
         r'"num_requests_waiting": \d+}}'),
    ):  # fmt: skip
        headers = {"endpoint-load-metrics-format": wanted}
        found = httpx.post(path, json=body, headers=headers).headers["endpoint-load-metrics"]
        assert re.fullmatch(pattern, found), found
    assert "endpoint-load-metrics" not in httpx.post(path, json=body).headers


def test_n_choices_are_n_sequences(client, server):
    got = client.chat.completions.create(model="tiny", messages=HELLO, n=3)
    assert [c.index for c in got.choices] == [0, 1, 2]
    assert [c.message.content for c in got.choices] == [server.answer(HELLO, i) for i in range(3)]
    assert got.usage.prompt_tokens == len(server.chat_ids(HELLO))


def test_a_stop_string_cuts_the_text_and_is_told(client, server):
    text = server.answer(HELLO)
    stop = text[4:6]
    got = client.chat.completions.create(model="tiny", messages=HELLO, stop=stop)
    assert got.choices[0].message.content == text[: text.index(stop)]
    assert got.choices[0].finish_reason == "stop"
    assert got.choices[0].stop_reason == stop
    kept = client.chat.completions.create(
        model="tiny", messages=HELLO, stop=[stop], extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].message.content == text[: text.index(stop) + len(stop)]


def test_length_ends_an_answer(client, server):
    for name in ("max_tokens", "max_completion_tokens"):
        got = client.chat.completions.create(model="tiny", messages=HELLO, **{name: 5})
        assert got.choices[0].finish_reason == "length"
        assert got.usage.completion_tokens == 5
    both = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=9, max_completion_tokens=4
    )
    assert both.usage.completion_tokens == 4


def test_logprobs_come_for_each_token_with_the_best_ones(client):
    got = client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=3
    )
    content = got.choices[0].logprobs.content
    assert len(content) == got.usage.completion_tokens
    for entry in content:
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        assert len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.logprob <= values[0]
    none = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True)
    assert none.choices[0].logprobs.content[0].top_logprobs == []
    assert client.chat.completions.create(model="tiny", messages=HELLO).choices[0].logprobs is None


def test_tokens_that_are_parts_of_characters_have_their_own_bytes(client, server):
    got = client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, max_tokens=200
    )
    content = got.choices[0].logprobs.content
    assert any("\ufffd" in entry.token for entry in content)
    said = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert said == server.answer(HELLO) + "<|im_end|>"


def test_streamed_logprobs_are_those_of_the_whole_answer(client):
    whole = client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=2
    )
    _, _, chunks = streamed(client, messages=HELLO, logprobs=True, top_logprobs=2)
    found = [e for c in chunks for one in c.choices if one.logprobs for e in one.logprobs.content]
    assert found == whole.choices[0].logprobs.content


def test_tokens_can_be_shown_as_ids(client, server):
    body = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    got = client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, extra_body=body
    )
    ids = got.choices[0].token_ids
    assert [e.token for e in got.choices[0].logprobs.content] == [f"token_id:{i}" for i in ids]
    assert got.prompt_token_ids == server.chat_ids(HELLO)
    texts = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, extra_body=body
    )
    assert [
        i for c in texts for one in c.choices for i in getattr(one, "token_ids", None) or []
    ] == ids


def test_template_variables_and_tools_reach_the_template(client, server):
    got = client.chat.completions.create(
        model="tiny", messages=HELLO, extra_body={"chat_template_kwargs": {"shout": True}}
    )
    assert got.choices[0].message.content == server.answer(HELLO, shout=True)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with_tools = client.chat.completions.create(model="tiny", messages=HELLO, tools=tools)
    assert with_tools.usage.prompt_tokens > got.usage.prompt_tokens
    assert "tools" in server.tokenizer.decode(
        client.chat.completions.create(
            model="tiny", messages=HELLO, tools=tools, extra_body={"return_token_ids": True}
        ).prompt_token_ids
    )


def test_the_last_message_can_be_gone_on_with(client, server):
    messages = [*HELLO, {"role": "assistant", "content": "Well, I"}]
    body = {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "return_token_ids": True,
    }
    got = client.chat.completions.create(model="tiny", messages=messages, extra_body=body)
    assert server.tokenizer.decode(got.prompt_token_ids).endswith("assistant\nWell, I")
    echoed = client.chat.completions.create(
        model="tiny", messages=messages, extra_body={**body, "echo": True}
    )
    assert echoed.choices[0].message.content == "Well, I" + got.choices[0].message.content
    texts, _, _ = streamed(client, messages=messages, extra_body={**body, "echo": True})
    assert texts[0] == echoed.choices[0].message.content


def test_every_field_of_sampling_params_is_read_from_the_body(client):
    body = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "stop_token_ids": [3],
        "ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False, "allowed_token_ids": [1, 2], "bad_words": ["x"],
        "extra_args": {"a": 1}, "truncate_prompt_tokens": 9, "skip_reading_prefix_cache": True,
        "cache_salt": "s", "priority": 0, "stream_interval": 2, "detokenize": True,
        "prompt_logprobs": 1, "vllm_xargs": {"b": "c"}, "truncation_side": "right", "session_id": "s",
    }  # fmt: skip
    got = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0.5, top_p=0.9, seed=7, presence_penalty=0.1,
        frequency_penalty=0.1, logit_bias={"5": 1.5}, user="me", metadata={"a": "b"}, extra_body=body,
    )  # fmt: skip
    assert got.usage.prompt_tokens == 9
    assert len(got.prompt_logprobs) == 9
    assert got.prompt_logprobs[0] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 9.0),
        ("top_k", -2),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("stop_token_ids", [10**9]),
    ],
)
def test_a_field_of_the_body_is_not_ignored(client, field, value):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body={field: value})
    assert caught.value.param == field


def test_the_request_id_becomes_part_of_the_answers_id(client, http):
    got = client.chat.completions.create(
        model="tiny", messages=HELLO, extra_headers={"X-Request-Id": "mine"}
    )
    assert got.id == "chatcmpl-mine"
    body = {"messages": HELLO, "request_id": "own"}
    assert http.post("/v1/chat/completions", json=body).json()["id"] == "chatcmpl-own"


def test_a_stream_gives_fewer_chunks_when_an_interval_is_asked_for(client):
    texts, _, _ = streamed(client, messages=HELLO)
    asked = {"stream_interval": 10, "return_token_ids": True}
    same, _, few = streamed(client, messages=HELLO, extra_body=asked)
    assert same == texts
    sizes = [len(c.choices[0].token_ids) for c in few if hasattr(c.choices[0], "token_ids")]
    assert all(size >= 10 for size in sizes[1:-1]), sizes  # but for the first token and the end


def test_any_served_name_or_none_means_the_model(http):
    for body in ({"model": "alias"}, {}):
        got = http.post("/v1/chat/completions", json={"messages": HELLO, **body})
        assert got.json()["model"] == "tiny"
