"""Answers with drafts are those without, by the real client, on every route, also after a kill.

`speculative: false` of a request is what a server without drafts answers.
"""

import asyncio
import json

import httpx
import openai
import pytest

from tests.server.running import SMALL, serving
from tests.server.test_survive import Scene, asked, disturbance, kill

METHODS = ["ngram", "suffix"]
CONFIG = {"num_speculative_tokens": 4, "prompt_lookup_max": 2, "adaptive": False}
FLAGS = (
    "--dtype float32 --enable-auto-tool-choice --tool-call-parser auto --log-stats-interval 0.2 "
    "--enable-per-request-metrics --reasoning-parser auto"
)
LIST = "1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3,"
CODE = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TOOL = {"type": "function", "function": {"name": "save", "parameters": SCHEMA}}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
SAVE = 'Call save with {"name": "Ann", "age": 3}, then {"name": "Ann", "age": 3} again.'

COMPLETIONS = {
    "greedy": {"prompt": LIST, "temperature": 0, "ignore_eos": True},
    "seeded": {"prompt": LIST, "temperature": 1.0, "seed": 5, "n": 3, "ignore_eos": True},
    "penalties": {
        "prompt": CODE, "temperature": 0.7, "seed": 1, "repetition_penalty": 1.1,
        "frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": {"40": -2}, "min_p": 0.02,
    },
    "logprobs": {"prompt": LIST, "temperature": 0, "logprobs": 3, "ignore_eos": True},
    "echo": {"prompt": LIST, "temperature": 0, "echo": True, "logprobs": 1, "max_tokens": 20},
    "stop": {"prompt": LIST, "temperature": 0, "stop": [" 7", "6"], "max_tokens": 60},
    "stop kept": {
        "prompt": LIST, "temperature": 0, "stop": ["8, 9"], "include_stop_str_in_output": True,
    },
    "min_tokens": {"prompt": CODE, "temperature": 0, "min_tokens": 30, "stop_token_ids": [11]},
    "bad words": {"prompt": LIST, "temperature": 0, "bad_words": ["4"], "ignore_eos": True},
    "one token": {"prompt": LIST, "temperature": 0, "max_tokens": 1},
    "regex": {"prompt": LIST, "temperature": 0, "guided_regex": "( [0-9],){9}"},
    "best_of": {"prompt": LIST, "temperature": 0.9, "seed": 2, "best_of": 3},
    "beams": {"prompt": LIST, "temperature": 0, "n": 2, "use_beam_search": True, "max_tokens": 12},
}  # fmt: skip
CHATS = {
    "plain": {"content": f"Repeat: {LIST}", "temperature": 0},
    "tools": {"content": SAVE, "tools": [TOOL], "temperature": 0},
    "forced": {"content": SAVE, "tools": [TOOL], "tool_choice": "required", "temperature": 0},
    "json": {"content": SAVE, "response_format": JSON_FORMAT, "temperature": 0.5, "seed": 4},
    "logprobs": {"content": LIST, "logprobs": True, "top_logprobs": 2, "temperature": 0},
}


@pytest.fixture(scope="module")
def lines():
    return []


@pytest.fixture(scope="module", params=METHODS)
def running(request, lines):
    config = json.dumps({"method": request.param, **CONFIG})
    with serving("embedded", *SMALL, *FLAGS.split(), "-sc", config) as made:
        made.read_log(lines)
        yield made


@pytest.fixture
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def accepted(running):
    """Drafts, drafted tokens and accepted tokens by position, by the metrics of the server."""
    text = httpx.get(f"{running.url}/metrics").text
    found = {}
    for line in text.splitlines():
        if line.startswith("vllm:spec_decode_"):
            name, value = line.rsplit(" ", 1)
            position = name.partition('position="')[2].partition('"')[0]
            found[name.partition("{")[0].removeprefix("vllm:spec_decode_"), position] = float(value)
    return found


def told(choice):
    """What a choice says, without what is new each time."""
    found = choice.model_dump()
    for call in (found.get("message") or {}).get("tool_calls") or ():
        call.pop("id")
    return found


def on_and_off(create, **body):
    """Whole answers with drafts and without, and the streams' text, by choice."""
    extra = body.pop("extra_body", {})
    answers, streams = [], []
    for switch in (True, False):
        sent = {**body, "extra_body": {**extra, "speculative": switch}}
        answers.append(create(model="embedded", **sent))
        if extra.get("use_beam_search") or extra.get("best_of"):
            continue
        usage = {"include_usage": True}
        streams.append(list(create(model="embedded", stream=True, stream_options=usage, **sent)))
    return answers, streams


OWN = (
    *("prompt", "temperature", "n", "seed", "logprobs", "echo", "stop", "max_tokens"),
    *("logit_bias", "frequency_penalty", "presence_penalty"),
)


@pytest.mark.sampled(2)
@pytest.mark.slow("two servers, each with a model")
@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_completion_is_the_same(client, name):
    body = {"max_tokens": 40, **COMPLETIONS[name]}
    extra = {key: body.pop(key) for key in [*body] if key not in OWN}
    (on, off), streams = on_and_off(client.completions.create, extra_body=extra, **body)
    assert [told(one) for one in on.choices] == [told(one) for one in off.choices]
    assert on.usage.completion_tokens == off.usage.completion_tokens
    for stream, whole in zip(streams, (on, off)):
        assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens
        texts = dict.fromkeys(range(len(whole.choices)), "")
        probabilities = []
        for chunk in stream:
            for one in chunk.choices:
                texts[one.index] += one.text
                if one.logprobs is not None:
                    probabilities += one.logprobs.token_logprobs
        assert [*texts.values()] == [one.text for one in whole.choices]
        if whole.choices[0].logprobs is not None:
            assert probabilities == whole.choices[0].logprobs.token_logprobs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_the_same(client, name):
    body = dict(CHATS[name])
    messages = [{"role": "user", "content": body.pop("content")}]
    (on, off), streams = on_and_off(
        client.chat.completions.create, messages=messages, max_tokens=60, **body
    )
    assert [told(one) for one in on.choices] == [told(one) for one in off.choices]
    assert on.usage == off.usage
    for stream in streams:
        deltas = [one.delta for chunk in stream for one in chunk.choices]
        assert "".join(one.content or "" for one in deltas) == (on.choices[0].message.content or "")
        calls = [call for one in deltas for call in one.tool_calls or ()]
        shown = "".join(call.function.arguments or "" for call in calls)
        whole = on.choices[0].message.tool_calls or []
        assert shown == "".join(one.function.arguments for one in whole)


