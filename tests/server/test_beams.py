"""Beam search over HTTP says what the search itself finds, and leaves nothing behind."""

import asyncio
import json

import pytest

from quire.core.params import BeamSearchParams
from quire.core.types import Request, StopConditions
from quire.engine.client.beam_search import BeamSearch
from tests.server.harness import MAX_LEN, Executor, Server, make_engine
from tests.server.test_disconnects import connect_and_leave

HELLO = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
WIDTH, LENGTH = 3, 5


def found(server, prompt, **fields):
    """The beams of a search without a server."""
    engine = make_engine(Executor(server.model))
    eos = server.tokenizer.eos_token_id
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=LENGTH, **fields)
    room = MAX_LEN - len(prompt)
    search = BeamSearch(
        Request("x", tuple(prompt), StopConditions(LENGTH)),
        params,
        eos_ids=[eos],
        max_new_tokens=room,
        vocab=server.model.vocab,
    )
    while not search.is_finished:
        for request in search.next_requests():
            engine.add(request)
        for parent in search.take_releasable():
            engine.release(parent)
        while search.is_waiting:
            for update in engine.step():
                search.add_update(update)
        search.raise_error()
    return [server.tokenizer.decode(list(beam.tokens)) for beam in search.best_beams()]


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.5])
def test_the_answers_are_the_beams_best_first(http, server, penalty):
    body = {"use_beam_search": True, "n": WIDTH, "max_tokens": LENGTH, "length_penalty": penalty}
    got = http.post(COMPLETE, json={"prompt": "Once", **body}).json()
    want = found(server, server.tokenizer.encode("Once"), length_penalty=penalty)
    assert [one["text"] for one in got["choices"]] == want
    assert [one["index"] for one in got["choices"]] == [0, 1, 2]
    chat = http.post(CHAT, json={"messages": HELLO, **body}).json()
    want = found(server, server.chat_ids(HELLO), length_penalty=penalty)
    assert [one["message"]["content"] for one in chat["choices"]] == want


def test_several_prompts_are_searched_together(http, server):
    body = {"prompt": ["a", "b"], "use_beam_search": True, "n": WIDTH, "max_tokens": LENGTH}
    got = http.post(COMPLETE, json=body).json()
    want = [text for one in "ab" for text in found(server, server.tokenizer.encode(one))]
    assert [one["text"] for one in got["choices"]] == want
    assert [one["index"] for one in got["choices"]] == list(range(6))
    assert got["usage"]["prompt_tokens"] == 2


def test_a_token_that_ends_a_beam_is_among_its_ids_and_not_in_its_text(http, server):
    eos = server.tokenizer.eos_token_id
    body = {"prompt": "x", "use_beam_search": True, "n": 2, "max_tokens": 3,
            "allowed_token_ids": [eos, 65], "return_token_ids": True}  # fmt: skip
    shown = http.post(COMPLETE, json=body).json()["choices"]
    ended = [one for one in shown if one["finish_reason"] == "stop"]
    assert ended
    for one in ended:
        assert one["token_ids"][-1] == eos
        assert one["text"] == server.tokenizer.decode(one["token_ids"][:-1])
    kept = http.post(COMPLETE, json={**body, "include_stop_str_in_output": True}).json()["choices"]
    assert [one["token_ids"] for one in kept] == [one["token_ids"] for one in shown]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", True), ("logprobs", 1), ("stop", "x"), ("best_of", 4), ("top_p", 0.5),
        ("logit_bias", {"5": 1.0}), ("n", 65), ("min_tokens", 2), ("x_timing", True),
        ("allowed_token_ids", [5]),
    ],
)  # fmt: skip
def test_what_a_search_cannot_do_is_refused_by_name(http, field, value):
    body = {"prompt": "a", "n": 2, "use_beam_search": True, field: value}
    got = http.post(COMPLETE, json=body)
    assert got.status_code == 400, got.text
    expected = {"stream": "use_beam_search", "allowed_token_ids": "n"}.get(field, field)
    assert got.json()["error"]["param"] == expected


def test_a_length_penalty_without_a_search_is_refused(http):
    got = http.post(COMPLETE, json={"prompt": "a", "length_penalty": 2.0})
    assert got.json()["error"]["param"] == "length_penalty"
    assert http.post(COMPLETE, json={"prompt": "a", "length_penalty": 1.0}).status_code == 200


def test_a_client_that_leaves_ends_the_search(tokenizer):
    body = {"prompt": "go", "use_beam_search": True, "n": 4, "max_tokens": 400, "ignore_eos": True}
    with Server(tokenizer, step_s=0.001).running() as slow:
        port = int(slow.url.rpartition(":")[2])

        async def main():
            await asyncio.gather(*(connect_and_leave(port, COMPLETE, body, 0) for _ in range(20)))

        asyncio.run(main())
        stats = slow.wait_idle()
        assert stats.held_blocks == 0
        assert slow.client._streams == {}
        assert slow.executor.said < 4 * 400


def test_a_disabled_search_is_no_search(http):
    raw = json.dumps({"prompt": "a", "use_beam_search": False, "stream": True})
    got = http.post(COMPLETE, content=raw, headers={"content-type": "application/json"})
    assert "[DONE]" in got.text
