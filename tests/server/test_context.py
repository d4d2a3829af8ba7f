"""What does not fit the context, words of messages, and large bodies: one answer on every route."""

import json
import threading

import httpx
import pytest

from quire.errors import RequestError
from quire.server.formats import body_reader
from quire.server.options import ServerOptions
from tests.server.harness import MAX_LEN, Server

SAID = f"This model's maximum context length is {MAX_LEN} tokens. However, "
"""Clients look for these words: litellm then falls back, or trims the history."""


def bodies(text, tokens):
    """One body for each route that generates."""
    messages = [{"role": "user", "content": text}]
    return {
        "/v1/completions": {"prompt": text, "max_tokens": tokens},
        "/v1/chat/completions": {"messages": messages, "max_tokens": tokens},
        "/v1/messages": {"model": "tiny", "messages": messages, "max_tokens": tokens},
        "/v1/responses": {"input": text, "max_output_tokens": tokens},
        "/v1/chat/completions/batch": {"messages": [messages], "max_completion_tokens": tokens},
    }


@pytest.mark.parametrize("path", bodies("", 1))
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_refused_in_known_words(http, path, stream):
    for text in ("x" * MAX_LEN, "x" * 5000, "x" * 1_200_000):
        if stream and "batch" in path:
            continue
        got = http.post(path, json={**bodies(text, 1)[path], "stream": stream})
        assert got.status_code == 400, got.text
        assert got.json()["error"]["message"].startswith(SAID), got.text


@pytest.mark.parametrize("path", bodies("", 1))
def test_max_tokens_beyond_what_the_prompt_leaves_is_refused_with_the_numbers(http, server, path):
    free = server.services.max_model_len - len("x") - 1
    got = http.post(path, json=bodies("x", 10**6)[path])
    assert got.status_code == 400, got.text
    error = got.json()["error"]
    assert error["message"].startswith(f"{SAID}you requested 1000")
    assert "1000000 in the output" in error["message"]
    if "messages" not in path:
        param = list(bodies("", 1)[path])[-1]
        assert error["param"] == param
        assert param in error["message"]
    if path == "/v1/completions":
        assert http.post(path, json=bodies("x", free + 1)[path]).status_code == 200
        assert http.post(path, json=bodies("x", free + 2)[path]).status_code == 400


def test_a_default_of_max_tokens_is_lowered_to_what_is_left(tokenizer):
    with Server(tokenizer, defaults={"max_tokens": 10**6}).running() as server:
        got = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert got.status_code == 200


def test_truncation_leaves_room_for_max_tokens(http):
    body = {"prompt": "x" * (MAX_LEN + 88), "max_tokens": 100, "truncate_prompt_tokens": -1}
    got = http.post("/v1/completions", json=body)
    assert got.json()["usage"]["prompt_tokens"] == MAX_LEN - 100


# -- words of messages ----------------------------------------------------------------------------

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% if messages[0].role == 'wizard' %}{% endif %}{{ messages[0].content }}{{ 'extreme' }}"
)


def chat(role="user", **more):
    return {"messages": [{"role": role, "content": "a"}], "max_tokens": 1, **more}


def test_roles_are_those_of_the_api_and_of_the_template(tokenizer, http):
    for role in ("system", "developer", "user", "assistant", "tool", "function"):
        assert http.post(CHAT, json=chat(role)).status_code == 200, role
    for role in ("asistant_", "wizard", "", "User", "<|im_end|>", None, 1, ["user"]):
        for path in (CHAT, "/tokenize"):
            got = http.post(path, json=chat(role))
            assert got.status_code == 400, (role, got.text)
            assert "messages[0].role must be one of system, developer" in got.text
    assert http.post(CHAT, json={"messages": [{"content": "a"}]}).status_code == 400
    options = ServerOptions(trust_request_chat_template=True)
    with Server(tokenizer, options=options).running() as server:
        for role, wanted in (("wizard", 200), ("ghost", 400)):
            body = chat(role, chat_template=TEMPLATE)
            assert httpx.post(f"{server.url}{CHAT}", json=body).status_code == wanted


EFFORTS = {
    CHAT: (lambda word: chat(reasoning_effort=word), "reasoning_effort"),
    "/v1/responses": (
        lambda word: {"input": "a", "reasoning": {"effort": word}},
        "reasoning.effort",
    ),
    "/v1/messages": (
        lambda word: chat(model="tiny", output_config={"effort": word}),
        "output_config.effort",
    ),
}


