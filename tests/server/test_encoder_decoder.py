"""A server of an encoder-decoder model: `prompt` is what the encoder reads."""

import json

import httpx
import pytest

from tests.cpu.encoder_decoder.seq2seq import BART, EOS, generate, source_of, write_model
from tests.server.running import serving

SOURCES = [source_of(length) for length in (5, 17, 30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bart")


@pytest.fixture(scope="module")
def theirs(folder):
    return write_model(folder, BART)


@pytest.fixture(scope="module")
def http(folder, theirs):
    options = "--dtype float32 --num-gpu-blocks-override 100 --enable-force-include-usage"
    with (
        serving(str(folder), *options.split()) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        yield client


def complete(http, **body):
    return http.post("/v1/completions", json={"temperature": 0, "max_tokens": 8, **body})


@pytest.mark.slow("starts a server")
class TestCompletions:
    def test_the_prompt_is_the_encoder_s(self, http, theirs):
        body = complete(http, prompt=SOURCES, return_token_ids=True).json()
        for source, choice in zip(SOURCES, body["choices"], strict=True):
            assert choice["token_ids"] == generate(theirs, source, 8)[0]
            assert choice["prompt_token_ids"] == [EOS]
            assert choice["finish_reason"] == "stop"
        assert body["usage"]["prompt_tokens"] == sum(len(one) + 1 for one in SOURCES)

    def test_a_text_is_tokenized_for_the_encoder(self, http, theirs):
        body = complete(http, prompt="w9 w8 w7", return_token_ids=True).json()
        assert body["choices"][0]["token_ids"] == generate(theirs, [9, 8, 7, EOS], 8)[0]
        assert body["usage"]["prompt_tokens"] == 5

    def test_an_answer_streams(self, http):
        long = {"prompt": "w9 w8 w7", "max_tokens": 48, "ignore_eos": True, "temperature": 0}
        whole = complete(http, **long).json()["choices"][0]["text"]
        body = {**long, "stream": True}
        for _ in range(5):  # a busy machine may send in one piece what was written in several
            found = []
            with http.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        found += [c["text"] for c in json.loads(line[6:])["choices"]]
            assert "".join(found) == whole
            if len(found) > 1:
                break
        assert len(found) > 1

    def test_samples_and_beams(self, http, theirs):
        body = complete(http, prompt=SOURCES[1], n=3, temperature=1.0, seed=1).json()
        assert len(body["choices"]) == 3
        body = complete(
            http, prompt=SOURCES[1], n=4, use_beam_search=True, return_token_ids=True
        ).json()
        assert len(body["choices"]) == 4
        assert all(choice["token_ids"][-1] == EOS for choice in body["choices"])

    @pytest.mark.parametrize(
        ("body", "words", "status"),
        [
            ({"prompt": "w9", "echo": True}, "echo", 501),
            ({"prompt": "w9", "suffix": "w8"}, "suffix", 501),
            ({"prompt": [5] * 129}, "this model's encoder takes 128", 400),
            ({"prompt": []}, "prompt", 400),
        ],
    )
    def test_what_it_cannot_do_is_refused(self, http, body, words, status):
        answer = complete(http, **body)
        assert answer.status_code == status
        assert words in answer.json()["error"]["message"]

    def test_a_chat_is_refused_without_a_template(self, http):
        messages = [{"role": "user", "content": "w9"}]
        answer = http.post("/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]

    def test_metrics_and_health_go_on(self, http):
        assert http.get("/health").status_code == 200
        assert "request_prompt_tokens" in http.get("/metrics").text
