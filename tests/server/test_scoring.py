"""/score and /rerank: the score of each pair, in the form of each API."""

import dataclasses

import cohere
import httpx
import numpy as np
import pytest

from tests import tiers
from tests.server.harness import (
    CLASSIFIES,
    EMBEDS,
    EMBEDS_TOKENS,
    MAX_LEN,
    Server,
    logits_of,
    probabilities,
    vector_of,
)

QUERY = "which one?"
DOCUMENTS = ["the first", "another", "汉字", "the first", "none of them"]
RERANKS = dataclasses.replace(CLASSIFIES, size=1, labels=("relevant",))
KINDS = {"bi_encoder": EMBEDS, "late_interaction": EMBEDS_TOKENS, "cross_encoder": RERANKS}


@pytest.fixture(scope="module")
def servers(tokenizer):
    """A server of each kind of model that scores."""
    with (
        Server(tokenizer, pooling=EMBEDS, generates=False).running() as one,
        Server(tokenizer, pooling=EMBEDS_TOKENS, generates=False).running() as two,
        Server(tokenizer, pooling=RERANKS, generates=False).running() as three,
    ):
        yield dict(zip(KINDS, (one, two, three)))


@pytest.fixture(scope="module")
def ranks(servers):
    return servers["cross_encoder"]


def ask(server, path, status=200, **body):
    got = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert got.status_code == status, got.text
    return got.json()


def want(kind, server, query, document):
    """The score of a pair, from what the model makes of the tokens."""
    encode = server.tokenizer.encode
    if kind == "cross_encoder":
        logits = logits_of([*encode(query), *encode(document)], 1)
        return float(probabilities(logits)[0])
    if kind == "bi_encoder":
        texts = EMBEDS.prompts["query"] + query, document
        first, second = (vector_of(encode(text)).astype(float) for text in texts)
        return float(first @ second)
    first, second = (
        np.stack([vector_of([one]) for one in encode(text)]) for text in (query, document)
    )
    return float((first @ second.T).max(axis=1).sum())


def ranking(scores):
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


# -- scores -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_one_query_is_scored_with_each_document(servers, kind, path):
    server = servers[kind]
    answer = ask(server, path, queries=QUERY, documents=DOCUMENTS)
    assert [one["index"] for one in answer["data"]] == list(range(len(DOCUMENTS)))
    for one, document in zip(answer["data"], DOCUMENTS):
        assert one["score"] == pytest.approx(want(kind, server, QUERY, document), abs=1e-5)
    assert answer["usage"]["total_tokens"] >= len(QUERY)
    assert answer["id"].startswith("score-")


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_of_a_pair_does_not_depend_on_others(servers, kind):
    server = servers[kind]
    together = ask(server, "/score", queries=QUERY, documents=DOCUMENTS)["data"]
    paired = ask(server, "/score", queries=[QUERY] * 5, documents=DOCUMENTS)["data"]
    for i, document in enumerate(DOCUMENTS):
        (alone,) = ask(server, "/score", queries=[QUERY], documents=[document])["data"]
        assert alone["score"] == together[i]["score"] == paired[i]["score"]


@pytest.mark.parametrize(
    "names", [("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"), ("text_1", "items")]
)
def test_the_two_sides_have_several_names(ranks, names):
    body = {names[0]: QUERY, names[1]: {"content": [{"type": "text", "text": "another"}]}}
    (one,) = ask(ranks, "/score", **body)["data"]
    assert one["score"] == pytest.approx(want("cross_encoder", ranks, QUERY, "another"), abs=1e-6)


