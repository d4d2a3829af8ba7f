"""The seam for models that think and call tools: whatever a splitter says reaches the client."""

import json

import pytest

from quire.server.generation import output_parsers
from quire.server.generation.events import DeltaToolCall, ParsedDelta

HELLO = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


class FirstWordIsThought:
    """Up to the first space: reasoning; then content; at the end a call with what was said."""

    notes = ()

    def __init__(self):
        self._all = ""
        self.reasoning_tokens = 0

    def push(self, text, token_ids, *, last):
        before, self._all = self._all, self._all + text
        said = []
        if " " in before:
            said.append(ParsedDelta(text))
        else:
            thought, space, rest = text.partition(" ")
            said.append(ParsedDelta(reasoning=thought + space))
            self.reasoning_tokens += len(token_ids)
            if rest:
                said.append(ParsedDelta(rest))
        if last:
            half = len(self._all) // 2
            said.append(ParsedDelta(tool_call=DeltaToolCall(0, "call-1", "say", self._all[:half])))
            said.append(ParsedDelta(tool_call=DeltaToolCall(0, arguments=self._all[half:])))
        return said

    def finish(self, reason):
        return "tool_calls"


@pytest.fixture
def thinking(monkeypatch):
    def parsers(plan, tails, n):
        return [FirstWordIsThought() for _ in range(n * len(tails))]

    monkeypatch.setattr(output_parsers, "build_output_parsers", parsers)


def expected(server, index=0):
    text = server.answer(HELLO, index)
    thought, _, rest = text.partition(" ")
    return thought + " ", rest, text


@pytest.mark.usefixtures("thinking")
def test_a_whole_answer_has_reasoning_content_and_calls(http, server):
    body = http.post(CHAT, json={"messages": HELLO, "n": 2, "return_token_ids": True}).json()
    for index, choice in enumerate(body["choices"]):
        thought, rest, text = expected(server, index)
        message = choice["message"]
        assert message["reasoning"] == message["reasoning_content"] == thought
        assert message["content"] == rest
        (call,) = message["tool_calls"]
        assert (call["id"], call["type"]) == ("call-1", "function")
        assert call["function"] == {"name": "say", "arguments": text}
        assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"return_token_ids": True}])
def test_a_stream_says_the_same_in_pieces(http, server, more):
    raw = http.post(CHAT, json={"messages": HELLO, "stream": True, **more}).text
    chunks = [json.loads(e[6:]) for e in raw.split("\n\n") if e.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    thought, rest, text = expected(server)
    assert "".join(d.get("reasoning", "") for d in deltas) == thought
    assert "".join(d.get("reasoning_content", "") for d in deltas) == thought
    assert "".join(d.get("content", "") for d in deltas) == rest
    calls = [call for d in deltas for call in d.get("tool_calls", [])]
    assert [call.get("id") for call in calls] == ["call-1", None]
    assert "".join(call["function"]["arguments"] for call in calls) == text
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]
    whole = http.post(CHAT, json={"messages": HELLO, **more}).json()["choices"][0]
    if "logprobs" in more:
        shown = [c["choices"][0]["logprobs"] for c in chunks]
        assert [e for one in shown if one for e in one["content"]] == whole["logprobs"]["content"]
    if "return_token_ids" in more:
        ids = [i for c in chunks for i in c["choices"][0].get("token_ids", [])]
        assert ids == whole["token_ids"]


class Content:
    """Text is content."""

    reasoning_tokens = None
    notes = ()

    def push(self, text, token_ids, *, last):
        return (ParsedDelta(text),)

    def finish(self, reason):
        return reason


def test_a_plain_splitter_changes_nothing(http, server, monkeypatch):
    monkeypatch.setattr(
        output_parsers,
        "build_output_parsers",
        lambda plan, tails, n: [Content()] * n,
    )
    got = http.post(CHAT, json={"messages": HELLO, "stop": ["s"]}).json()["choices"][0]
    text = server.answer(HELLO)
    assert got["message"]["content"] == text.partition("s")[0]
    assert got["finish_reason"] == "stop"
