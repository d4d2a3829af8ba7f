"""Images over HTTP to a model that embeds: a `quire serve` of a tiny Qwen2-VL."""

import base64
import json
import threading

import cohere
import httpx
import numpy as np
import pytest
from PIL import Image

from tests.cpu.multimodal.folders import write_qwen2_vl
from tests.media.files import data_url, encode
from tests.server.running import SMALL, serving

pytestmark = pytest.mark.slow("starts a server")

PHOTO = encode(Image.linear_gradient("L").resize((90, 60)).convert("RGB"), "JPEG")
OTHER = encode(Image.radial_gradient("L").resize((60, 90)).convert("RGB"), "JPEG")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    model = write_qwen2_vl(tmp_path_factory.mktemp("qwen"), {"eos_token_id": 2})
    more = ("--runner", "pooling", "--convert", "embed", "--limit-mm-per-prompt", "image=2")
    with serving(
        model, *SMALL, "--max-model-len", 512, "--served-model-name", "vl", "--dtype", "float32",
        "--trust-request-mm-kwargs", *more,
    ) as found:  # fmt: skip
        threading.Thread(target=found.process.stdout.read, daemon=True).start()
        yield found


@pytest.fixture(scope="module")
def post(running):
    with httpx.Client(base_url=running.url, timeout=60) as client:

        def send(path, status=200, **body):
            got = client.post(path, json={"model": "vl", **body})
            assert got.status_code == status, got.text
            return got.json()

        yield send


def image(data=PHOTO):
    return {"type": "image_url", "image_url": {"url": data_url(data, "image/jpeg")}}


def text(words):
    return {"type": "text", "text": words}


def user(*content):
    return [{"role": "user", "content": list(content)}]


def vectors(answer):
    return [np.array(one["embedding"]) for one in answer["data"]]


def same(first, second):
    return np.abs(np.array(first) - np.array(second)).max() < 1e-5


def test_messages_with_an_image_have_a_vector_of_their_own(post):
    ask = user(text("a cat"), image())
    one, again = (post("/v1/embeddings", messages=ask) for _ in range(2))
    (found,) = vectors(one)
    assert same(found, vectors(again)[0])
    assert not same(found, vectors(post("/v1/embeddings", messages=user(text("a cat"))))[0])
    assert not same(
        found, vectors(post("/v1/embeddings", messages=user(text("a cat"), image(OTHER))))[0]
    )
    counted = post("/tokenize", messages=ask, add_generation_prompt=False)["count"]
    assert one["usage"]["prompt_tokens"] == counted > 10
    both = post("/v1/embeddings", messages=[ask, user(image(OTHER)), user(text("b"))])
    assert len(both["data"]) == 3
    assert same(vectors(both)[0], found)
    shown = post("/pooling", messages=ask, task="embed")["data"][0]["data"]
    assert same(shown, found)


def test_items_of_input_have_images_in_place(post):
    plain = post("/v1/embeddings", input=["a", "b"])
    mixed = post("/v1/embeddings", input=[{"text": "a"}, {"content": [image(), text("c")]},
                                          {"image": data_url(PHOTO)}])  # fmt: skip
    assert same(vectors(mixed)[0], vectors(plain)[0])
    assert not same(vectors(mixed)[1], vectors(mixed)[2])
    beside = post("/v1/embeddings", input=["a", {"image": data_url(PHOTO)}])
    assert same(vectors(beside)[0], vectors(plain)[0])
    assert same(vectors(beside)[1], vectors(mixed)[2])
    typed = post(
        "/v1/embeddings", input=[{"content": [text(f"{IMAGE}c")]}, {"image": data_url(PHOTO)}]
    )
    assert not same(vectors(typed)[0], vectors(mixed)[1])


def test_coheres_client_sends_images(post, running):
    client = cohere.ClientV2("none", base_url=running.url)
    got = client.embed(
        model="vl", input_type="image", embedding_types=["float"],
        images=[data_url(PHOTO, "image/jpeg")],
    )  # fmt: skip
    want = post("/v1/embeddings", messages=user(image()))
    assert same(got.embeddings.float_[0], vectors(want)[0])
    mixed = [{"content": [text("a"), image()]}, {"content": [text("a")]}]
    found = post("/v2/embed", inputs=mixed, input_type="search_document")["embeddings"]["float"]
    want = post("/v1/embeddings", messages=user(text("a"), image()))
    assert same(found[0], vectors(want)[0])


def test_scores_and_ranks_read_images(post):
    query, documents = {"content": [image()]}, ["a cat", {"content": [image(OTHER)]},
                                                {"content": [image()]}]  # fmt: skip
    one = post("/score", queries=query, documents=documents)
    scores = [found["score"] for found in one["data"]]
    assert scores[2] == pytest.approx(1, abs=1e-5)
    assert max(scores[:2]) < 0.9999
    embedded = post("/v1/embeddings", input=[query, documents[1]])
    first, second = vectors(embedded)
    assert first @ second == pytest.approx(scores[1], abs=1e-5)
    ranked = post("/rerank", query=query, documents=documents)["results"]
    assert [found["index"] for found in ranked] == sorted(range(3), key=lambda i: -scores[i])


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {"messages": user(image(), image(), image())}, "At most 2 image"),
        ("/score", {"queries": {"content": [image()] * 3}, "documents": "a"}, "At most 2 image"),
        ("/rerank", {"query": "a", "documents": ["b", {"content": [image(b"no image")]}]},
         "documents[1].content[0]"),
        ("/v2/embed", {"images": [data_url(b"none")]}, "images"),
        ("/v1/embeddings", {"input": [{"content": [image()]}], "truncate_prompt_tokens": 3},
         "not cut"),
        ("/v1/embeddings", {"messages": user(image()), "mm_processor_kwargs": {"wrong": 1}},
         "wrong"),
        ("/v1/embeddings", {"messages": user(image()) * 200}, "At most 2 image"),
        ("/pooling", {"input": [{"audio": "data:audio/wav;base64,AAAA"}]}, "reads no audio"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(post, path, body, words):
    assert words in json.dumps(post(path, 400, **body))
    assert post("/v1/embeddings", input="a")["data"]


def test_processor_options_count(post):
    small = {"max_pixels": 28 * 28 * 4, "min_pixels": 28 * 28}
    ask = user(image(encode(Image.new("RGB", (300, 300)), "PNG")))
    large = post("/v1/embeddings", messages=ask)["usage"]["prompt_tokens"]
    less = post("/v1/embeddings", messages=ask, mm_processor_kwargs=small)["usage"]["prompt_tokens"]
    assert less < large
    item = [{"content": ask[0]["content"]}]
    assert post("/v1/embeddings", input=item, mm_processor_kwargs=small)["data"]


def test_a_batch_file_has_images(running, tmp_path):
    from quire.cli import run_batch

    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/embeddings",
         "body": {"model": "vl", "messages": user(text("a"), image())}},
        {"custom_id": "b", "method": "POST", "url": "/score",
         "body": {"model": "vl", "queries": {"content": [image()]}, "documents": ["a"]}},
    ]  # fmt: skip
    into = tmp_path / "in.jsonl"
    into.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.jsonl"
    run_batch.main(["-i", str(into), "-o", str(out), "--url", running.url])
    found = [json.loads(one)["response"] for one in out.read_text().splitlines()]
    assert [one["status_code"] for one in found] == [200, 200]
    assert found[0]["body"]["data"][0]["embedding"]
    assert base64.b64encode(PHOTO).decode() not in out.read_text()
