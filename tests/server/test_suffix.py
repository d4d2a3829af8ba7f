"""Completions between a prompt and a suffix, with all that makes several answers of one prompt."""

import json

import httpx
import pytest

from quire.text.fill_in_middle import FORMATS
from tests.server.harness import Server, make_tokenizer
from tests.server.test_beams import LENGTH, WIDTH, found

FORM = FORMATS[0]


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    """A server whose vocabulary has the marks of a family."""
    marks = (FORM.prefix, FORM.suffix, FORM.middle)
    with Server(make_tokenizer(tmp_path_factory.mktemp("coder"), marks)).running() as running:
        yield running
        running.wait_idle()


def between(server, prefix, suffix):
    """The ids of the prompt."""
    text = f"{FORM.prefix}{prefix}{FORM.suffix}{suffix}{FORM.middle}"
    return server.tokenizer.encode(text, add_special_tokens=False)


def post(server, **body):
    got = httpx.post(
        f"{server.url}/v1/completions",
        json={"suffix": "end", "max_tokens": 200, **body},
        timeout=60,
    )
    assert got.status_code == 200, got.text
    return got


def test_several_answers_and_prompts_have_the_suffix_each(coder):
    got = post(coder, prompt=["a", "b"], n=2).json()
    prompts = [between(coder, one, "end") for one in "ab"]
    want = [coder.model.text(one, i) for one in prompts for i in range(2)]
    assert [one["text"] for one in got["choices"]] == want
    assert [one["index"] for one in got["choices"]] == [0, 1, 2, 3]
    assert got["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_streamed_answers_have_the_suffix_each(coder):
    events = [line.removeprefix("data: ") for line in post(
        coder, prompt="a", n=2, stream=True
    ).text.splitlines() if line]  # fmt: skip
    texts = ["", ""]
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["text"]
    prompt = between(coder, "a", "end")
    assert texts == [coder.model.text(prompt, i) for i in range(2)]


def test_the_best_of_several_has_the_suffix(coder):
    got = post(coder, prompt="a", best_of=3, n=1, temperature=1).json()
    prompt = between(coder, "a", "end")
    assert got["choices"][0]["text"] in [coder.model.text(prompt, i) for i in range(3)]


def test_beams_are_searched_between_prompt_and_suffix(coder):
    body = {"use_beam_search": True, "n": WIDTH, "max_tokens": LENGTH}
    got = post(coder, prompt=["a", "b"], **body).json()
    want = [text for one in "ab" for text in found(coder, between(coder, one, "end"))]
    assert [one["text"] for one in got["choices"]] == want
    ids = list(coder.tokenizer.encode("a", add_special_tokens=False))
    one = post(coder, prompt=ids, **body).json()
    assert [choice["text"] for choice in one["choices"]] == want[:WIDTH]
