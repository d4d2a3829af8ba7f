"""Probes, models, tokens, keys, documents, and what happens under load or when the engine dies."""

import asyncio

import httpx
import openai
import pytest

import quire
from quire.server.options import ServerOptions
from tests.server.harness import MAX_LEN, Server

HELLO = [{"role": "user", "content": "Hi"}]


def test_the_models_are_those_served(client, http):
    cards = client.models.list().data
    assert [c.id for c in cards] == ["tiny", "alias"]
    assert cards[0].max_model_len == MAX_LEN
    assert cards[0].root == "tiny-root"
    assert client.models.retrieve("alias").id == "alias"
    assert http.get("/v1/models/none").status_code == 404


def test_probes_answer(http):
    for path in ("/health", "/live", "/ready", "/ping"):
        got = http.get(path)
        assert (got.status_code, got.content) == (200, b"")
    assert http.get("/version").json() == {"version": quire.__version__}


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/version", "/v1/models"])
def test_monitors_may_ask_for_the_head_alone(http, path):
    """As `curl -I`, `wget --spider` and many balancers do. The next answer comes in its place."""
    for _ in range(2):
        got = http.head(path)
        assert (got.status_code, got.content) == (200, b"")
    assert http.get(path).status_code == 200


def test_text_becomes_tokens_and_back(http, server):
    got = http.post("/tokenize", json={"prompt": "a汉", "return_token_strs": True}).json()
    assert got["tokens"] == server.tokenizer.encode("a汉")
    assert got["count"] == len(got["tokens"]) == len(got["token_strs"])
    assert got["max_model_len"] == MAX_LEN
    assert http.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": "a汉"}


def test_a_conversation_becomes_tokens(http, server):
    got = http.post(
        "/tokenize", json={"messages": HELLO, "chat_template_kwargs": {"shout": True}}
    ).json()
    assert got["tokens"] == server.chat_ids(HELLO, shout=True)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"messages": 5}, "messages"),
        ("/tokenize", {"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
def test_bad_token_requests_are_refused(http, path, body, param):
    got = http.post(path, json=body)
    assert got.status_code == 400
    assert got.json()["error"]["param"] == param


def test_the_document_describes_each_body(http):
    document = http.get("/openapi.json").json()
    assert http.get("/docs").status_code == 200
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"][
            "schema"
        ]
        for ref in schema.get("anyOf", [schema]):
            assert ref["$ref"].rpartition("/")[2] in document["components"]["schemas"]
    assert "messages" in document["components"]["schemas"]["ChatCompletionRequest"]["properties"]


@pytest.fixture(scope="module")
def guarded(tokenizer):
    options = ServerOptions(
        api_key=("first", "sécond"), enable_request_id_headers=True, allowed_origins=("https://page.example",),
        enable_prompt_tokens_details=True, disable_fastapi_docs=True, return_tokens_as_token_ids=True,
        default_chat_template_kwargs={"shout": True},
    )  # fmt: skip
    with Server(
        tokenizer, options=options, defaults={"max_tokens": 7, "temperature": 0.5}
    ).running() as running:
        yield running


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer firs", "Bearer firstx", "bearer  first", "Basic first", "first"],
)
def test_no_route_but_the_probes_answers_without_a_key(guarded, header):
    headers = {} if header is None else {"Authorization": header}
    with httpx.Client(base_url=guarded.url, headers=headers) as http:
        for path in (
            "/v1/models",
            "/version",
            "/openapi.json",
            "//v1/models",
            "/v1/../v1/models",
            "/tokenize",
        ):
            got = http.get(path)
            error = got.json()["error"]
            assert (got.status_code, error["type"]) == (401, "AuthenticationError")
            assert "Authorization: Bearer" in error["message"]
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        assert http.get("/health").status_code == 200


def test_each_key_opens(guarded):
    for key in (b"first", "sécond".encode()):
        got = httpx.get(f"{guarded.url}/v1/models", headers={"Authorization": b"Bearer " + key})
        assert got.status_code == 200
    two = [("Authorization", "Bearer first"), ("Authorization", "Bearer wrong")]
    assert httpx.get(f"{guarded.url}/v1/models", headers=two).status_code == 401


