"""Reasoning and tool calls over HTTP: what a model writes is told apart in every dialect, streamed
as unstreamed, and only where it may be.
"""

import json

import httpx
import pytest

from quire.cli.serve_flags import parse
from quire.config.vllm_options import NO_EFFECT
from quire.errors import ConfigError
from quire.server.options import ServerOptions
from quire.text.output.answer_parser import ParserOptions, build_answer_parser_factory
from tests.server.harness import EOS, Reciter, Server

HELLO = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "fg"]
F = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call> ü 汉"}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
ARGUMENTS = {"a": "</tool_call> ü 汉"}
TEXTS = {
    "all": f"<think>\nHm, ü 汉.\n</think>\n\nI will ask.\n{F}\n{G}",
    "none": "Just <b>text</b> & 汉",
    "thought only": "<think>\nHm",
    "one": F,
    "cut": '<think>a</think>b<tool_call>\n{"name": "f", "arguments": {"a": 1',
    "broken": "<think>a</think>b<tool_call>nothing of the kind</tool_call>c",
    "call in thought": f"<think>\nI <tool_call> ask.\n{F}",
    "special": "<think>a<|im_start|>b</think>c<|im_start|>d",
}


class Speaker(Reciter):
    """Says what the last word of the prompt is the name of."""

    def speech(self, prompt, index=0):
        asked = self.tokenizer.decode(prompt).split("user\n")[1].split(EOS)[0].strip()
        return self.tokenizer.encode(TEXTS.get(asked, asked), add_special_tokens=False)


def made(tokenizer, parsers, **options):
    server = Server(
        tokenizer,
        options=ServerOptions(**options),
        services={"answer_parsers": build_answer_parser_factory(parsers, tokenizer, None)},
    )
    server.model = server.executor.model = Speaker(tokenizer)
    return server


@pytest.fixture(scope="module")
def reading(tokenizer):
    with made(tokenizer, ParserOptions("qwen3", "hermes")).running() as running:
        with httpx.Client(base_url=running.url, timeout=60) as http:
            yield http
        running.wait_idle()


def body(text, **more):
    return {"messages": [{"role": "user", "content": text}], "tools": TOOLS, **more}