def test_a_prediction_makes_an_answer_of_fewer_steps(client, running):
    messages = [{"role": "user", "content": "Tell me about cats."}]
    body = {"model": "embedded", "messages": messages, "max_tokens": 60, "temperature": 0}
    plain = client.chat.completions.create(**body, extra_body={"speculative": False})
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details is None or (
        plain.usage.completion_tokens_details.accepted_prediction_tokens is None
    )
    for content in (
        text,
        [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}],
    ):
        predicted = {"type": "content", "content": content}
        found = client.chat.completions.create(**body, prediction=predicted)
        assert found.choices[0].message.content == text
        details = found.usage.completion_tokens_details
        tokens = found.usage.completion_tokens
        assert tokens / 4 < details.accepted_prediction_tokens < tokens  # it thinks first
    usage = {"include_usage": True}
    *_, last = client.chat.completions.create(
        **body, prediction=predicted, stream=True, stream_options=usage
    )
    assert last.usage.completion_tokens_details == details
    off = client.chat.completions.create(
        **body, prediction=predicted, extra_body={"vllm_xargs": {"speculative": False}}
    )
    assert off.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_a_predicted_completion_needs_few_steps(client):
    body = {"model": "embedded", "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}
    plain = client.completions.create(**body, extra_body={"speculative": False})
    predicted = {"type": "content", "content": plain.choices[0].text}
    found = client.completions.create(**body, extra_body={"prediction": predicted})
    assert found.choices == plain.choices
    steps = found.model_extra["metrics"]["speculative_decoding"]
    assert steps["mean_acceptance_length"] > 4
    details = found.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == steps["num_accepted_draft_tokens"] > 20


def test_other_routes_take_a_prediction(client, running):
    body = {"model": "embedded", "input": "Tell me about cats.", "temperature": 0}
    body |= {"max_output_tokens": 40}
    plain = client.responses.create(**body, extra_body={"speculative": False})
    predicted = {"type": "content", "content": plain.output_text}
    found = client.responses.create(**body, extra_body={"prediction": predicted})
    assert found.output_text == plain.output_text
    assert found.usage.output_tokens_details.accepted_prediction_tokens > 10
    message = {
        "model": "embedded", "max_tokens": 40, "temperature": 0,
        "messages": [{"role": "user", "content": "Tell me about cats."}],
    }  # fmt: skip
    before = accepted(running)["num_accepted_tokens_total", ""]
    texts = [
        httpx.post(f"{running.url}/v1/messages", json=message | more, timeout=60).json()["content"]
        for more in ({"speculative": False}, {"prediction": predicted})
    ]
    assert texts[0] == texts[1]
    assert accepted(running)["num_accepted_tokens_total", ""] > before + 10


def test_metrics_and_log_agree_with_the_answers(client, running, lines):
    before, figures = accepted(running), []
    for name in ("greedy", "logprobs"):
        body = {"max_tokens": 40, **COMPLETIONS[name], "model": "embedded"}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).json()
        figures.append(answer["metrics"]["speculative_decoding"])
    after = accepted(running)
    grown = {key: value - before.get(key, 0) for key, value in after.items()}
    for name, field in (
        ("num_drafts_total", "num_spec_steps"),
        ("num_draft_tokens_total", "num_draft_tokens"),
        ("num_accepted_tokens_total", "num_accepted_draft_tokens"),
    ):
        assert grown[name, ""] == sum(one[field] for one in figures) > 0
    positions = [
        grown["num_accepted_tokens_per_pos_total", str(i)]
        for i in range(CONFIG["num_speculative_tokens"])
    ]
    assert sum(positions) == grown["num_accepted_tokens_total", ""]
    assert positions == sorted(positions, reverse=True)
    for one in figures:
        histogram = one["acceptance_histogram"]
        assert sum(histogram) == one["num_spec_steps"]
        counted = sum(i * number for i, number in enumerate(histogram))
        assert counted == one["num_accepted_draft_tokens"]
    off = {**body, "speculative": False}
    answer = httpx.post(f"{running.url}/v1/completions", json=off, timeout=60).json()
    assert answer["metrics"]["speculative_decoding"] is None
    assert accepted(running) == after
    assert any("SpecDecoding metrics: Mean acceptance length: " in line for line in lines)


@pytest.mark.sampled(2)
@pytest.mark.slow("an engine is killed and starts again")
def test_streams_say_the_same_when_their_engine_is_killed(running):
    bodies = [one for one in map(asked, range(16)) if "prompt_embeds" not in one]
    want, _ = asyncio.run(Scene(running.url).all([{**one, "speculative": False} for one in bodies]))
    found, seconds = asyncio.run(
        Scene(running.url).all(bodies, disturbance(running, kill, after=100))
    )
    assert seconds is not None
    for one, other, body in zip(found, want, bodies):
        assert one == other, body
