"""/v1/embeddings and /v2/embed: what the model made of each text arrives, in every form."""

import base64
import dataclasses
import hashlib
import json
import logging
import struct
import threading
import time

import cohere
import httpx
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.server.options import ServerOptions
from tests.server.harness import (
    CLASSIFIES,
    EMBEDS,
    MAX_LEN,
    VECTOR_SIZE,
    Server,
    vector_of,
)

TEXTS = ["hello", "Zürich 汉字", "a much longer text than the others"]
NESTED = dataclasses.replace(EMBEDS, matryoshka=True)


@pytest.fixture(scope="module")
def nested(tokenizer):
    """A model whose embeddings may be cut, and that does nothing else."""
    with Server(tokenizer, pooling=NESTED, generates=False).running() as running:
        yield running


def want(server, text, size=VECTOR_SIZE):
    ids = text if isinstance(text, list) else server.tokenizer.encode(text)
    found = vector_of(ids)[:size]
    return found / np.linalg.norm(found) if size < VECTOR_SIZE else found


def embed(server, status=200, path="/v1/embeddings", headers=None, **body):
    got = httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)
    assert got.status_code == status, got.text
    return got.json()


def vectors(answer):
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [np.array(one["embedding"], np.float32) for one in answer["data"]]


# -- OpenAI -----------------------------------------------------------------------------------


def test_the_openai_client_gets_the_vectors_of_its_texts_in_order(server, client):
    found = client.embeddings.create(model="tiny", input=TEXTS)  # the client asks for base64
    for one, text in zip(found.data, TEXTS):
        assert np.array_equal(np.array(one.embedding, np.float32), want(server, text))
    tokens = sum(len(server.tokenizer.encode(text)) for text in TEXTS)
    assert found.usage.prompt_tokens == found.usage.total_tokens == tokens
    assert found.model == "tiny"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_numbers_are_exact(server, path):
    (found,) = vectors(embed(server, path=path, input="hello"))
    assert np.array_equal(found, want(server, "hello"))


def test_token_ids_are_taken_as_they_are(server, client):
    ids = [[1, 2, 3], [7]]
    found = client.embeddings.create(model="tiny", input=ids)
    for one, each in zip(found.data, ids):
        assert np.array_equal(np.array(one.embedding, np.float32), want(server, each))
    alone = client.embeddings.create(model="tiny", input=[1, 2, 3])
    assert alone.data[0].embedding == found.data[0].embedding


def test_a_conversation_is_embedded_as_its_template_writes_it(server):
    messages = [{"role": "user", "content": "hi"}]
    text = server.tokenizer.template().render(messages, add_generation_prompt=False)
    (found,) = vectors(embed(server, messages=messages))
    assert np.array_equal(found, want(server, text))
    several = vectors(embed(server, messages=[messages, messages[:1]]))
    assert len(several) == 2
    assert np.array_equal(several[1], found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("format", "dtype", "endianness"),
    [
        (form, dtype, order)
        for form in ("base64", "bytes", "bytes_only")
        for dtype in ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
        for order in ("native", "little", "big")
    ],
)
def test_every_form_has_the_same_numbers(server, format, dtype, endianness):
    body = {
        "input": TEXTS,
        "encoding_format": format,
        "embed_dtype": dtype,
        "endianness": endianness,
    }
    got = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
    assert got.status_code == 200, got.text
    if format == "base64":
        parts = [base64.b64decode(one["embedding"]) for one in got.json()["data"]]
    elif format == "bytes":
        told = json.loads(got.headers["metadata"])
        assert told["usage"]["prompt_tokens"] > 0
        parts = [got.content[one["start"] : one["end"]] for one in told["data"]]
        assert {(tuple(one["shape"]), one["embed_dtype"]) for one in told["data"]} == {
            ((VECTOR_SIZE,), dtype)
        }
    else:
        size = len(got.content) // len(TEXTS)
        parts = [got.content[i * size : (i + 1) * size] for i in range(len(TEXTS))]
    for part, text in zip(parts, TEXTS):
        tolerance = {"float32": 0.0, "float16": 1e-3, "bfloat16": 4e-3}.get(dtype, 0.13)
        found = decode(part, dtype, endianness)
        assert np.allclose(found, want(server, text), rtol=tolerance, atol=tolerance / 50)