def whole(http, text, **more):
    answer = http.post(CHAT, json=body(text, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http, text, **more):
    """The message that a stream makes, its finish reason, its notes and its usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    raw = http.post(CHAT, json=body(text, **options, **more)).text
    chunks = [json.loads(e[6:]) for e in raw.split("\n\n") if e.startswith("data: {")]
    message = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    reason = notes = None
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        for name in ("content", "reasoning", "reasoning_content"):
            message[name] += choice["delta"].get(name) or ""
        for news in choice["delta"].get("tool_calls", ()):
            calls = message["tool_calls"]
            if news["index"] == len(calls):
                assert news["id"].startswith("chatcmpl-tool-")
                calls.append({"name": news["function"]["name"], "arguments": ""})
            calls[news["index"]]["arguments"] += news["function"]["arguments"]
        reason = choice["finish_reason"] or reason
        notes = choice.get("x_notes", notes)
    return message, reason, notes, chunks[-1]["usage"]


def flat(choice):
    """The same of a whole answer."""
    message = choice["message"]
    names = ("content", "reasoning", "reasoning_content")
    flattened = {name: message[name] or "" for name in names}
    calls = message.get("tool_calls", [])
    flattened["tool_calls"] = [call["function"] for call in calls]
    return flattened, choice["finish_reason"], choice.get("x_notes")


def test_reasoning_content_and_calls_are_told_apart(reading):
    choice = whole(reading, "all")["choices"][0]
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm, ü 汉."
    assert message["content"] == "I will ask."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert (choice["finish_reason"], choice.get("x_notes")) == ("tool_calls", None)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "more",
    [{}, {"parallel_tool_calls": False}, {"include_reasoning": False}, {"tool_choice": "none"}],
    ids=str,
)
def test_a_stream_says_what_a_whole_answer_says(reading, text, more):
    answer = whole(reading, text, **more)
    message, reason, notes, usage = streamed(reading, text, **more)
    assert (message, reason, notes) == flat(answer["choices"][0])
    assert usage == answer["usage"]


def test_every_length_streams_as_it_answers(reading):
    for most in range(1, 60, 3):
        answer = whole(reading, "all", max_tokens=most)
        message, reason, notes, usage = streamed(reading, "all", max_tokens=most)
        assert (message, reason, notes) == flat(answer["choices"][0]), most
        assert usage == answer["usage"]


def test_tokens_of_reasoning_are_counted(reading, tokenizer):
    answer = whole(reading, "all")
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    thought = "\nHm, ü 汉.\n"
    assert counted == len(tokenizer.encode(thought, add_special_tokens=False))
    none = whole(reading, "none")["usage"]["completion_tokens_details"]
    assert none["reasoning_tokens"] == 0


def test_a_call_ends_reasoning_that_is_not_closed(reading):
    choice = whole(reading, "call in thought")["choices"][0]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("I <tool_call> ask.", None)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    assert choice["finish_reason"] == "tool_calls"
    message = whole(reading, "call in thought", tool_choice="none")["choices"][0]["message"]
    assert message["reasoning"] == TEXTS["call in thought"].removeprefix("<think>\n")


def test_reasoning_without_end_is_content_where_that_is_asked(reading):
    more = {"chat_template_kwargs": {"force_nonempty_content": True}}
    message = whole(reading, "thought only", **more)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, "Hm")


def test_content_is_null_beside_calls_and_reasoning_only(reading):
    assert whole(reading, "one")["choices"][0]["message"]["content"] is None
    assert whole(reading, "thought only")["choices"][0]["message"]["content"] is None
    assert whole(reading, "none")["choices"][0]["message"]["content"] == TEXTS["none"]


def test_markup_that_makes_no_sense_is_content_with_a_note(reading):
    choice = whole(reading, "broken")["choices"][0]
    assert "nothing of the kind" in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["x_notes"]) == 1


def test_a_call_that_is_cut_does_not_finish_as_calls(reading):
    choice = whole(reading, "cut")["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["x_notes"]


def test_only_the_first_call_where_parallel_calls_are_off(reading):
    message = whole(reading, "all", parallel_tool_calls=False)["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


def test_tool_choice_none_and_no_tools_leave_markup_in_the_content(reading):
    for more in ({"tool_choice": "none"}, {"tools": None}):
        choice = whole(reading, "one", **more)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (F, "stop")


def test_reasoning_may_be_left_out_but_not_where_tokens_would_show_it(reading):
    answer = whole(reading, "all", include_reasoning=False)
    assert answer["choices"][0]["message"]["reasoning"] is None
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    for more in ({"logprobs": True}, {"return_token_ids": True}):
        refused = reading.post(CHAT, json=body("all", include_reasoning=False, **more))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "include_reasoning"


def test_special_tokens_are_shown_only_if_asked_for(reading):
    message = whole(reading, "special")["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("ab", "cd")
    message = whole(reading, "special", skip_special_tokens=False)["choices"][0]["message"]
    assert message["content"] == "c<|im_start|>d"


def test_every_choice_is_read_by_itself(reading):
    choices = whole(reading, "all", n=3, temperature=1)["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [2, 2, 2]
    ids = {call["id"] for choice in choices for call in choice["message"]["tool_calls"]}
    assert len(ids) == 6


def test_token_ids_and_logprobs_come_once(reading, tokenizer):
    expected = tokenizer.encode(TEXTS["all"], add_special_tokens=False)
    choice = whole(reading, "all", return_token_ids=True, logprobs=True)["choices"][0]
    assert choice["token_ids"][:-1] == expected
    raw = reading.post(CHAT, json=body("all", return_token_ids=True, stream=True)).text
    chunks = [json.loads(e[6:]) for e in raw.split("\n\n") if e.startswith("data: {")]
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())]
    assert ids == choice["token_ids"]


def test_a_stop_string_ends_reasoning_too(reading):
    choice = whole(reading, "all", stop=["ü"])["choices"][0]
    assert choice["message"]["reasoning"] == "Hm,"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "ü")


def test_an_answer_that_goes_on_with_reasoning_reads_on(reading):
    asked = body("so.</think>Yes")
    asked["messages"].append({"role": "assistant", "content": "<think>I think "})
    asked |= {"continue_final_message": True, "add_generation_prompt": False}
    message = reading.post(CHAT, json=asked).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("so.", "Yes")


def test_completions_are_text(reading):
    asked = {"prompt": "user\nall\n", "max_tokens": 400}
    assert reading.post("/v1/completions", json=asked).json()["choices"][0]["text"] == TEXTS["all"]


def test_the_other_dialects_say_it_too(reading):
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    asked = {"input": "all", "tools": tools}
    items = reading.post("/v1/responses", json=asked).json()["output"]
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in items] == kinds
    assert json.loads(items[2]["arguments"]) == ARGUMENTS
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    asked = {"messages": body("all")["messages"], "tools": tools, "max_tokens": 400}
    answer = reading.post("/v1/messages", json=asked).json()
    kinds = ["thinking", "text", "tool_use", "tool_use"]
    assert [block["type"] for block in answer["content"]] == kinds
    assert answer["content"][2]["input"] == ARGUMENTS
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("parsers", "reasoning", "calls"),
    [
        (ParserOptions("qwen3", None), "a", 0),
        (ParserOptions(None, "hermes"), None, 1),
        (None, None, 0),
    ],
)
def test_what_is_not_enabled_is_not_read(tokenizer, parsers, reasoning, calls):
    server = made(tokenizer, parsers or ParserOptions())
    with server.running(), httpx.Client(base_url=server.url, timeout=60) as http:
        text = f"<think>a</think>{G}"
        answer = whole(http, text)
        message = answer["choices"][0]["message"]
        assert message["reasoning"] == reasoning
        assert len(message.get("tool_calls", [])) == calls
        said = (message["content"] or "") + (reasoning or "")
        assert ("</tool_call>" in said) is (calls == 0)
        assert ("completion_tokens_details" in answer["usage"]) is (reasoning is not None)
        server.wait_idle()


HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
)


@pytest.mark.parametrize(
    "parsers", [ParserOptions("openai_gptoss", "openai"), ParserOptions(None, "openai")]
)
def test_channels_are_one_format_for_both(tokenizer, parsers):
    server = made(tokenizer, parsers)
    with server.running(), httpx.Client(base_url=server.url, timeout=60) as http:
        answer = whole(http, HARMONY)
        message, reason, *_ = streamed(http, HARMONY)
        assert (message, reason, None) == flat(answer["choices"][0])
        assert (message["reasoning"], message["content"]) == ("Hm.", "")
        assert message["tool_calls"] == [{"name": "f", "arguments": '{"a": 1}'}]
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
        server.wait_idle()


def test_flags_name_parsers():
    said = "--enable-reasoning --reasoning-parser deepseek_r1 --tool-call-parser hermes"
    _, server = parse(["m", *said.split(), "--enable-auto-tool-choice"])
    assert (server.reasoning_parser, server.tool_call_parser) == ("deepseek_r1", "hermes")
    assert server.enable_auto_tool_choice
    assert "reasoning_parser" in NO_EFFECT  # of an engine: a server has it


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--reasoning-parser", "qwen33"], "did you mean qwen3"),
        (["--enable-auto-tool-choice"], "needs tool_call_parser"),
        (["--tool-call-parser", "hermess"], "did you mean hermes"),
        (["--reasoning-parser-plugin", "x.py"], "needs reasoning_parser"),
        (["--tool-parser-plugin", "x.py"], "needs tool_call_parser"),
        (["--reasoning-parser", "x", "--reasoning-parser-plugin", "/nowhere.py"], "not a file"),
    ],
)
def test_flags_that_cannot_be_right_are_refused(flags, fault):
    with pytest.raises(ConfigError, match=fault):
        parse(["m", *flags])


def test_auto_needs_a_template_that_shows_something(tokenizer):
    assert build_answer_parser_factory(ParserOptions("auto", None), tokenizer, None) is None
    with pytest.raises(ConfigError, match="fits no tool parser"):
        build_answer_parser_factory(ParserOptions(None, "auto"), tokenizer, None)