def test_logits_are_scores_without_activation(ranks):
    (one,) = ask(ranks, "/score", queries="a", documents="b", use_activation=False)["data"]
    assert one["score"] == pytest.approx(logits_of(ranks.tokenizer.encode("ab"), 1)[0], abs=1e-6)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "1:1, 1:N or N:N"),
        ({"queries": "a", "documents": []}, "documents must hold 1 to 10000 items, got 0"),
        ({"queries": "a"}, "give one of documents, items"),
        ({"queries": "a", "text_1": "b", "documents": "c"}, "got queries and text_1"),
        ({"queries": "a", "documents": ["b", "c" * MAX_LEN * 2]}, "documents[1]"),
        ({"queries": "a", "documents": [{"image": 1}]}, "documents[0]"),
        ({"queries": "a", "documents": ["b"], "max_tokens_per_doc": MAX_LEN}, "max_tokens_per_doc"),
        ({"queries": "a", "documents": ["b"], "instruction": "c"}, "instruction"),
        ({"queries": "a", "documents": ["b"], "chat_template_kwargs": {"x": 1}}, "instruction"),
        ({"queries": "a", "documents": ["a"] * 10_001}, "10001"),
    ],
)
def test_a_bad_body_names_its_field_and_item(ranks, body, words):
    assert words in ask(ranks, "/score", 400, **body)["error"]["message"]
    assert ranks.stats().running == ranks.stats().waiting == 0


def test_models_that_cannot_score_name_the_route_that_serves_them(server, tokenizer):
    message = ask(server, "/score", 400, queries="a", documents="b")["error"]["message"]
    assert "--runner pooling" in message
    with Server(tokenizer, pooling=CLASSIFIES, generates=False).running() as classifier:
        message = ask(classifier, "/score", 400, queries="a", documents="b")["error"]["message"]
        assert "num_labels == 1" in message
        assert "/classify" in message


# -- rerank -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_best_first_and_equal_ones_in_their_order(servers, kind, path):
    server = servers[kind]
    scores = [want(kind, server, QUERY, one) for one in DOCUMENTS]
    answer = ask(server, path, query=QUERY, documents=DOCUMENTS)
    assert [one["index"] for one in answer["results"]] == ranking(scores)
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-5)
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"]