def decode(part, dtype, endianness):
    """Numbers of bytes, by the definitions of the formats alone."""
    mark = ">" if endianness == "big" else "<"
    if dtype in ("float32", "float16"):
        return np.frombuffer(part, f"{mark}f{4 if dtype == 'float32' else 2}")
    if dtype == "bfloat16":
        wide = np.frombuffer(part, f"{mark}u2").astype(np.uint32) << 16
        return wide.view(np.float32)
    mantissa, bias = (3, 7) if dtype == "fp8_e4m3" else (2, 15)
    found = []
    for (code,) in struct.iter_unpack("B", part):
        sign, exponent = -1 if code & 128 else 1, (code & 127) >> mantissa
        fraction = (code & ((1 << mantissa) - 1)) / (1 << mantissa)
        value = (
            (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2 ** (1 - bias)
        )
        found.append(sign * value)
    return np.array(found)


def test_numbers_have_one_dtype(server):
    error = embed(server, 400, input="a", embed_dtype="float16")["error"]
    assert error["param"] == "embed_dtype"
    assert "base64" in error["message"]


def test_more_vectors_than_a_header_describes_are_refused_by_name(server):
    error = embed(server, 400, input=["a"] * 2000, encoding_format="bytes")["error"]
    assert "bytes_only" in error["message"]
    assert server.stats().running == 0


def test_dimensions_cut_and_normalize_again(nested):
    (found,) = vectors(embed(nested, input="hello", dimensions=5))
    assert np.allclose(found, want(nested, "hello", 5), atol=1e-7)
    error = embed(nested, 400, input="hello", dimensions=VECTOR_SIZE + 1)["error"]
    assert error["param"] == "dimensions"


def test_dimensions_of_a_model_that_was_not_trained_for_them_are_refused(server):
    error = embed(server, 400, input="hello", dimensions=5)["error"]
    assert error["param"] == "dimensions"
    assert "does not support Matryoshka embeddings" in error["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": ["a", "", "b"]}, "input[1] must not be empty"),
        ({"input": ""}, "input must not be empty"),
        ({"input": []}, "1 to 2048 items, got 0"),
        ({"input": ["a"] * 2049}, "1 to 2048 items, got 2049"),
        ({"input": [[1, 2], []]}, "input[1] must not be empty"),
        ({"input": [[1, 2], [10**6]]}, "input[1]"),
        ({"input": ["a", "b" * MAX_LEN * 2]}, "input[1]: This model's maximum context length is"),
        ({"input": "a", "messages": []}, "not both"),
        ({}, "give input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "truncation_side": "middle"}, "truncation_side"),
        ({"input": "a", "prompt_name": "answer"}, "'query'"),
        ({"input": "a", "late_chunking": True}, "late_chunking"),
        ({"input": [{"image": "data:image/png;base64,"}]}, "input[0]"),
        ({"input": "a", "model": "other"}, "no model 'other'"),
    ],
)
def test_a_bad_request_names_its_field_and_item(server, body, words):
    status = 404 if "model" in body else 400
    assert words in embed(server, status, **body)["error"]["message"]
    assert server.stats().running == 0


def test_what_is_too_long_is_cut_only_if_the_request_says_so(server):
    text = "ab" * MAX_LEN
    ids = server.tokenizer.encode(text)
    kept = {"left": ids[-MAX_LEN:], "right": ids[:MAX_LEN]}
    for side, part in kept.items():
        answer = embed(server, input=text, truncate_prompt_tokens=-1, truncation_side=side)
        assert np.array_equal(vectors(answer)[0], want(server, part))
        assert answer["usage"]["prompt_tokens"] == MAX_LEN
    (found,) = vectors(embed(server, input=text, truncate_prompt_tokens=3, truncation_side="left"))
    assert np.array_equal(found, want(server, ids[-3:]))
    assert embed(server, input=[text, "a"], truncate=True)["usage"]["prompt_tokens"] == MAX_LEN + 1


def test_the_name_of_a_prompt_selects_its_prefix(server):
    for body in ({"prompt_name": "query"}, {"input_type": "search_query"}, {"task": "query"}):
        (found,) = vectors(embed(server, input="hello", **body))
        assert np.array_equal(found, want(server, "Query: hello"))
    body = {"input": "hello", "task": "search_document"}
    got = httpx.post(f"{server.url}/v1/embeddings", json=body)
    assert got.headers["X-Quire-Ignored"] == "task"
    assert np.array_equal(vectors(got.json())[0], want(server, "hello"))


def test_jina_and_voyage_bodies_are_answered(server):
    answer = embed(
        server,
        model="tiny",
        task="retrieval.query",
        input=[{"text": "hello"}],
        normalized=True,
        embedding_type="base64",
        late_chunking=False,
        truncate=True,
    )
    found = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert np.array_equal(found, want(server, "Query: hello"))
    answer = embed(server, input="hello", output_dtype="ubinary", truncation=True, input_type=None)
    bits = np.unpackbits(np.array(answer["data"][0]["embedding"], np.uint8))
    assert np.array_equal(bits, want(server, "hello") >= 0)