@pytest.mark.parametrize("path", EFFORTS)
def test_a_reasoning_effort_that_nothing_means_is_refused(http, path):
    body, param = EFFORTS[path]
    got = http.post(path, json=body("banana"))
    assert got.status_code == 400, got.text
    error = got.json()["error"]
    assert (
        f"{param} must be one of none, minimal, low, medium, high, xhigh, max" in error["message"]
    )
    for word in ("none", "minimal", "high", "max"):
        assert http.post(path, json=body(word)).status_code == 200, word


def test_the_operator_and_the_template_may_name_other_efforts(tokenizer):
    options = ServerOptions(reasoning_effort_map={"much": "high"}, trust_request_chat_template=True)
    with Server(tokenizer, options=options).running() as server:
        for word, wanted in (("much", 200), ("extreme", 200), ("banana", 400)):
            body = chat(reasoning_effort=word, chat_template=TEMPLATE)
            assert httpx.post(f"{server.url}{CHAT}", json=body).status_code == wanted, word


# -- large bodies ---------------------------------------------------------------------------------


def test_the_last_of_two_keys_counts_at_every_depth(http):
    raw = b'{"prompt":"b","max_tokens":9,"prompt":"a","max_tokens":1,"echo":true,'
    raw += b'"logit_bias":{"5":"x"},"logit_bias":{"5":1}}'
    json_body = {"Content-Type": "application/json"}
    got = http.post("/v1/completions", content=raw, headers=json_body)
    assert got.status_code == 200, got.text
    assert got.json()["choices"][0]["text"].startswith("a")
    raw = (
        b'{"messages":[{"role":"ghost","content":"b","role":"user","content":"a"}],"max_tokens":1}'
    )
    assert http.post(CHAT, content=raw, headers=json_body).status_code == 200


def test_tokenize_shows_a_bounded_number_of_tokens(http):
    text = "x" * 65_536
    got = http.post("/tokenize", json={"prompt": text, "return_token_strs": True})
    assert got.json()["count"] == len(got.json()["token_strs"]) == 65_536
    for text in ("x" * 65_537, "\u0301" * 40_000):
        got = http.post("/tokenize", json={"prompt": text})
        assert got.status_code == 400
        assert got.json()["error"]["message"].startswith(SAID)
        assert "at most 65536" in got.text


@pytest.mark.parametrize(
    ("path", "more"),
    [("/tokenize", {"return_token_strs": True}), ("/v1/completions", {"max_tokens": 1})],
)
def test_large_texts_are_not_tokenized_on_the_event_loop(http, server, monkeypatch, path, more):
    loop = server.ask(_current_thread())
    seen = []
    tokenizer = server.services.tokenizer
    for name in ("encode", "convert_ids_to_tokens"):
        method = getattr(tokenizer, name)

        def watched(*args, method=method, name=name, **given):
            seen.append((name, threading.current_thread() is loop))
            return method(*args, **given)

        monkeypatch.setattr(tokenizer, name, watched)
    for text in ("e\u0301" * 10_000, "\U0001f642" * 10_000):
        http.post(path, json={"prompt": text, **more})
    assert {on_loop for _, on_loop in seen} <= {False}
    assert path != "/tokenize" or {name for name, _ in seen} == {"encode", "convert_ids_to_tokens"}


async def _current_thread():
    return threading.current_thread()


def test_bodies_of_very_many_lists_are_refused_before_they_are_read():
    many = body_reader.MAX_CONTAINERS + 1
    for inner in (b"[]," * many, b"{}," * many):
        with pytest.raises(RequestError, match="lists and objects"):
            body_reader._check_value_count(b'{"x":[' + inner + b"[]]}")
    text = json.dumps({"prompt": '[{"\\\\' * many}).encode()  # in a text they are free
    body_reader._check_value_count(text)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b'{"a":NaN}', "a"),
        (b'{"a":"\\\\","b":-Infinity}', "b"),
        (b'{"a":"\\"NaN","b":"NaN\\\\\\""}', None),
        (b'{"NaN":"x"}', None),
    ],
)
def test_no_numbers_are_found_outside_of_texts_only(raw, field):
    if field is None:
        assert json.loads(raw)
        body_reader._check_value_count(raw)
        return
    with pytest.raises(RequestError, match="NaN and Infinity") as caught:
        body_reader._check_value_count(raw)
    assert caught.value.param == field
