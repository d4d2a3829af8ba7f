"""Prompts as embeddings over HTTP, with the official client: answers are those of the tokens."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import quire
from tests.clients.conftest import KEY, MODEL

FILE = Path(quire.__file__).parent / "embedded/model.safetensors"
IDS = [70 + 13 * i % 900 for i in range(40)]
ASKED = {"model": MODEL, "max_tokens": 12, "temperature": 0, "logprobs": 2}


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served.v1, api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def table():
    return load_file(FILE)["model.embed_tokens.weight"]


def saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def seen(choice):
    return choice.text, choice.finish_reason, choice.logprobs.token_logprobs


def test_vectors_are_answered_as_their_tokens(client, table):
    tokens = client.completions.create(**ASKED, prompt=IDS)
    vectors = table[IDS]
    for dtype in (torch.bfloat16, torch.float32):
        extra = {"prompt_embeds": saved(vectors.to(dtype)), "return_token_ids": True}
        answer = client.completions.create(**ASKED, prompt="", extra_body=extra)
        assert seen(answer.choices[0]) == seen(tokens.choices[0])
        assert answer.choices[0].prompt_token_ids == [0] * 40
        assert answer.usage.prompt_tokens == 40
        chunks = client.completions.create(**ASKED, prompt="", extra_body=extra, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == tokens.choices[0].text
    assert answer.usage.prompt_tokens_details is None or (
        answer.usage.prompt_tokens_details.cached_tokens == 32
    )


def test_choices_of_vectors_come_before_those_of_texts(client, table):
    texts = ["The capital of France is", "Once upon a time"]
    tokenizer = Tokenizer.from_file(str(FILE.with_name("tokenizer.json")))
    rows = [tokenizer.encode(one).ids for one in ("Tell me a joke about", "What is 31 + 44?")]
    asked = ASKED | {"temperature": 0.9, "seed": 5, "n": 2}
    want = [client.completions.create(**asked, prompt=one).choices for one in [*rows, *texts]]
    extra = {"prompt_embeds": [saved(table[one]) for one in rows]}
    answer = client.completions.create(**asked, prompt=texts, extra_body=extra)
    assert [one.index for one in answer.choices] == list(range(8))
    assert [seen(one) for one in answer.choices] == [seen(one) for two in want for one in two]
    assert answer.usage.prompt_tokens == sum(
        client.completions.create(**ASKED, prompt=one).usage.prompt_tokens
        for one in [*rows, *texts]
    )


ROWS = torch.ones(4, 256)
REFUSED = {
    "no base64": ({"prompt_embeds": "!!"}, "prompt_embeds must be base64"),
    "no archive": ({"prompt_embeds": "AAAA"}, "is no archive of torch.save"),
    "a sparse tensor": ({"prompt_embeds": saved(ROWS.to_sparse())}, "_rebuild_sparse_tensor"),
    "another width": ({"prompt_embeds": saved(torch.ones(4, 255))}, "256 numbers.*got 255"),
    "three axes": ({"prompt_embeds": saved(torch.ones(2, 4, 256))}, r"got \[2, 4, 256\]"),
    "NaN": ({"prompt_embeds": saved(ROWS * torch.nan)}, r"has nan at \[0, 0\]"),
    "no row": ({"prompt_embeds": saved(ROWS[:0])}, "has no rows"),
    "too long": (
        {"prompt_embeds": saved(torch.ones(4096, 256))},
        "maximum context length is 4096 tokens.*4096 tokens",
    ),
    "too large": ({"prompt_embeds": "A" * 12_000_000}, "9000000 bytes.*at most 8454144"),
    "echo": ({"prompt_embeds": saved(ROWS), "echo": True}, "echo"),
    "suffix": ({"prompt_embeds": saved(ROWS), "suffix": "x"}, "suffix"),
    "beams": ({"prompt_embeds": saved(ROWS), "use_beam_search": True, "n": 2}, "use_beam_search"),
    "prompt logprobs": ({"prompt_embeds": saved(ROWS), "prompt_logprobs": 1}, "prompt_logprobs"),
    "nothing": ({"prompt_embeds": None, "prompt": None}, "give prompt .* or prompt_embeds"),
    "too many": ({"prompt_embeds": ["AAAA"] * 1025}, "1024"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_a_400(client, name):
    extra, problem = REFUSED[name]
    asked = {name: value for name, value in ASKED.items() if name != "logprobs"}
    with pytest.raises(openai.BadRequestError, match=problem):
        client.completions.create(**asked, prompt="", extra_body=extra)


def test_many_at_once_are_answered_or_refused(served, table):
    bodies = [saved(table[IDS[i:]] if i % 4 else ROWS.to_sparse()) for i in range(24)]

    def post(embeds):
        body = {"prompt_embeds": embeds, "max_tokens": 3}
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(f"{served.v1}/completions", json=body, headers=headers, timeout=60)

    with ThreadPoolExecutor(24) as pool:
        found = [answer.status_code for answer in pool.map(post, bodies)]
    assert found == [200 if i % 4 else 400 for i in range(24)]
