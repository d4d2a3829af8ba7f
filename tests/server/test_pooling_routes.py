"""/pooling, /classify, the routes of text-embeddings-inference, /invocations and the model list."""

import base64
import dataclasses
import json

import httpx
import numpy as np
import pytest

from tests.server.harness import (
    CLASSIFIES,
    EMBEDS,
    EMBEDS_TOKENS,
    LABELS,
    MAX_LEN,
    VECTOR_SIZE,
    Server,
    logits_of,
    probabilities,
    vector_of,
)

SPARSE = dataclasses.replace(EMBEDS, methods=("splade",), normalize=False, prompts={})


@pytest.fixture(scope="module")
def classifier(tokenizer):
    with Server(tokenizer, pooling=CLASSIFIES, generates=False).running() as running:
        yield running


@pytest.fixture(scope="module")
def embedder(tokenizer):
    with Server(tokenizer, pooling=EMBEDS, generates=False).running() as running:
        yield running


@pytest.fixture(scope="module")
def of_tokens(tokenizer):
    with Server(tokenizer, pooling=EMBEDS_TOKENS, generates=False).running() as running:
        yield running


def ask(server, path, status=200, headers=None, **body):
    got = httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)
    assert got.status_code == status, got.text
    return got.json()


def probs(server, text):
    return probabilities(logits_of(server.tokenizer.encode(text), LABELS))


# -- /classify --------------------------------------------------------------------------------


def test_each_text_has_its_likeliest_label(classifier):
    texts = ["hello", "you", "汉字"]
    answer = ask(classifier, "/classify", input=texts)
    for one, text in zip(answer["data"], texts):
        wanted = probs(classifier, text)
        assert np.allclose(one["probs"], wanted, atol=1e-6)
        assert one["label"] == CLASSIFIES.labels[int(np.argmax(wanted))]
        assert one["num_classes"] == LABELS
    assert answer["id"].startswith("classify-")
    tokens = sum(len(classifier.tokenizer.encode(text)) for text in texts)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


@pytest.mark.parametrize("name", ["use_activation", "activation", "softmax"])
def test_logits_come_without_activation(classifier, name):
    (one,) = ask(classifier, "/classify", input="hello", **{name: False})["data"]
    assert np.allclose(one["probs"], logits_of(classifier.tokenizer.encode("hello"), LABELS))


def test_a_conversation_is_classified(classifier):
    messages = [{"role": "user", "content": "hi"}]
    text = classifier.tokenizer.template().render(messages, add_generation_prompt=False)
    (one,) = ask(classifier, "/classify", messages=messages)["data"]
    assert np.allclose(one["probs"], probs(classifier, text), atol=1e-6)


# -- /pooling ---------------------------------------------------------------------------------


def test_pooling_gives_the_result_of_the_models_task(classifier, embedder, of_tokens):
    (one,) = ask(classifier, "/pooling", input="hello")["data"]
    assert np.allclose(one["data"], probs(classifier, "hello"), atol=1e-6)
    (one,) = ask(embedder, "/pooling", input="hello", task="embed")["data"]
    ids = embedder.tokenizer.encode("hello")
    assert np.array_equal(np.array(one["data"], np.float32), vector_of(ids))
    (one,) = ask(of_tokens, "/pooling", input="hello", task="token_embed")["data"]
    wanted = np.stack([vector_of([i]) for i in ids])
    assert np.array_equal(np.array(one["data"], np.float32), wanted)


def test_vectors_of_tokens_come_in_every_form(of_tokens):
    ids = of_tokens.tokenizer.encode("hello")
    wanted = np.stack([vector_of([i]) for i in ids]).tobytes()
    (one,) = ask(of_tokens, "/pooling", input="hello", encoding_format="base64")["data"]
    assert base64.b64decode(one["data"]) == wanted
    body = {"input": ["hello", "hello"], "encoding_format": "bytes"}
    got = httpx.post(f"{of_tokens.url}/pooling", json=body)
    assert got.content == wanted * 2
    shapes = [one["shape"] for one in json.loads(got.headers["metadata"])["data"]]
    assert shapes == [[len(ids), VECTOR_SIZE]] * 2