# -- Cohere -----------------------------------------------------------------------------------


def test_the_cohere_client_gets_every_type(server):
    with cohere.ClientV2("none", base_url=server.url) as co:
        types = ["float", "binary", "ubinary", "base64"]
        found = co.embed(
            model="tiny", texts=TEXTS, input_type="search_query", embedding_types=types
        )
    for i, text in enumerate(TEXTS):
        wanted = want(server, f"Query: {text}")
        assert np.array_equal(np.array(found.embeddings.float_[i], np.float32), wanted)
        assert np.array_equal(
            np.frombuffer(base64.b64decode(found.embeddings.base64[i]), "<f4"), wanted
        )
        bits = np.packbits(wanted >= 0)
        assert found.embeddings.ubinary[i] == bits.tolist()
        assert found.embeddings.binary[i] == [one - 128 for one in bits.tolist()]
    assert found.texts == TEXTS
    assert found.response_type == "embeddings_by_type"
    assert found.meta.api_version.version == "2"
    tokens = sum(len(server.tokenizer.encode(f"Query: {text}")) for text in TEXTS)
    assert found.meta.billed_units.input_tokens == tokens


def test_cohere_cuts_unless_it_is_told_not_to(server):
    text = "ab" * MAX_LEN
    ids = server.tokenizer.encode(text)
    kept = {"END": ids[:MAX_LEN], "START": ids[-MAX_LEN:], None: ids[:MAX_LEN]}
    for truncate, part in kept.items():
        answer = embed(server, path="/v2/embed", texts=[text], truncate=truncate)
        found = np.array(answer["embeddings"]["float"][0], np.float32)
        assert np.array_equal(found, want(server, part))
    answer = embed(server, path="/v2/embed", texts=[text], max_tokens=4)
    assert answer["meta"]["billed_units"]["input_tokens"] == 4
    error = embed(server, 400, "/v2/embed", texts=["a", text], truncate="NONE")["error"]
    assert "texts[1]" in error["message"]


def test_a_cohere_body_has_one_kind_of_input(server):
    answer = embed(
        server, path="/v2/embed", inputs=[{"content": [{"type": "text", "text": "hello"}]}]
    )
    assert np.array_equal(
        np.array(answer["embeddings"]["float"][0], np.float32), want(server, "hello")
    )
    assert answer["texts"] == ["hello"]
    for body in ({}, {"texts": []}, {"texts": ["a"], "inputs": [{"content": []}]}):
        assert "one of texts" in embed(server, 400, "/v2/embed", **body)["error"]["message"]
    image = [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    assert embed(server, 400, "/v2/embed", inputs=image)["error"]["param"].startswith("inputs")
    error = embed(server, 501, "/v2/embed", texts=["a"], embedding_types=["int8"])["error"]
    assert "int8" in error["message"]


def test_bits_need_a_dimension_that_8_divides(nested):
    body = {"texts": ["a"], "embedding_types": ["binary"], "output_dimension": 12}
    assert "8" in embed(nested, 400, "/v2/embed", **body)["error"]["message"]
    body["output_dimension"] = 8
    assert len(embed(nested, path="/v2/embed", **body)["embeddings"]["binary"][0]) == 1


# -- requests to the engine -------------------------------------------------------------------


def test_ids_of_clients_may_be_used_twice_at_a_time(tokenizer):
    with Server(tokenizer, step_s=0.02).running() as server:
        answers = [None] * 4

        def ask(i):
            headers = {"X-Request-Id": "mine"}
            answers[i] = embed(server, input=[f"text {i}"] * 3, headers=headers)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        for i, answer in enumerate(answers):
            assert answer["id"] == "embd-mine"
            for found in vectors(answer):
                assert np.array_equal(found, want(server, f"text {i}"))


def test_a_client_that_leaves_ends_all_items(tokenizer):
    with Server(tokenizer, step_s=0.01, seqs=2).running() as server:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{server.url}/v1/embeddings", json={"input": ["a text"] * 500}, timeout=0.3)
        stats = server.wait_idle()
        assert stats.running == 0
        assert server.executor.pooled < 500


def test_one_bad_item_ends_its_request_and_no_other(tokenizer):
    with Server(tokenizer, step_s=0.005).running() as server:
        server.executor.unpoolable = tuple(tokenizer.encode("bad"))
        answers = []
        other = threading.Thread(target=lambda: answers.append(embed(server, input=["good"] * 200)))
        other.start()
        error = embed(server, 500, input=["good", "bad", *["good"] * 50])["error"]
        assert "item 1" in error["message"]
        other.join()
        assert len(vectors(answers[0])) == 200
        server.wait_idle()


def test_each_item_counts_for_the_limits_of_a_key_and_of_the_queue(tokenizer, tmp_path):
    keys = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"k").hexdigest()
    keys.write_text(json.dumps({"keys": [{"name": "a", "sha256": digest, "max_requests": 3}]}))
    options = ServerOptions(api_key_file=str(keys))
    with Server(tokenizer, options=options).running() as server:
        headers = {"Authorization": "Bearer k"}
        assert len(embed(server, input=["a", "b", "c"], headers=headers)["data"]) == 3
        error = embed(server, 400, input=["a", "b", "c", "d"], headers=headers)["error"]
        assert "at most 3" in error["message"] or "3 requests" in error["message"]
        assert embed(server, 401, input="a")["error"]["code"] == 401


