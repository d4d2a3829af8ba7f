"""Bad input as data: every row is answered with the status and the `param` it names, never 5xx."""

import json
import socket

import httpx
import openai
import pytest

from quire.server.options import ServerOptions
from tests.server.harness import MAX_LEN, Server

HELLO = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
BIG = 2**63
DEEP = json.loads('{"not":' * 70 + "{}" + "}" * 70)

# fields that both routes have: (field, value, status)
SHARED = [
    *(("n", v, 400) for v in (0, -1, 10**6, 2**31, BIG, 1e308, "5", True, [], 1.5)),
    *(("best_of", v, 400) for v in (0, -1, 10**6, BIG, "5", True, [])),
    *(("max_tokens", v, 400) for v in (-1, "5", True, [], 2.5, {})),
    *(("min_tokens", v, 400) for v in (-1, "5", True)),
    *(("temperature", v, 400) for v in (-0.1, 2.1, 1e308, "hot", True, [])),
    *(("top_p", v, 400) for v in (0, 1.0000001, -1, "x")),
    *(("top_k", v, 400) for v in (-2, 1.5, "x", True)),
    *(("min_p", v, 400) for v in (-0.1, 1.1)),
    *(("presence_penalty", v, 400) for v in (-1e9, 1e9, 2.1)),
    *(("frequency_penalty", v, 400) for v in (-1e9, 1e9, 2.1)),
    *(("repetition_penalty", v, 400) for v in (0, -1, 1e999)),
    *(("seed", v, 400) for v in (2**64, -(2**64), 1.5, "x")),
    *(("logit_bias", v, 400) for v in ({"-1": 1}, {"100000": 1}, {"x": 1}, {"1": "y"}, [1], "z")),
    *(("allowed_token_ids", v, 400) for v in ([], [-1], [10**9], ["a"], "a", [True])),
    *(("stop_token_ids", v, 400) for v in ([-1], [10**9], ["a"], [list(range(3))])),
    *(("bad_words", v, 400) for v in ([""], ["x"] * 200, [5], "word")),
    *(("stop", v, 400) for v in ("", [""], ["x"] * 10_000, 5, [5], {"a": 1})),
    *(("prompt_logprobs", v, 400) for v in (-2, 10**6, "x")),
    *(("truncate_prompt_tokens", v, 400) for v in (0, -2, MAX_LEN + 1, "x")),
    *(("truncation_side", v, 400) for v in ("up", 5)),
    *(("cache_salt", v, 400) for v in ("", "a/b", "..\\x", "\0", "x" * 200, 5)),
    *(("stream_options", v, 400) for v in ({"include_usage": True}, "x", {"include_usage": "x"})),
    *(("request_id", v, 400) for v in ("a\nb", "x" * 10**4, 5)),
    *(("priority", v, 400) for v in ("x", 1.5, 3, -(2**63))),
    *(("stream", v, 400) for v in ("yes", 1)),
    *(("model", v, 404) for v in ("other", "../../etc/passwd", "")),
    *(("model", v, 400) for v in (5, [])),
    ("use_beam_search", "x", 400),
    *(("guided_json", v, 400) for v in ("", "{", 5, [], "[1]", DEEP)),
    *(("guided_regex", v, 400) for v in ("", "\0", 5, ["a"])),
    *(("guided_choice", v, 400) for v in ([], "a", [""], [5], [["a"]])),
    *(("guided_grammar", v, 400) for v in ("", 5)),
    *(("guided_decoding", v, 400) for v in ({}, {"json": {}, "regex": "a"}, "a")),
    *(
        ("structured_outputs", v, 400)
        for v in (
            *({}, [], "x", {"json": 5}, {"json": "{"}, {"json": DEEP}, {"x": 1}),
            *({"regex": "a", "choice": ["a"]}, {"json_object": False}, {"structural_tag": "["}),
            *({"json": {}, "disable_any_whitespace": "x"}, {"regex": "a", "backend": "x"}),
            *({"regex": "a", "whitespace_pattern": " "}, {"structural_tag": "{}"}),
        )
    ),
    *(
        ("response_format", v, 400)
        for v in (
            *({}, "json_object", {"type": 5}, {"type": "xml"}, {"type": "json_schema"}),
            *({"type": "json_schema", "json_schema": v} for v in (None, [], {}, {"schema": 5})),
            {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}},
            {"type": "json_schema", "json_schema": {"schema": {}, "name": 5}},
            {"type": "json_schema", "json_schema": {"schema": DEEP}},
            *({"type": "structural_tag"}, {"type": "structural_tag", "format": {"type": "x"}}),
            {"type": "structural_tag", "structures": [], "triggers": []},
        )
    ),
    *(("thinking_token_budget", v, 400) for v in (5, 0, -2, "5", 1.5, True)),
    *(("logits_processors", v, 501) for v in (["os.system"],)),
    *(("kv_transfer_params", v, 501) for v in ({"host": "169.254.169.254"},)),
]
ONLY_CHAT = [
    *(
        ("messages", v, 400)
        for v in (None, [], "hi", [5], [{}], [{"role": 5, "content": "x"}], {"role": "user"})
    ),
    ("messages", [{"role": "user", "content": 5}], 400),
    ("messages", [{"role": "user", "content": [[[]]]}], 400),
    (
        "messages",
        [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}],
            }
        ],
        400,
    ),
    ("messages", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], 400),
    ("messages", [{"role": "user", "content": [{"type": "spell", "text": "x"}]}], 400),
    ("messages", [{"role": "assistant", "tool_calls": [{"type": "other"}]}], 400),
    *(("top_logprobs", v, 400) for v in (3, -2, "x")),
    *(("logprobs", v, 400) for v in (3, "x")),
    *(("max_completion_tokens", v, 400) for v in ("x", True)),
    *(("tools", v, 400) for v in ([], "x", [5], [{}], [{"type": "web_search"}])),
    *(("tools", [{"type": "function", **v}], 400) for v in ({}, {"function": {"name": ""}})),
    *(
        ("tool_choice", v, 400)
        for v in (
            *("required", "some", 5, {}, {"type": "function", "function": {"name": "f"}}),
            *({"type": "function", "function": 5}, {"type": "allowed_tools"}),
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        )
    ),
    ("chat_template", "{{ ''.__class__.__mro__ }}", 400),
    *(
        ("chat_template_kwargs", {k: "x"}, 400)
        for k in ("chat_template", "tokenize", "messages", "add_generation_prompt")
    ),
    ("modalities", ["audio"], 501),
    ("functions", [{"name": "f"}], 501),
    ("include_reasoning", False, 501),
]
ONLY_COMPLETION = [
    *(
        ("prompt", v, 400)
        for v in (None, [], "", [""], 5, {}, [[]], [1, "a"], ["a", 1], [[1], "a"], [True])
    ),
    *(
        ("prompt", v, 400)
        for v in ([-1], [10**9], [BIG], [[1], [-1]], [1.5], "x" * 4 * MAX_LEN, [1] * MAX_LEN)
    ),
    ("prompt", ["a"] * 1025, 400),
    *(("logprobs", v, 400) for v in (-2, 10**6, True)),
    ("max_tokens", 0, 400),
    ("min_tokens", 17, 400),  # more than the default of max_tokens
    ("suffix", "end", 400),
    ("n", 16000, 400),
]
ROWS = [
    *((CHAT, *row) for row in SHARED + ONLY_CHAT),
    *((COMPLETE, *row) for row in SHARED + ONLY_COMPLETION),
]