def test_bad_pooling_bodies_are_refused(classifier):
    for body, status, words in (
        ({"input": "a", "task": "embed"}, 400, "/classify"),
        ({"input": "a", "task": "dream"}, 400, "task must be one of"),
        ({"input": "a", "dimensions": 3}, 400, "/v1/embeddings"),
        ({"data": {"x": 1}}, 501, "data"),
    ):
        assert words in ask(classifier, "/pooling", status, **body)["error"]["message"]


# -- text-embeddings-inference ----------------------------------------------------------------


def test_tei_embeds(embedder):
    ids = embedder.tokenizer.encode("hello")
    for given, wanted in (("hello", [ids]), (["hello", "hello"], [ids, ids]), ([[1, 2]], [[1, 2]])):
        found = ask(embedder, "/embed", inputs=given, normalize=True, truncate=False)
        assert np.allclose(found, [vector_of(one) for one in wanted], atol=1e-6)
    found = ask(embedder, "/embed", inputs="hello", prompt_name="query")
    ids = embedder.tokenizer.encode("Query: hello")
    assert np.allclose(found[0], vector_of(ids), atol=1e-6)


def test_tei_embeds_tokens(of_tokens):
    ids = of_tokens.tokenizer.encode("hello")
    (found,) = ask(of_tokens, "/embed_all", inputs=["hello"])
    assert np.array_equal(np.array(found, np.float32), [vector_of([i]) for i in ids])


def test_tei_gives_the_weights_that_are_not_0(tokenizer, embedder):
    with Server(tokenizer, pooling=SPARSE, generates=False).running() as server:
        ((*found,),) = ask(server, "/embed_sparse", inputs="hello")
    wanted = vector_of(tokenizer.encode("hello"))
    assert np.array_equal(np.array([one["value"] for one in found], np.float32), wanted)
    assert [one["index"] for one in found] == list(range(VECTOR_SIZE))
    assert "SPLADE" in ask(embedder, "/embed_sparse", 400, inputs="a")["error"]


def test_tei_predicts(classifier):
    wanted = probs(classifier, "hello")
    order = np.argsort(-wanted)
    single = ask(classifier, "/predict", inputs="hello")
    assert [one["label"] for one in single] == [CLASSIFIES.labels[i] for i in order]
    assert np.allclose([one["score"] for one in single], wanted[order], atol=1e-6)
    assert ask(classifier, "/predict", inputs=["hello"]) == single
    assert ask(classifier, "/predict", inputs=[["hello"], ["you"]])[0] == single
    raw = ask(classifier, "/predict", inputs="hello", raw_scores=True)
    logits = logits_of(classifier.tokenizer.encode("hello"), LABELS)
    assert np.allclose(sorted(one["score"] for one in raw), sorted(logits), atol=1e-6)


def test_tei_predicts_pairs(classifier):
    wanted = sorted(probs(classifier, "helloyou"))[::-1]
    pair = ask(classifier, "/predict", inputs=["hello", "you"])
    assert np.allclose([one["score"] for one in pair], wanted, atol=1e-6)
    mixed = ask(classifier, "/predict", inputs=[["hello", "you"], ["hello"]])
    assert mixed[0] == pair
    assert len(mixed[1]) == LABELS
    error = ask(classifier, "/predict", 400, inputs=["a", "b", "c"])
    assert "[[text], [text, text]]" in error["error"]


def test_tei_compares(embedder):
    inputs = {"source_sentence": "hello", "sentences": ["hello", "you"]}
    same, other = ask(embedder, "/similarity", inputs=inputs, parameters={"truncate": True})
    query, *rest = (
        vector_of(embedder.tokenizer.encode(text)) for text in ("Query: hello", "hello", "you")
    )
    assert np.allclose([same, other], [query @ one for one in rest], atol=1e-6)


def test_tei_ranks(embedder):
    texts = ["one", "two", "three"]
    found = ask(embedder, "/rerank", query="a", texts=texts, return_text=True)
    assert sorted(one["index"] for one in found) == [0, 1, 2]
    assert [one["score"] for one in found] == sorted(one["score"] for one in found)[::-1]
    assert all(one["text"] == texts[one["index"]] for one in found)
    assert "text" not in ask(embedder, "/rerank", query="a", texts=texts)[0]