def test_options_of_the_server_reach_its_answers(guarded):
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="first", max_retries=0) as client:
        got = client.chat.completions.with_raw_response.create(
            model="tiny",
            messages=HELLO,
            logprobs=True,
            extra_headers={"X-Request-Id": "mine"},
            extra_body={"ignore_eos": True},
        )
    assert got.headers["x-request-id"] == "mine"
    answer = got.parse()
    assert answer.usage.completion_tokens == 7
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.choices[0].logprobs.content[0].token.startswith("token_id:")
    assert answer.choices[0].message.content == guarded.tokenizer.decode(
        guarded.model.speech(guarded.chat_ids(HELLO, shout=True))[:7]
    )
    assert (
        httpx.get(f"{guarded.url}/docs", headers={"Authorization": "Bearer first"}).status_code
        == 404
    )


def test_a_proxy_may_show_the_server_under_a_path(tokenizer):
    options = ServerOptions(root_path="/llm", api_key=("key",))
    with Server(tokenizer, options=options).running() as server:
        key = {"Authorization": "Bearer key"}
        assert httpx.get(f"{server.url}/v1/models", headers=key).status_code == 200
        assert 'href="openapi.json"' in httpx.get(f"{server.url}/llm/docs", headers=key).text
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/v1/models").status_code == 401


def test_only_allowed_pages_may_ask(guarded, http):
    for origin, allowed in (
        ("https://page.example", "https://page.example"),
        ("https://evil.example", None),
    ):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        got = httpx.options(f"{guarded.url}/v1/models", headers=headers)
        assert got.headers.get("access-control-allow-origin") == allowed
    assert (
        "access-control-allow-origin"
        not in http.get("/health", headers={"Origin": "https://page.example"}).headers
    )


def test_sixty_four_at_once_all_get_their_own_answer(server):
    async def main():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=60
        ) as client:

            async def one(place):
                messages = [{"role": "user", "content": f"I am {place}"}]
                if place % 2:
                    got = await client.chat.completions.create(model="tiny", messages=messages)
                    return got.choices[0].message.content == server.answer(messages)
                text = ""
                async for chunk in await client.chat.completions.create(
                    model="tiny", messages=messages, stream=True
                ):
                    text += chunk.choices[0].delta.content or ""
                return text == server.answer(messages)

            return await asyncio.gather(*(one(place) for place in range(192)))

    assert all(asyncio.run(main()))


def test_one_request_id_may_be_used_many_times_at_once(server):
    async def main():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

            async def one(place):
                body = {"prompt": f"id {place}", "max_tokens": 200}
                got = await http.post(
                    "/v1/completions", json=body, headers={"X-Request-Id": "same"}
                )
                return got.json()["choices"][0]["text"] == server.model.text(
                    server.tokenizer.encode(f"id {place}")
                )

            return await asyncio.gather(*(one(place) for place in range(100)))

    assert all(asyncio.run(main()))


def test_a_failed_step_is_a_500_and_the_server_lives(tokenizer, caplog):
    with Server(tokenizer).running() as server, httpx.Client(base_url=server.url) as http:
        server.executor.fail_with = ValueError("no file /secret/place/model.bin at 0xdeadbeef")
        got = http.post("/v1/completions", json={"prompt": "a"})
        assert got.status_code == 500
        assert "/secret" not in got.text
        assert "0xdead" not in got.text
        events = http.post("/v1/completions", json={"prompt": "b", "stream": True})
        assert events.status_code == 200
        assert '"code":500' in events.text
        assert events.text.endswith("data: [DONE]\n\n")
        server.executor.fail_with = None
        assert http.post("/v1/completions", json={"prompt": "c"}).status_code == 200
        assert http.get("/health").status_code == 200
        server.wait_idle()


def test_when_the_engine_dies_every_request_hears_of_it(tokenizer, caplog):
    async def main(server):
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            body = {"prompt": "a", "ignore_eos": True, "max_tokens": 400}
            asked = [
                asyncio.create_task(
                    http.post("/v1/completions", json={**body, "stream": i % 2 == 0})
                )
                for i in range(8)
            ]
            while (await asyncio.to_thread(server.stats)).running < 8:
                await asyncio.sleep(0.005)
            server.engine.step = lambda: 1 / 0
            for i, got in enumerate(await asyncio.gather(*asked)):
                assert "InternalServerError" in got.text
                assert got.status_code == (200 if i % 2 == 0 else 500)
            assert (await http.post("/v1/completions", json=body)).status_code == 500
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/live")).status_code == 200

    with Server(tokenizer, step_s=0.002).running() as server:
        asyncio.run(main(server))
