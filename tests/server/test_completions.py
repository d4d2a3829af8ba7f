import json

import openai
import pytest


def streamed(client, **body):
    texts, finishes, chunks = {}, {}, []
    for chunk in client.completions.create(model="tiny", stream=True, **body):
        chunks.append(chunk)
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                assert choice.index not in finishes
                finishes[choice.index] = choice.finish_reason
    return texts, finishes, chunks


def ids_of(server, text):
    return server.tokenizer.encode(text)


def test_an_answer_has_the_shape_that_the_official_client_reads(client, server):
    got = client.completions.create(model="tiny", prompt="Once", max_tokens=200)
    assert got.id.startswith("cmpl-")
    assert got.object == "text_completion"
    assert got.choices[0].text == server.model.text(ids_of(server, "Once"))
    assert got.choices[0].finish_reason == "stop"
    assert got.usage.prompt_tokens == 4


def test_sixteen_tokens_are_the_default(client):
    got = client.completions.create(model="tiny", prompt="Once", extra_body={"ignore_eos": True})
    assert got.usage.completion_tokens == 16
    assert got.choices[0].finish_reason == "length"


def test_prompts_come_as_text_ids_or_lists_of_either(client, server):
    texts = ["Once", "upon a 汉"]
    ids = [ids_of(server, t) for t in texts]
    want = [server.model.text(i) for i in ids]
    for prompt in (texts, ids):
        got = client.completions.create(model="tiny", prompt=prompt, max_tokens=200)
        assert [c.text for c in got.choices] == want
        assert got.usage.prompt_tokens == sum(map(len, ids))
    for prompt in (texts[0], ids[0]):
        got = client.completions.create(model="tiny", prompt=prompt, max_tokens=200)
        assert [c.text for c in got.choices] == want[:1]


def test_the_index_of_a_choice_is_prompt_times_n_plus_sample(client, server):
    ids = [ids_of(server, t) for t in "ab"]
    got = client.completions.create(model="tiny", prompt=ids, n=2, max_tokens=200)
    assert [c.index for c in got.choices] == [0, 1, 2, 3]
    assert [c.text for c in got.choices] == [server.model.text(i, k) for i in ids for k in range(2)]
    texts, finishes, _ = streamed(client, prompt=ids, n=2, max_tokens=200)
    assert texts == {c.index: c.text for c in got.choices}
    assert finishes == {c.index: c.finish_reason for c in got.choices}


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize(
    "extra",
    [{}, {"stop": ["s", "字"]}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 1}],
)
def test_a_stream_says_what_the_whole_answer_says(client, place, extra):
    body = {"prompt": f"tell {place}: ", "max_tokens": 40, **extra}
    whole = client.completions.create(model="tiny", **body)
    texts, finishes, chunks = streamed(client, **body)
    assert texts == {0: whole.choices[0].text}
    assert finishes == {0: whole.choices[0].finish_reason}
    if "logprobs" in extra:
        found = [one.logprobs for c in chunks for one in c.choices if one.logprobs]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [v for one in found for v in getattr(one, name)]
            assert joined == getattr(whole.choices[0].logprobs, name)


def test_best_of_returns_the_likeliest(client, server):
    ids = ids_of(server, "pick")
    got = client.completions.create(
        model="tiny", prompt="pick", best_of=4, n=2, max_tokens=6, extra_body={"ignore_eos": True}
    )
    # the harness makes odd sequences likelier than even ones
    want = [server.tokenizer.decode(server.model.speech(ids, i)[:6]) for i in (1, 3)]
    assert sorted(c.text for c in got.choices) == sorted(want)
    assert [c.index for c in got.choices] == [0, 1]


def test_best_of_more_than_n_cannot_be_streamed(client):
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(model="tiny", prompt="pick", best_of=4, stream=True)


def test_echo_puts_the_prompt_in_front(client, server):
    plain = client.completions.create(model="tiny", prompt="Once", max_tokens=9)
    echoed = client.completions.create(
        model="tiny", prompt=ids_of(server, "Once"), max_tokens=9, echo=True
    )
    assert echoed.choices[0].text == "Once" + plain.choices[0].text


def test_echo_without_tokens_scores_the_prompt_alone(client):
    got = client.completions.create(
        model="tiny", prompt="a汉b", max_tokens=0, echo=True, logprobs=1
    )
    assert got.choices[0].text == "a汉b"
    assert got.usage.completion_tokens == 0
    scored = got.choices[0].logprobs
    assert len(scored.tokens) == got.usage.prompt_tokens == 5
    assert scored.token_logprobs[0] is None
    assert all(v < 0 for v in scored.token_logprobs[1:])
    assert scored.tokens[0] == "a"


def test_logprobs_have_four_lists_of_one_length(client):
    got = client.completions.create(model="tiny", prompt="Once", logprobs=2, max_tokens=8)
    scored = got.choices[0].logprobs
    sizes = {
        len(x)
        for x in (scored.tokens, scored.token_logprobs, scored.top_logprobs, scored.text_offset)
    }
    assert sizes == {8}
    for token, value, top in zip(scored.tokens, scored.token_logprobs, scored.top_logprobs):
        assert top[token] == value
        assert 1 <= len(top) <= 3  # tokens that are parts of characters may look alike


def test_the_stream_ends_with_usage_and_done(http):
    body = {
        "prompt": ["a", "b"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 3,
    }
    events = http.post("/v1/completions", json=body).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    last = json.loads(events[-3][6:])
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}


def test_prompt_logprobs_are_returned(client):
    got = client.completions.create(
        model="tiny", prompt="abc", max_tokens=2, extra_body={"prompt_logprobs": 1}
    )
    steps = got.choices[0].prompt_logprobs
    assert steps[0] is None
    assert len(steps) == 3
    assert all(
        {"logprob", "rank", "decoded_token"} == set(e) for s in steps[1:] for e in s.values()
    )
