"""What the server's options change about answers, and what bodies say besides sampling."""

import json
import re

import httpx
import pytest

import quire
from quire.server.options import ServerOptions
from tests.server.harness import Server

HELLO = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
BODIES = {CHAT: {"messages": HELLO}, COMPLETE: {"prompt": "a", "max_tokens": 5}}


def post(tokenizer, options, path, body, **kwargs):
    with Server(tokenizer, options=options).running() as running:
        got = httpx.post(f"{running.url}{path}", json=body, timeout=60, **kwargs)
        running.wait_idle()
        return got


def chunks(got):
    return [json.loads(e[6:]) for e in got.text.split("\n\n") if e.startswith("data: {")]


# -- fields nobody knows --------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_ignored_fields_are_told_in_a_header(http, path, stream):
    body = {**BODIES[path], "stream": stream, "temprature": 0.5, "user": "me", "seed": None}
    got = http.post(path, json=body)
    assert got.status_code == 200
    assert got.headers["x-quire-ignored"] == "temprature,user"
    assert "x-quire-ignored" not in http.post(path, json=BODIES[path]).headers


def test_options_of_a_stream_are_no_place_to_ignore_things_in(http):
    options = {"include_usage": True, "include_usages": True}
    got = http.post(CHAT, json={**BODIES[CHAT], "stream": True, "stream_options": options})
    assert got.headers["x-quire-ignored"] == "stream_options.include_usages"


def test_a_strangers_field_cannot_write_headers(http):
    body = {**BODIES[CHAT], "a\r\nSet-Cookie: x": 1, "汉": 2, "b" * 500: 3}
    shown = http.post(CHAT, json=body).headers["x-quire-ignored"]
    assert shown == f"a??Set-Cookie??x,?,{'b' * 64}"


@pytest.mark.parametrize("path", [*BODIES, "/tokenize", "/detokenize"])
def test_a_strict_server_refuses_unknown_fields_and_names_the_nearest(tokenizer, path):
    body = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [65]}, **BODIES}[path]
    near = {"/tokenize": "promt", "/detokenize": "token"}.get(path, "temprature")
    with Server(tokenizer, options=ServerOptions(strict=True)).running() as running:
        got = httpx.post(f"{running.url}{path}", json={**body, near: 1, "user": "me"})
        fine = httpx.post(f"{running.url}{path}", json={**body, "user": "me"})
    error = got.json()["error"]
    assert (got.status_code, error["param"]) == (400, near)
    assert "did you mean" in error["message"]
    assert fine.status_code == 200


def test_many_unknown_fields_take_no_time(http):
    got = http.post(CHAT, json={**BODIES[CHAT], **{f"field_{i}": i for i in range(1000)}})
    assert got.status_code == 200
    assert got.headers["x-quire-ignored"].count(",") == 15
    more = http.post(CHAT, json={**BODIES[CHAT], **{f"field_{i}": i for i in range(50_000)}})
    assert more.status_code == 400
    assert more.elapsed.total_seconds() < 2


# -- templates ------------------------------------------------------------------------------------


def test_a_request_may_bring_a_template_if_the_server_trusts_it(tokenizer, http):
    body = {**BODIES[CHAT], "chat_template": "told: {{ messages[0].content }}", "return_prompt_text": True}  # fmt: skip
    assert http.post(CHAT, json=body).json()["error"]["param"] == "chat_template"
    assert http.post("/tokenize", json=body).json()["error"]["param"] == "chat_template"
    trusting = ServerOptions(trust_request_chat_template=True)
    assert post(tokenizer, trusting, CHAT, body).json()["prompt_text"] == "told: Hi"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_template_of_a_request_is_never_the_name_of_a_file(tokenizer, tmp_path, path):
    secret = tmp_path / "secret"
    secret.write_text("{{ messages }} secret")
    with Server(tokenizer, options=ServerOptions(trust_request_chat_template=True)).running() as r:
        for name in (str(secret), f"{secret}\n", "default", ""):
            got = httpx.post(f"{r.url}{path}", json={**BODIES[CHAT], "chat_template": name})
            assert (got.status_code, got.json()["error"]["param"]) == (400, "chat_template")