@pytest.mark.parametrize("top", [0, None, 1, 2, 5, 99])
def test_top_n_is_the_number_of_results(ranks, top):
    full = ask(ranks, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    found = ask(ranks, "/rerank", query=QUERY, documents=DOCUMENTS, top_n=top)["results"]
    assert found == full[: top or len(DOCUMENTS)]


def test_the_cohere_clients_get_their_results(ranks):
    order = ranking([want("cross_encoder", ranks, QUERY, one) for one in DOCUMENTS])
    with cohere.ClientV2("none", base_url=ranks.url) as co:
        found = co.rerank(
            model="tiny", query=QUERY, documents=DOCUMENTS, top_n=3, max_tokens_per_doc=4096
        )
        assert [one.index for one in found.results] == order[:3]
        assert found.meta.billed_units.search_units == 1
    with cohere.Client("none", base_url=ranks.url) as co:
        documents = [{"text": one, "id": str(i)} for i, one in enumerate(DOCUMENTS)]
        found = co.rerank(
            model="tiny", query=QUERY, documents=documents, return_documents=True, top_n=2
        )
        assert [one.index for one in found.results] == order[:2]
        assert [one.document.text for one in found.results] == [DOCUMENTS[i] for i in order[:2]]
        bare = co.rerank(model="tiny", query=QUERY, documents=DOCUMENTS, return_documents=False)
        assert {one.document for one in bare.results} == {None}


def test_rank_fields_select_what_counts(ranks):
    documents = [{"title": "one", "year": 1, "id": 5}, {"title": "two", "year": 2, "id": 6}]
    found = ask(ranks, "/rerank", query=QUERY, documents=documents, rank_fields=["title", "year"])
    texts = ["title: one\nyear: 1", "title: two\nyear: 2"]
    for one in found["results"]:
        score = want("cross_encoder", ranks, QUERY, texts[one["index"]])
        assert one["relevance_score"] == pytest.approx(score, abs=1e-6)
        assert one["document"] == documents[one["index"]]
    error = ask(ranks, "/rerank", 400, query="a", documents=documents, rank_fields=["text"])
    assert "documents[0] has no text in 'text'" in error["error"]["message"]


def test_jina_and_voyage_bodies_are_answered_in_their_form(ranks):
    order = ranking([want("cross_encoder", ranks, QUERY, one) for one in DOCUMENTS])
    jina = ask(
        ranks,
        "/v1/rerank",
        model="tiny",
        query={"text": QUERY},
        documents=[{"text": one} for one in DOCUMENTS],
        top_n=2,
        return_documents=True,
        truncation=True,
    )
    assert [one["index"] for one in jina["results"]] == order[:2]
    assert jina["results"][0]["document"]["text"] == DOCUMENTS[order[0]]
    assert jina["usage"]["total_tokens"] > 0
    for top in (2, None):
        body = {"model": "tiny", "query": QUERY, "documents": DOCUMENTS, "top_k": top}
        voyage = ask(ranks, "/v1/rerank", **body, return_documents=True, truncation=True)
        assert [one["index"] for one in voyage["data"]] == order[:top]
        assert voyage["data"][0]["document"] == DOCUMENTS[order[0]]
        assert voyage["object"] == "list"


def test_documents_that_are_too_long_are_cut_unless_the_request_refuses_that(ranks):
    long = "ab" * MAX_LEN
    found = ask(ranks, "/rerank", query=QUERY, documents=["a", long])
    assert len(found["results"]) == 2
    error = ask(ranks, "/rerank", 400, query=QUERY, documents=["a", long], truncation=False)
    assert "documents[1]" in error["error"]["message"]
    cut = ask(ranks, "/rerank", query=QUERY, documents=[long], max_tokens_per_doc=7)
    score = want("cross_encoder", ranks, QUERY, long[:7])
    assert cut["results"][0]["relevance_score"] == pytest.approx(score, abs=1e-6)


def test_an_empty_document_is_scored_and_an_empty_query_with_it_too(ranks):
    found = ask(ranks, "/rerank", query=QUERY, documents=["", "a"])
    assert len(found["results"]) == 2


def test_a_bad_rerank_body_is_refused(ranks):
    for body, words in (
        ({"query": "a"}, "give documents"),
        ({"query": "a", "documents": []}, "got 0"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n must be >= 0"),
        ({"query": "a", "documents": ["b"], "top_k": -1}, "top_k must be >= 0"),
        ({"documents": ["b"]}, "query"),
    ):
        assert words in ask(ranks, "/rerank", 400, **body)["error"]["message"]


def test_thousands_of_documents_are_ranked(ranks):
    documents = [f"document {i}" for i in range(tiers.amount(2_000, 10_000))]
    got = httpx.post(
        f"{ranks.url}/rerank", json={"query": "a", "documents": documents, "top_n": 3}, timeout=120
    )
    assert got.status_code == 200, got.text[:300]
    scores = [want("cross_encoder", ranks, "a", one) for one in documents]
    assert [one["index"] for one in got.json()["results"]] == ranking(scores)[:3]


# -- models that generate ---------------------------------------------------------------------


def test_labels_are_scored_as_the_next_token(server):
    body = {"query": "Is it?", "items": [" yes", " no"], "label_token_ids": [5, 6, 7]}
    answer = ask(server, "/generative_scoring", **body)
    for one, item in zip(answer["data"], body["items"]):
        found = httpx.post(
            f"{server.url}/v1/completions",
            json={
                "prompt": server.tokenizer.encode(body["query"] + item),
                "max_tokens": 1,
                "logprob_token_ids": body["label_token_ids"],
                "return_tokens_as_token_ids": True,
            },
        ).json()["choices"][0]["logprobs"]["top_logprobs"][0]
        weights = np.exp([found[f"token_id:{label}"] for label in body["label_token_ids"]])
        assert one["score"] == pytest.approx(weights[0] / weights.sum(), rel=1e-6)
        bare = ask(server, "/generative_scoring", **{**body, "items": [item]}, apply_softmax=False)
        assert bare["data"][0]["score"] == pytest.approx(weights[0], rel=1e-6)
    assert answer["usage"]["completion_tokens"] == 2
    ids = {**body, "items": [[1], [2]], "query": [3]}
    assert len(ask(server, "/generative_scoring", **ids, item_first=True)["data"]) == 2
    for change in ({"items": []}, {"label_token_ids": []}, {"label_token_ids": [10**6]}):
        ask(server, "/generative_scoring", 400, **{**body, **change})


def test_a_model_that_embeds_has_no_next_token(servers):
    body = {"query": "a", "items": ["b"], "label_token_ids": [1]}
    message = ask(servers["bi_encoder"], "/generative_scoring", 400, **body)["error"]["message"]
    assert "generates no text" in message