def test_tei_errors_have_its_form(embedder):
    long = "ab" * MAX_LEN
    for path, body, status in (
        ("/embed", {"inputs": long}, 413),
        ("/embed", {"inputs": ["a"] * 2049}, 413),
        ("/embed", {"inputs": ""}, 400),
        ("/embed", {"inputs": 5}, 400),
        ("/rerank", {"query": "a", "texts": ["b", long]}, 413),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 400),
    ):
        error = ask(embedder, path, status, **body)
        assert set(error) == {"error", "error_type"}
        assert error["error_type"] == "Validation"
    found = ask(embedder, "/embed", inputs=long, truncate=True, truncation_direction="Left")
    ids = embedder.tokenizer.encode(long)[-MAX_LEN:]
    assert np.allclose(found[0], vector_of(ids), atol=1e-6)


def test_tei_info_says_what_the_model_is(embedder, classifier, of_tokens, server):
    kinds = [
        httpx.get(f"{one.url}/info").json()["model_type"]
        for one in (embedder, classifier, of_tokens, server)
    ]
    assert kinds[0] == kinds[2] == kinds[3] == {"embedding": {"pooling": "last"}}
    assert kinds[1]["classifier"]["id2label"] == {"0": "bad", "1": "fair", "2": "good"}


# -- the rest ---------------------------------------------------------------------------------


def test_invocations_find_the_route_of_a_body(embedder, classifier, of_tokens, server):
    messages = [{"role": "user", "content": "a"}]
    score = {"text_1": "a", "text_2": "b"}
    for to, body, key in (
        (embedder, {"input": "a"}, "embedding"),
        (embedder, {"messages": messages}, "embedding"),
        (classifier, {"input": "a"}, "probs"),
        (of_tokens, {"input": "a"}, "data"),
        (embedder, score, "score"),
        (server, {"input": "a"}, "embedding"),
    ):
        assert key in ask(to, "/invocations", **body)["data"][0]
    answer = ask(embedder, "/invocations", query="a", documents=["b"])
    assert "relevance_score" in answer["results"][0]
    assert len(ask(embedder, "/invocations", inputs="a")[0]) == VECTOR_SIZE
    assert "label" in ask(classifier, "/invocations", inputs="a")[0]
    assert "choices" in ask(server, "/invocations", messages=messages)
    assert "no text" in ask(embedder, "/invocations", 400, prompt="a")["error"]["message"]
    assert "input" in ask(embedder, "/invocations", 400, x=1)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
        ("/generate", {"prompt": "a"}),
    ],
)
def test_routes_that_generate_name_those_that_serve_the_model(embedder, path, body):
    message = ask(embedder, path, 400, **body)["error"]["message"]
    assert "generates no text" in message
    assert "/v1/embeddings" in message


def test_tokens_of_a_pooling_model_are_shown(embedder):
    ids = ask(embedder, "/tokenize", prompt="hello")["tokens"]
    assert ids == embedder.tokenizer.encode("hello")
    assert ask(embedder, "/detokenize", tokens=ids)["prompt"] == "hello"


def test_the_page_says_that_a_model_does_not_write(embedder, server):
    told = httpx.get(f"{embedder.url}/quire/about").json()
    assert (told["generates"], told["tasks"]) == (False, ["embed"])
    assert httpx.get(f"{server.url}/quire/about").json()["generates"]


def test_the_model_list_says_what_a_model_does(embedder, classifier, server):
    cards = [httpx.get(f"{one.url}/v1/models").json()["data"][0] for one in (embedder, server)]
    assert [one["tasks"] for one in cards] == [["embed"], ["generate", "embed"]]
    assert cards[0]["pooling"]["size"] == VECTOR_SIZE
    card = httpx.get(f"{classifier.url}/v1/models/tiny").json()
    assert card["tasks"] == ["classify"]
    assert card["pooling"]["labels"] == ["bad", "fair", "good"]