def test_what_was_done_is_counted_by_the_names_of_dashboards(tokenizer):
    with Server(tokenizer).running() as server:
        embed(server, input=["hello", "you"])
        found = {
            (sample.name, sample.labels.get("finished_reason")): sample.value
            for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
            for sample in family.samples
        }
    for prefix in ("quire", "vllm"):
        assert found[f"{prefix}:prompt_tokens_total", None] == 8
        assert found[f"{prefix}:request_success_total", "stop"] == 2
        assert found[f"{prefix}:request_prompt_tokens_sum", None] == 8
        assert found[f"{prefix}:e2e_request_latency_seconds_count", None] == 2
        assert found[f"{prefix}:request_prefill_time_seconds_count", None] == 2
        assert found[f"{prefix}:generation_tokens_total", None] == 0
        assert found[f"{prefix}:time_to_first_token_seconds_count", None] == 0


def test_the_log_has_a_line_for_a_body(tokenizer, caplog):
    options = ServerOptions(enable_log_requests=True)
    with (
        caplog.at_level(logging.INFO, logger="quire"),
        Server(tokenizer, options=options).running() as server,
    ):
        embed(server, input=["hello", "you"], headers={"X-Request-Id": "mine"})
    (line,) = [
        r.getMessage() for r in caplog.records if r.name == "quire.server.telemetry.request_log"
    ]
    assert line.startswith("request embd-mine: 2 inputs, 8 prompt tokens")
    assert "hello" not in line


def test_times_sum_to_the_whole(server):
    timing = embed(server, input="hello", x_timing=True)["x_timing"]
    causes = [value for name, value in timing.items() if name.endswith("_s") and name != "total_s"]
    assert sum(causes) == pytest.approx(timing["total_s"], abs=1e-4)
    assert "x_timing" not in embed(server, input="hello")


def test_a_request_ends_by_its_id_and_by_its_deadline(tokenizer):
    with Server(tokenizer, step_s=0.02, seqs=1).running() as server:
        error = embed(server, 408, input=["a"] * 500, headers={"X-Request-Timeout": "0.2"})
        assert "X-Request-Timeout" in error["error"]["message"]
        server.wait_idle()
        statuses = []

        def ask():
            body = {"input": ["a"] * 500}
            got = httpx.post(
                f"{server.url}/v1/embeddings", json=body, headers={"X-Request-Id": "mine"}
            )
            statuses.append(got.status_code)

        waiting = threading.Thread(target=ask)
        waiting.start()
        deadline = time.monotonic() + 60
        while not server.stats().waiting and time.monotonic() < deadline:
            time.sleep(0.005)
        assert httpx.delete(f"{server.url}/v1/requests/embd-mine").status_code == 200
        waiting.join()
        assert statuses == [499]
        server.wait_idle()


def test_ignored_fields_are_named_and_a_strict_server_refuses_them(server, tokenizer):
    body = {"input": "a", "user": "me", "dimension": 3}
    got = httpx.post(f"{server.url}/v1/embeddings", json=body)
    assert got.headers["X-Quire-Ignored"] == "user,dimension"
    with Server(tokenizer, options=ServerOptions(strict=True)).running() as strict:
        error = embed(strict, 400, **body)["error"]
        assert "did you mean 'dimensions'" in error["message"]


def test_a_model_that_only_classifies_names_the_route_that_serves_it(tokenizer):
    with (
        Server(tokenizer, pooling=CLASSIFIES, generates=False).running() as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="n", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="/classify"):
            client.embeddings.create(model="tiny", input="a")
        messages = [{"role": "user", "content": "a"}]
        with pytest.raises(openai.BadRequestError, match="/classify"):
            client.chat.completions.create(model="tiny", messages=messages)


def test_a_model_that_only_generates_names_its_routes(tokenizer):
    with Server(tokenizer, pooling=None).running() as server:
        message = embed(server, 400, input="a")["error"]["message"]
        assert "/v1/chat/completions" in message
        assert "--runner pooling" in message
