import itertools
import json

import pytest

PROMPT = "Once upon a time"


def answer(server, index=0):
    ids = server.tokenizer.encode(PROMPT, add_special_tokens=True)
    return server.model.text(ids, index)


def test_the_prompt_stands_before_each_answer(http, server):
    got = http.post("/generate", json={"prompt": PROMPT, "n": 2, "max_tokens": 200})
    assert got.status_code == 200
    assert got.json() == {"text": [PROMPT + answer(server, i) for i in range(2)]}


def test_sixteen_tokens_are_made_unless_more_are_asked_for(http, server):
    (got,) = http.post("/generate", json={"prompt": PROMPT}).json()["text"]
    ids = server.tokenizer.encode(got.removeprefix(PROMPT), add_special_tokens=False)
    assert len(ids) <= 16
    assert answer(server).startswith(got.removeprefix(PROMPT).rstrip("\ufffd"))


def test_each_line_of_a_stream_has_all_that_was_said(http, server):
    body = {"prompt": PROMPT, "n": 2, "max_tokens": 200, "stream": True}
    with http.stream("POST", "/generate", json=body) as response:
        lines = [json.loads(line) for line in response.iter_lines()]
    assert len(lines) >= 1
    assert lines[-1] == {"text": [PROMPT + answer(server, i) for i in range(2)]}
    for before, after in itertools.pairwise(lines):
        assert all(new.startswith(old) for old, new in zip(before["text"], after["text"]))


def test_fields_of_sampling_parameters_are_honoured(http, server):
    stop = answer(server)[3:6]
    body = {"prompt": PROMPT, "stop": stop, "max_tokens": 200, "include_stop_str_in_output": True}
    (got,) = http.post("/generate", json=body).json()["text"]
    assert got.endswith(stop)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": 3}, 400, "prompt"),
        ({}, 400, "prompt"),
        ({"prompt": PROMPT, "logprobs": 2}, 400, "logprobs"),
        ({"prompt": PROMPT, "temperature": -1}, 400, "temperature"),
        ({"prompt": PROMPT, "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": PROMPT, "structured_outputs": {"regexp": "a"}}, 400, "structured_outputs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(http, body, status, param):
    got = http.post("/generate", json=body)
    assert got.status_code == status, got.text
    assert got.json()["error"]["param"] == param


def test_a_client_that_goes_away_ends_its_request(server, http):
    body = {"prompt": PROMPT, "stream": True, "ignore_eos": True, "max_tokens": 400}
    with http.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())
    server.wait_idle()
