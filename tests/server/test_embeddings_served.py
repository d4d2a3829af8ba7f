"""`quire serve` of models that embed and rank: results of the peers, and none lost to a dead engine."""

import asyncio
import collections
import itertools
import threading

import cohere
import httpx
import numpy as np
import openai
import pytest

from tests.cpu.pooling.folders import encoder_folder, st_folder, texts
from tests.server.running import SMALL, serving
from tests.server.test_survive import engine_of, kill

pytestmark = pytest.mark.slow("starts servers, and peers to compare them with")


def served(*words):
    """A server whose output is read."""
    with serving(*words) as running:
        reader = threading.Thread(target=collections.deque, args=(running.process.stdout, 0))
        reader.start()
        yield running
        running.process.kill()
        reader.join(60)


@pytest.fixture(scope="module")
def embedded():
    yield from served("embedded", *SMALL, "--max-engine-restarts", 100)


def test_the_embedded_chat_model_embeds_and_still_chats(embedded):
    with openai.OpenAI(base_url=f"{embedded.url}/v1", api_key="n", max_retries=0) as client:
        found = client.embeddings.create(model="embedded", input=["a cat", "a dog", "a cat"])
        vectors = np.array([one.embedding for one in found.data])
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert np.allclose(vectors[0], vectors[2], atol=1e-6)
        assert vectors[0] @ vectors[1] < 0.999
        assert client.completions.create(model="embedded", prompt="a", max_tokens=3).choices
    card = httpx.get(f"{embedded.url}/v1/models").json()["data"][0]
    assert card["tasks"] == ["generate", "embed"]


REQUESTS = 64


def inputs_of(i):
    return [f"text {j} of request {i}: " + "all of it and more " * (j * 7 % 30) for j in range(4)]


async def embed_all(url, disturb=None):
    """The vectors of all requests, sent at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:

        async def embed(i):
            got = await client.post(f"{url}/v1/embeddings", json={"input": inputs_of(i)})
            assert got.status_code == 200, got.text
            return [one["embedding"] for one in got.json()["data"]]

        tasks = [asyncio.create_task(embed(i)) for i in range(REQUESTS)]
        if disturb is not None:
            while not any(task.done() for task in tasks):
                await asyncio.sleep(0.001)
            assert not all(task.done() for task in tasks)
            disturb()
        return await asyncio.gather(*tasks)


def test_all_are_answered_and_equal_when_the_engine_dies(embedded):
    want = np.array(asyncio.run(embed_all(embedded.url)))
    found = np.array(asyncio.run(embed_all(embedded.url, lambda: kill(engine_of(embedded)))))
    assert np.allclose(found, want, atol=1e-5)
    metrics = httpx.get(f"{embedded.url}/metrics").text
    assert 'engine_restarts_total{engine="0",model_name="embedded"} 1.0' in metrics


def test_an_encoder_gives_the_vectors_of_sentence_transformers(tmp_path):
    oracle = st_folder(tmp_path / "model", "bert", normalize=True)
    given = [text for text in texts(60) if text]
    want = oracle.encode(given, convert_to_numpy=True)
    for server in served(tmp_path / "model", "--served-model-name", "tiny"):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="n", max_retries=0) as client:
            model = client.models.list().data[0].id
            found = client.embeddings.create(
                model=model, input=given, extra_body={"truncate_prompt_tokens": -1}
            )
            with pytest.raises(openai.BadRequestError, match="generates no text"):
                client.completions.create(model=model, prompt="a")
        got = np.array([one.embedding for one in found.data], np.float32)
        assert np.abs(got - want).max() < 1e-5
        found = httpx.post(f"{server.url}/embed", json={"inputs": given, "truncate": True}).json()
        assert np.abs(np.array(found, np.float32) - want).max() < 1e-5


def test_a_cross_encoder_ranks_as_sentence_transformers_does(tmp_path):
    from sentence_transformers import CrossEncoder

    encoder_folder(tmp_path / "model", "bert", "classify", num_labels=1)
    query, *documents = [text for text in texts(60) if text]
    oracle = CrossEncoder(str(tmp_path / "model"), device="cpu")
    want = oracle.predict([(query, one) for one in documents])
    for server in served(tmp_path / "model", "--served-model-name", "tiny"):
        with cohere.ClientV2("none", base_url=server.url) as co:
            found = co.rerank(model="tiny", query=query, documents=documents)
        for one in found.results:
            assert one.relevance_score == pytest.approx(want[one.index], abs=1e-5)
        ranked = [want[one.index] for one in found.results]
        assert all(a >= b - 1e-5 for a, b in itertools.pairwise(ranked))