def test_tools_stay_out_of_the_prompt_when_none_may_be_called(tokenizer, http):
    body = {**BODIES[CHAT], "tools": TOOLS, "tool_choice": "none", "return_prompt_text": True}
    assert "<|im_start|>tools" in http.post(CHAT, json=body).json()["prompt_text"]
    options = ServerOptions(exclude_tools_when_tool_choice_none=True)
    assert "<|im_start|>tools" not in post(tokenizer, options, CHAT, body).json()["prompt_text"]


def test_an_effort_is_given_to_the_template_in_its_own_word(tokenizer):
    template = "{{ reasoning_effort }}:{{ messages[0].content }}"
    options = ServerOptions(
        trust_request_chat_template=True, reasoning_effort_map={"minimal": "low"}
    )
    body = {**BODIES[CHAT], "chat_template": template, "return_prompt_text": True}
    with Server(tokenizer, options=options).running() as running:
        for said, told in (("minimal", "low"), ("high", "high")):
            got = httpx.post(f"{running.url}{CHAT}", json={**body, "reasoning_effort": said})
            assert got.json()["prompt_text"] == f"{told}:Hi"


def test_the_form_of_content_can_be_chosen(tokenizer):
    template = "{{ messages[0].content is string }}"
    body = {**BODIES[CHAT], "chat_template": template, "return_prompt_text": True}
    for form, told in (("string", "True"), ("openai", "False")):
        options = ServerOptions(trust_request_chat_template=True, chat_template_content_format=form)
        message = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
        got = post(tokenizer, options, CHAT, {**body, "messages": message})
        assert got.json()["prompt_text"] == told


def test_histories_with_tools_reasoning_and_developers_reach_the_template(tokenizer):
    template = "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning }}|{{ m.reasoning_content }}|{{ m.tool_calls[0].function.arguments.city if m.tool_calls }}]{% endfor %}"
    calls = [{"id": "1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Zug"}'}}]  # fmt: skip
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "12 C"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning": "so"},
    ]  # fmt: skip
    body = {"messages": messages, "chat_template": template, "return_prompt_text": True}
    got = post(tokenizer, ServerOptions(trust_request_chat_template=True), CHAT, body)
    assert got.json()["prompt_text"] == (
        "[system|be brief|||][user|a\nb|||][assistant||why|why|Zug][tool|12 C|||]"
        "[assistant|no|so|so|]"
    )


# -- what answers show ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_the_fingerprint_is_on_answers_and_on_the_last_chunks(http, path):
    whole = http.post(path, json=BODIES[path]).json()
    assert whole["system_fingerprint"] == f"quire-{quire.__version__}-tiny-root"
    options = {"include_usage": True}
    told = chunks(http.post(path, json={**BODIES[path], "stream": True, "stream_options": options}))
    marked = [c for c in told if "system_fingerprint" in c]
    assert [bool(c["choices"]) for c in marked] == [True, False]
    assert marked[0]["choices"][0]["finish_reason"]
    assert {c["system_fingerprint"] for c in marked} == {whole["system_fingerprint"]}


def test_the_fingerprint_can_be_short_ones_own_or_none(tokenizer):
    for options, told in (
        (ServerOptions(fingerprint_mode="hash"), r"fp_[0-9a-f]{12}"),
        (ServerOptions(fingerprint_mode="custom", fingerprint_value="mine"), "mine"),
    ):
        got = post(tokenizer, options, COMPLETE, BODIES[COMPLETE]).json()
        assert re.fullmatch(told, got["system_fingerprint"])
    none = post(tokenizer, ServerOptions(fingerprint_mode="none"), COMPLETE, BODIES[COMPLETE])
    assert none.json()["system_fingerprint"] is None


@pytest.mark.parametrize("path", BODIES)
def test_usage_can_be_forced_onto_every_stream(tokenizer, path):
    options = ServerOptions(enable_force_include_usage=True)
    told = chunks(post(tokenizer, options, path, {**BODIES[path], "stream": True}))
    assert told[-1]["choices"] == []
    assert told[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] for chunk in told)


def test_the_server_may_gather_tokens_of_streams(tokenizer):
    body = {**BODIES[COMPLETE], "stream": True, "max_tokens": 100, "ignore_eos": True}
    found = []
    for interval in (1, 10):
        options = ServerOptions(stream_interval=interval)
        with Server(tokenizer, options=options, step_s=0.002).running() as slow:
            found.append(chunks(httpx.post(f"{slow.url}{COMPLETE}", json=body, timeout=60)))
    every, few = found
    assert len(few) < len(every) / 3
    text = ["".join(c["choices"][0]["text"] for c in told) for told in found]
    assert text[0] == text[1]