@pytest.mark.parametrize(("path", "field", "value", "status"), ROWS, ids=lambda v: str(v)[:30])
def test_a_bad_field_is_refused_by_its_name(http, path, field, value, status):
    body = (
        {"messages": HELLO}
        if path == CHAT
        else {"prompt": ["a", "b"] if field == "n" and value == 16000 else "a"}
    )
    body[field] = value
    raw = json.dumps(body).replace("1e+999", "1e999").replace("Infinity", "1e999")
    got = http.post(path, content=raw, headers={"content-type": "application/json"})
    error = got.json()["error"]
    assert (got.status_code, error["code"]) == (status, status), got.text
    word = (error["param"] or "").partition(".")[0]  # a place within it is better still
    assert word in (field, "prompt_token_ids" if field == "prompt" else field), error
    assert error["message"]
    assert len(error["message"]) < 1000


RAW = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b"5", 400),
    (b"null", 400),
    (b'{"prompt": "a"} x', 400),
    (b"\xff\xfe{\x00}\x00", 400),
    (b'{"prompt": "\xff"}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"prompt": ' + b"[" * 100_000, 400),
    (b'{"prompt": "a", "n": ' + b"9" * 10_000 + b"}", 400),
]


@pytest.mark.parametrize(("raw", "status"), RAW, ids=lambda v: str(v)[:30])
def test_what_is_no_json_body_is_refused(http, raw, status):
    for path in (COMPLETE, CHAT, "/tokenize", "/detokenize"):
        got = http.post(path, content=raw, headers={"content-type": "application/json"})
        assert got.status_code == status, (path, got.text)
        assert set(got.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_that_are_none_are_refused(http, literal):
    for field in (b"temperature", b"top_p", b"presence_penalty", b"repetition_penalty", b"n"):
        raw = b'{"prompt": "a", "%b": %b}' % (field, literal)
        got = http.post(COMPLETE, content=raw, headers={"content-type": "application/json"})
        assert got.status_code == 400, (field, got.text)
        assert got.json()["error"]["param"] == field.decode()


@pytest.mark.parametrize("path", [CHAT, COMPLETE, "/v1/responses", "/v1/messages"])
def test_a_whole_number_may_be_written_with_a_point(http, path):
    """JSON has one kind of number, and some languages write 2 as 2.0."""
    count = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    text = {COMPLETE: {"prompt": "a"}, "/v1/responses": {"input": "a"}}
    body = text.get(path, {"messages": [{"role": "user", "content": "a"}]})
    got = http.post(path, json={**body, count: 2.0, "top_k": 1.0})
    assert got.status_code == 200, got.text
    usage = got.json()["usage"]
    assert 2 in (usage.get("completion_tokens"), usage.get("output_tokens"))
    for value in (2.5, 2.0**60):
        assert http.post(path, json={**body, count: value}).status_code == 400


def test_a_body_must_say_that_it_is_json(http):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        got = http.post(COMPLETE, content=b'{"prompt": "a"}', headers={"content-type": kind})
        assert got.status_code == 400
        assert "application/json" in got.json()["error"]["message"]


def test_a_body_may_be_so_large_and_no_larger(http, server):
    limit = server.services.options.max_body_bytes
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
        head = f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        raw.sendall(f"{head}Content-Length: {limit + 1}\r\n\r\n{{".encode())
        assert b" 413 " in raw.recv(100)

    def chunks():
        for _ in range(limit // 2**20 + 2):
            yield b" " * 2**20

    got = http.post(COMPLETE, content=chunks(), headers={"content-type": "application/json"})
    assert got.status_code == 413


def test_unknown_routes_and_methods_have_the_same_error_shape(http):
    for got, status in ((http.get("/v1/nothing"), 404), (http.get(CHAT), 405)):
        assert got.status_code == status
        assert got.json()["error"]["code"] == status


def test_what_is_not_there_is_answered_with_what_is(http):
    near = http.post("/v1/chat/completion").json()["error"]["message"]
    assert "no route POST /v1/chat/completion" in near
    assert "/v1/chat/completions?" in near
    assert len(http.get(f"/{'x' * 60_000}").text) < 400
    assert "only POST" in http.get(CHAT).json()["error"]["message"]


def test_the_list_of_routes_is_named_only_if_it_is_served(tokenizer):
    options = ServerOptions(disable_fastapi_docs=True)
    with Server(tokenizer, options=options).running() as bare:
        got = httpx.get(f"{bare.url}/openapi.json")
    assert got.json()["error"]["message"] == "no route GET /openapi.json"


def test_the_param_of_a_prompt_of_ids_is_the_word_of_the_route(http):
    error = http.post(COMPLETE, json={"prompt": [10**6]}).json()["error"]
    assert error["param"] == "prompt"
    assert error["message"].startswith("prompt holds")


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_a_message_without_content_is_refused_where_it_makes_no_sense(http, role):
    for message in ({"role": role}, {"role": role, "content": None}):
        got = http.post(CHAT, json={"messages": [message]})
        assert (got.status_code, got.json()["error"]["param"]) == (400, "messages")
    fine = [*HELLO, {"role": "assistant", "content": None}, *HELLO]
    assert http.post(CHAT, json={"messages": fine, "max_tokens": 1}).status_code == 200


def test_a_body_that_is_no_object_is_called_what_it_is(http):
    got = http.post(CHAT, content="[]", headers={"content-type": "application/json"})
    assert "the body must be a JSON object, got a list" in got.json()["error"]["message"]


def test_the_official_client_raises_its_own_errors(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.param == "model"
    assert "tiny" in str(caught.value)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 4 * MAX_LEN)
    assert caught.value.param == "prompt"


def test_an_unknown_field_is_no_error(client):
    got = client.completions.create(model="tiny", prompt="a", extra_body={"no_such_field": 5})
    assert got.choices[0].text


def test_a_long_error_does_not_repeat_the_whole_input(http):
    got = http.post(COMPLETE, json={"prompt": "a", "temperature": "x" * 10**6})
    assert len(got.text) < 1000


def test_a_list_that_is_too_long_is_refused_in_plain_words(http):
    got = http.post(COMPLETE, json={"prompt": "a", "stop": ["x"] * 10_001}).json()["error"]
    assert "a list of at most 10000 items, got a list of 10001" in got["message"]
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}}
        for i in range(2000)
    ]
    body = {"messages": HELLO, "tools": tools, "tool_choice": "required"}
    got = http.post(CHAT, json=body).json()["error"]
    assert got["message"] == "the requested structure has more than 10000 parts"
    assert got["param"] == "tools"


def test_a_bad_one_of_several_prompts_runs_none(http, server):
    before = server.stats()
    got = http.post(COMPLETE, json={"prompt": ["fine", ""], "max_tokens": 400})
    assert got.status_code == 400
    assert server.wait_idle().prefix_query_tokens == before.prefix_query_tokens