@pytest.mark.parametrize("path", BODIES)
def test_where_the_time_went_is_shown_when_asked_for(http, path):
    got = http.post(path, json={**BODIES[path], "x_timing": True}).json()["x_timing"]
    parts = [v for k, v in got.items() if k.endswith("_s") and k != "total_s"]
    assert sum(parts) == pytest.approx(got["total_s"], rel=0.05)
    told = chunks(http.post(path, json={**BODIES[path], "x_timing": True, "stream": True}))
    assert told[-1]["choices"] == []
    assert told[-1]["x_timing"]["total_s"] > 0
    assert "x_timing" not in http.post(path, json=BODIES[path]).json()


@pytest.mark.parametrize("path", BODIES)
def test_times_can_be_put_into_every_answer(tokenizer, path):
    options = ServerOptions(enable_per_request_metrics=True)
    with Server(tokenizer, options=options).running() as running:
        got = httpx.post(f"{running.url}{path}", json=BODIES[path]).json()
        told = httpx.post(f"{running.url}{path}", json={**BODIES[path], "stream": True})
        several = httpx.post(f"{running.url}{path}", json={**BODIES[path], "n": 2}).json()
    for one in (got, chunks(told)[-1]):
        assert one["metrics"]["generation_time_ms"] >= 0
    assert "metrics" not in several


def test_the_prompt_can_be_shown_as_the_model_reads_it(http, server):
    got = http.post(COMPLETE, json={**BODIES[COMPLETE], "prompt": [[65, 66], [67]], "return_prompt_text": True})  # fmt: skip
    texts = [one["prompt_text"] for one in got.json()["choices"]]
    assert texts == [server.tokenizer.decode(ids) for ids in ([65, 66], [67])]
    told = chunks(
        http.post(CHAT, json={**BODIES[CHAT], "return_prompt_text": True, "stream": True})
    )
    assert told[0]["prompt_text"].endswith("<|im_start|>assistant\n")


# -- several conversations --------------------------------------------------------------------------


def test_a_batch_has_a_choice_for_each_conversation(http, server):
    several = [HELLO, [{"role": "user", "content": "other"}], HELLO]
    got = http.post(f"{CHAT}/batch", json={"messages": several, "n": 2, "return_token_ids": True})
    body = got.json()
    want = [server.answer(messages, i) for messages in several for i in range(2)]
    assert [one["message"]["content"] for one in body["choices"]] == want
    assert [one["index"] for one in body["choices"]] == list(range(6))
    assert body["prompt_token_ids"] == [server.chat_ids(messages) for messages in several]
    assert body["usage"]["prompt_tokens"] == sum(map(len, body["prompt_token_ids"]))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": HELLO}, "messages"),
        ({"messages": [HELLO, []]}, "messages"),
        ({"messages": [HELLO, HELLO], "stream": True}, "stream"),
        ({"messages": [HELLO] * 1025}, "messages"),
        ({"messages": [HELLO, HELLO], "n": 10_000}, "n"),
    ],
)
def test_a_bad_batch_is_refused(http, body, param):
    got = http.post(f"{CHAT}/batch", json=body)
    assert (got.status_code, got.json()["error"]["param"]) == (400, param)


# -- tokens -------------------------------------------------------------------------------------------


def test_texts_that_can_never_fit_are_not_tokenized(http):
    text = "x" * (2 << 20)
    said = [{"role": "user", "content": text}]
    tools = [{"type": "function", "function": {"name": "f", "description": text}}]
    for path, body, param in (
        ("/tokenize", {"prompt": text}, "prompt"),
        ("/tokenize", {"messages": said}, "messages"),
        ("/tokenize", {"messages": HELLO, "tools": tools}, "messages"),
        (CHAT, {"messages": said, "truncate_prompt_tokens": 5}, "messages"),
        (COMPLETE, {"prompt": ["a", text], "truncate_prompt_tokens": 5}, "prompt"),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": said}, "messages"),
    ):
        got = http.post(path, json=body)
        assert got.status_code == 400, (path, got.text[:300])
        assert param in got.text
        assert got.elapsed.total_seconds() < 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETE, {"prompt": [[65]] * 100_000}, "prompt"),
        (COMPLETE, {"prompt": [[65]] * 300_000}, None),  # before it is read
        (COMPLETE, {"prompt": [65] * 3_000_000}, None),  # before it is read
        (COMPLETE, {"prompt": [65] * 2_200_000}, "prompt"),
        ("/detokenize", {"tokens": [65] * 100_000}, "tokens"),
        ("/detokenize", {"tokens": [65] * 3_000_000}, None),
        (f"{CHAT}/batch", {"messages": [HELLO] * 20_000}, "messages"),
        (f"{CHAT}/batch", {"messages": [HELLO] * 100_000}, None),
    ],
)
def test_lists_without_end_are_refused(http, path, body, param):
    raw, headers = json.dumps(body), {"content-type": "application/json"}
    got = http.post(path, content=raw, headers=headers)
    assert (got.status_code, got.json()["error"]["param"]) == (400, param)


def test_the_tokenizer_tells_about_itself_if_it_may(tokenizer, http):
    assert http.get("/tokenizer_info").status_code == 404
    options = ServerOptions(enable_tokenizer_info_endpoint=True)
    with Server(tokenizer, options=options).running() as running:
        got = httpx.get(f"{running.url}/tokenizer_info").json()
    assert got["vocab_size"] == len(tokenizer)
    assert got["eos_token"] == "<|im_end|>"
    assert "im_start" in got["chat_template"]


# -- documents ----------------------------------------------------------------------------------------


def test_the_documents_can_be_read_without_the_internet(tokenizer):
    with Server(tokenizer).running() as running:
        got = httpx.get(f"{running.url}/docs")
        assert httpx.get(f"{running.url}/redoc").text == got.text
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    assert "<script" not in got.text
    assert re.findall(r'(?:src|href)="([^"]*)"', got.text) == ["openapi.json"]
    for told in ("POST /v1/chat/completions", "max_completion_tokens", "list of integer"):
        assert told in got.text
    hosted = ServerOptions(enable_offline_docs=False)
    with Server(tokenizer, options=hosted).running() as running:
        assert "cdn" in httpx.get(f"{running.url}/docs").text
    hidden = ServerOptions(disable_fastapi_docs=True)
    with Server(tokenizer, options=hidden).running() as running:
        assert httpx.get(f"{running.url}/docs").status_code == 404


# -- what the model is called -------------------------------------------------------------------------


def test_any_name_means_the_model_if_names_are_not_looked_at(tokenizer):
    options = ServerOptions(skip_model_name_validation=True)
    got = post(tokenizer, options, COMPLETE, {**BODIES[COMPLETE], "model": "gpt-4o"})
    assert got.json()["model"] == "tiny"


def test_the_id_in_the_header_is_the_one_in_the_answer(tokenizer):
    options = ServerOptions(enable_request_id_headers=True)
    with Server(tokenizer, options=options).running() as running:
        url = f"{running.url}{COMPLETE}"
        new = httpx.post(url, json=BODIES[COMPLETE])
        own = httpx.post(url, json=BODIES[COMPLETE], headers={"X-Request-Id": "mine"})
        long = httpx.get(f"{running.url}/version", headers={"X-Request-Id": "x" * 10_000})
    assert new.json()["id"] == f"cmpl-{new.headers['x-request-id']}"
    assert (own.json()["id"], own.headers["x-request-id"]) == ("cmpl-mine", "mine")
    assert len(long.headers["x-request-id"]) == 32


# -- middlewares ----------------------------------------------------------------------------------------


class Marks:
    """A middleware for the test below."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        async def marked(message):
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-marked", b"yes"))
            await send(message)

        await self._app(scope, receive, marked)


async def marks(request, call_next):
    answer = await call_next(request)
    answer.headers["x-marked"] = "yes"
    return answer


@pytest.mark.parametrize("name", ["Marks", "marks"])
def test_operators_may_put_their_own_code_around_the_routes(tokenizer, name):
    options = ServerOptions(middleware=(f"{__name__}:{name}",))
    got = post(tokenizer, options, CHAT, {**BODIES[CHAT], "stream": True})
    assert got.headers["x-marked"] == "yes"
    assert got.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "name", ["nothing", "no.such:thing", f"{__name__}:BODIES", f"{__name__}:x"]
)
def test_a_middleware_that_is_none_ends_the_start(tokenizer, name):
    with pytest.raises(quire.errors.ConfigError, match="middleware"):
        Server(tokenizer, options=ServerOptions(middleware=(name,)))
