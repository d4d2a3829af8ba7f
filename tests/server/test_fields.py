"""Every field that clients of such servers send: honoured, refused, or told of. A table walks them.

`changes(f)`: the answer changes as f(before, after) says; `reaches(...)`: the engine is asked so
(what it makes of it is tests/cpu's); `refused(status)`: an error that names the field; `told`: the
header X-Quire-Ignored names it. A field that is in no row, or a row without a field, is a failure.
"""

import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from quire.grammar.frontends.validate import build_constraint
from quire.grammar.grammar_ast import (
    ChoiceNode,
    JsonNode,
    RegexNode,
    TaggedTextNode,
    TagNode,
    UserGrammarNode,
)
from quire.server.formats.chat_request import ChatCompletionRequest
from quire.server.formats.completion_request import CompletionRequest
from quire.server.formats.messages_request import AnthropicMessagesRequest
from quire.server.formats.responses_request import ResponsesRequest
from quire.text.tokenizing.tokenizer import load_tokenizer
from quire.text.tools.base import tools_by_name
from quire.tool_grammar.call_grammar import arguments_node, json_list_grammar
from tests.server.harness import TEMPLATE, Server, make_tokenizer

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Say something nice."}]
BASE = {
    CHAT: {"messages": HELLO},
    COMPLETE: {"prompt": "Say something nice.", "max_tokens": 200},
    RESPONSES: {"input": "Say something nice."},
    MESSAGES: {"messages": HELLO, "max_tokens": 200},
}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOLS = {
    CHAT: [{"type": "function", "function": TOOL}],
    RESPONSES: [{"type": "function", **TOOL}],
    MESSAGES: [{"name": "f", "description": "d", "input_schema": TOOL["parameters"]}],
}


class Recorder:
    """The engine's client, remembering what it was asked."""

    def __init__(self, client):
        self._generate = client.generate
        self.requests = []

    async def generate(self, requests):
        self.requests.extend(requests := tuple(requests))
        return await self._generate(requests)


@pytest.fixture(scope="module")
def asked_server(tmp_path_factory):
    """A server whose template shows all that a request may bring to it."""
    folder = tmp_path_factory.mktemp("fields")
    make_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    more = "{{ reasoning_effort or '' }}{{ documents | tojson if documents else '' }}"
    config["chat_template"] = TEMPLATE + more
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    server = Server(load_tokenizer(folder))
    recorder = Recorder(server.client)
    server.client.generate = recorder.generate
    with server.running():
        server.recorder = recorder
        yield server
        server.wait_idle()


@dataclass
class Seen:
    """One answer, and what the engine was asked for it."""

    status: int
    headers: httpx.Headers
    body: dict[str, Any]
    raw: str
    requests: list

    @property
    def request(self):
        return self.requests[0]

    @property
    def params(self):
        return self.request.params

    @property
    def choices(self):
        return self.body["choices"]

    @property
    def text(self):
        """What was said, whatever the dialect."""
        if "choices" in self.body:
            one = self.choices[0]
            return one["text"] if "text" in one else one["message"]["content"]
        if "output" in self.body:
            return self.body["output"][0]["content"][0]["text"]
        return self.body["content"][0]["text"]


def ask(server, path, change):
    body = {**BASE[path], **change}
    before = len(server.recorder.requests)
    got = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    streams = "event-stream" in got.headers["content-type"]
    answer = {} if streams else got.json()
    requests = server.recorder.requests[before:]
    return Seen(got.status_code, got.headers, answer, got.text, requests)


# -- what may become of a field ---------------------------------------------------------------


def changes(check):
    """check(answer without, answer with it) -> truth."""

    def prove(server, path, field, value, more):
        after = ask(server, path, {**more, field: value})
        assert after.status == 200, after.raw
        assert "x-quire-ignored" not in after.headers
        assert check(ask(server, path, more), after), after.raw

    return prove


def reaches(wanted=None, **params):
    """The engine's request is so: a function of Seen, or fields of its SamplingParams."""

    def prove(server, path, field, value, more):
        for stream in ({}, {"stream": True}):
            seen = ask(server, path, {**more, **stream, field: value})
            assert seen.status == 200, seen.raw
            assert "x-quire-ignored" not in seen.headers
            for name, given in (params or {field: value}).items() if wanted is None else ():
                assert getattr(seen.params, name) == given, name
            assert wanted is None or wanted(seen)

    return prove


def bound(form, backend="auto"):
    """The output of the engine's request is bound to this form, and nothing else says so."""
    wanted = build_constraint(form, backend)
    return reaches(
        lambda seen: seen.request.constraint == wanted and seen.params.structured_outputs is None
    )


def predicts(text):
    """The engine's request has the tokens of the predicted text, and no text; usage counts."""

    def prove(server, path, field, value, more):
        reaches(
            lambda seen: (
                seen.request.prediction == tuple(server.tokenizer.encode(text, False))
                and seen.params.prediction is None
            )
        )(server, path, field, value, more)
        usage = json.dumps(ask(server, path, {**more, field: value}).body["usage"])
        assert '"accepted_prediction_tokens": 0' in usage or path == MESSAGES

    return prove


def refused(status, param=None):
    """An error, streamed or not; nothing reaches the engine."""

    def prove(server, path, field, value, more):
        for stream in ({}, {"stream": True}):
            seen = ask(server, path, {**more, **stream, field: value})
            assert seen.status == status, seen.raw
            assert not seen.requests
            error = seen.body["error"]
            said = error["message"] if path == MESSAGES else error["param"]
            assert (param or field) in said, error

    return prove


def told(server, path, field, value, more):
    """Answered as without it, and the header says so."""
    for stream in ({}, {"stream": True}):
        seen = ask(server, path, {**more, **stream, field: value})
        assert seen.status == 200, seen.raw
        assert field in seen.headers.get("x-quire-ignored", "").split(","), seen.headers
        assert not stream or seen.raw.startswith(("data:", "event:"))


def streams(check):
    """check(raw text of the stream)."""

    def prove(server, path, field, value, more):
        seen = ask(server, path, {**more, field: value})
        assert seen.status == 200, seen.raw
        assert check(seen.raw), seen.raw

    return prove


def longer_prompt(before, after):
    return len(after.request.prompt) > len(before.request.prompt)


def other_text(before, after):
    return after.text != before.text


# -- the table --------------------------------------------------------------------------------

OFF = {"temperature": 0.8}  # what some fields need beside them

OBJECT = {"type": "object"}
NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANY_OBJECT = JsonNode('{"type":"object"}')
TAG = {
    "structures": [{"begin": "<f>", "schema": OBJECT, "end": "</f>"}],
    "triggers": ["<f>"],
}

STRUCTURE = [  # on every route
    ("response_format", {"type": "text"}, reaches(n=1)),
    ("response_format", {"type": "json_object"}, bound(ANY_OBJECT)),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": NAMED, "strict": True}},
        bound(JsonNode(json.dumps(NAMED, separators=(",", ":")), closed=True)),
    ),
    ("response_format", {"type": "xml"}, refused(400)),
    ("structured_outputs", {"json": OBJECT}, bound(ANY_OBJECT)),
    (
        "structured_outputs",
        {"json": OBJECT, "disable_any_whitespace": True},
        bound(JsonNode('{"type":"object"}', whitespace=False)),
    ),
    ("structured_outputs", {"choise": ["a"]}, refused(400)),
    ("guided_decoding", {"choice": ["a", "b"]}, bound(ChoiceNode(("a", "b")))),
    ("guided_json", OBJECT, bound(ANY_OBJECT)),
    ("guided_json", '{"type": "object"}', bound(ANY_OBJECT)),
    ("guided_json", "{", refused(400)),
    ("guided_regex", "a+", bound(RegexNode("a+"))),
    ("guided_choice", ["a", "b", "a"], bound(ChoiceNode(("a", "b")))),
    ("guided_choice", [], refused(400)),
    ("guided_grammar", 'root ::= "a"', bound(UserGrammarNode('root ::= "a"'))),
    ("guided_json_object", True, bound(ANY_OBJECT)),
    ("guided_json_object", False, reaches(n=1)),
    (
        "structural_tag",
        TAG,
        bound(TaggedTextNode(("<f>",), (TagNode("<f>", JsonNode('{"type":"object"}'), "</f>"),))),
    ),
    ("guided_whitespace_pattern", " ?", told),  # there is nothing to be white between
    ("guided_decoding_backend", "xgrammar", told),
]

SPECULATION = [  # on every route
    ("prediction", {"type": "content", "content": "abc"}, predicts("abc")),
    (
        "prediction",
        {"type": "content", "content": [{"type": "text", "text": t} for t in ("ab", "c")]},
        predicts("abc"),
    ),
    ("prediction", {"type": "content", "content": ""}, predicts("")),
    ("prediction", {"type": "text", "content": "abc"}, refused(400)),
    ("speculative", False, reaches(lambda seen: not seen.request.speculates)),
    ("speculative", True, reaches(lambda seen: seen.request.speculates)),
    ("vllm_xargs", {"speculative": False}, reaches(lambda seen: not seen.request.speculates)),
]

SAMPLING = [
    *STRUCTURE,
    *SPECULATION,
    ("temperature", 0.7, reaches()),
    ("top_p", 0.5, reaches()),
    ("top_k", 7, reaches()),
    ("min_p", 0.1, reaches()),
    ("presence_penalty", 0.5, reaches()),
    ("frequency_penalty", 0.5, reaches()),
    ("repetition_penalty", 1.1, reaches()),
    ("seed", 5, reaches(lambda seen: seen.request.seed == 5)),
    ("stop", "a", changes(lambda before, after: after.text == before.text.partition("a")[0])),
    ("stop_token_ids", [5], reaches()),
    ("ignore_eos", True, reaches()),
    ("skip_special_tokens", False, reaches()),
    ("include_stop_str_in_output", True, reaches()),
    ("logit_bias", {"5": 2.0}, reaches(logit_bias={5: 2.0})),
    ("cache_salt", "mine", reaches(lambda seen: seen.request.salt != b"")),
    ("priority", 3, refused(400)),  # this server orders by arrival
    ("request_id", "mine", changes(lambda _, after: "mine" in after.body["id"])),
    ("vllm_xargs", {"a": 1}, reaches(extra_args={"a": 1})),
    ("kv_transfer_params", {"a": 1}, refused(501)),
    ("ec_transfer_params", {"a": 1}, refused(501)),
    ("session_id", "s", told),
    ("x_no_such_field", 1, told),
    ("x_timing", True, changes(lambda _, after: after.body["x_timing"])),
]

BOTH = [  # chat and completions
    *SAMPLING,
    ("model", "alias", changes(lambda _, after: after.body["model"] == "tiny")),
    ("model", "other", refused(404)),
    ("n", 2, changes(lambda _, after: [c["index"] for c in after.choices] == [0, 1])),
    ("best_of", 3, changes(lambda _, after: after.request.n == 3 and len(after.choices) == 1)),
    ("max_tokens", 3, changes(lambda _, after: after.body["usage"]["completion_tokens"] == 3)),
    ("min_tokens", 2, reaches()),
    ("spaces_between_special_tokens", False, reaches()),
    ("truncate_prompt_tokens", 5, reaches(lambda seen: len(seen.request.prompt) == 5)),
    ("truncation_side", "up", refused(400)),
    ("prompt_logprobs", 1, changes(lambda _, after: "prompt_logprobs" in after.raw)),
    ("allowed_token_ids", [5, 6], reaches()),
    ("bad_words", ["cat"], reaches()),
    ("logprob_token_ids", [5], reaches()),
    ("use_beam_search", True, None),
    ("length_penalty", 1.0, reaches(n=1)),
    ("length_penalty", 2.0, refused(400)),
    ("stream", True, streams(lambda raw: raw.endswith("data: [DONE]\n\n"))),
    ("stream_interval", 4, reaches()),
    ("detokenize", True, reaches()),
    ("skip_reading_prefix_cache", True, reaches()),
    ("extra_args", {"a": 1}, reaches()),
    ("return_token_ids", True, changes(lambda _, after: after.choices[0]["token_ids"])),
    ("return_prompt_text", True, changes(lambda _, after: "prompt_text" in after.raw)),
    ("return_token_offsets", True, refused(501)),
    ("return_weight_versions", True, refused(501)),
    ("thinking_token_budget", 5, refused(400)),
    ("repetition_detection", {"max_pattern_size": 2, "min_count": 2}, refused(501)),
    ("routed_experts_prompt_start", 1, refused(501)),
    ("watermarking", True, refused(501)),
    ("user", "u", told),
]

ROWS = {
    CHAT: [
        *BOTH,
        ("messages", [{"role": "user", "content": "Other."}], changes(other_text)),
        ("logprobs", True, changes(lambda _, after: after.choices[0]["logprobs"]["content"])),
        ("top_logprobs", 2, refused(400)),
        (
            "max_completion_tokens",
            3,
            changes(lambda _, after: after.body["usage"]["completion_tokens"] == 3),
        ),
        ("stream_options", {"include_usage": True}, None),
        ("tools", TOOLS[CHAT], changes(longer_prompt)),
        ("tools", [], refused(400)),
        ("tool_choice", "auto", reaches(n=1)),
        ("tool_choice", "required", refused(400)),
        ("parallel_tool_calls", True, reaches(n=1)),
        ("parallel_tool_calls", False, None),
        ("reasoning_effort", "high", changes(longer_prompt)),
        ("include_reasoning", True, reaches(n=1)),
        ("include_reasoning", False, refused(501)),
        ("echo", True, None),
        ("add_generation_prompt", False, changes(lambda b, a: longer_prompt(a, b))),
        ("continue_final_message", True, changes(lambda b, a: longer_prompt(a, b))),
        ("add_special_tokens", True, reaches(n=1)),  # this tokenizer has none to add
        ("documents", [{"title": "t", "text": "x"}], changes(longer_prompt)),
        ("chat_template", "{{ messages }}", refused(400)),
        ("chat_template_kwargs", {"shout": True}, changes(longer_prompt)),
        ("media_io_kwargs", {"a": {}}, refused(501)),
        ("mm_processor_kwargs", {"a": 1}, refused(501)),
        ("mm_payload", "tensors", refused(501)),
        ("return_mm_kwargs", True, refused(501)),
        ("return_tokens_as_token_ids", True, None),
        ("modalities", ["text"], reaches(n=1)),
        ("modalities", ["audio"], refused(501)),
        ("audio", {"voice": "x"}, refused(501)),
        ("functions", [TOOL], refused(501)),
        ("function_call", "auto", refused(501)),
        ("metadata", {"a": "b"}, told),
        ("store", True, told),
        ("service_tier", "auto", told),
    ],
    COMPLETE: [
        *BOTH,
        ("prompt", "Other.", changes(other_text)),
        ("prompt", [5, 6, 7], reaches(lambda seen: seen.request.prompt == (5, 6, 7))),
        ("prompt", ["a", "b"], changes(lambda _, after: len(after.choices) == 2)),
        ("prompt_embeds", "AAAA", refused(400)),
        ("suffix", "end", refused(400)),
        ("echo", True, changes(lambda b, a: a.text == BASE[COMPLETE]["prompt"] + b.text)),
        ("multi_modal_data", {"image": "x"}, refused(501)),
        ("logprobs", 2, changes(lambda _, after: after.choices[0]["logprobs"]["tokens"])),
        ("stream_options", {"include_usage": True}, None),
        ("add_special_tokens", True, reaches(n=1)),
        ("return_tokens_as_token_ids", True, None),
    ],
    RESPONSES: [
        *[row for row in SAMPLING if row[0] != "session_id"],
        ("input", "Other.", changes(other_text)),
        ("instructions", "Be kind.", changes(longer_prompt)),
        ("model", "alias", changes(lambda _, after: after.body["model"] == "tiny")),
        ("model", "other", refused(404)),
        (
            "max_output_tokens",
            3,
            changes(lambda _, after: after.body["usage"]["output_tokens"] == 3),
        ),
        ("max_tool_calls", 3, changes(lambda _, after: after.body["max_tool_calls"] == 3)),
        ("metadata", {"a": "b"}, changes(lambda _, after: after.body["metadata"] == {"a": "b"})),
        ("parallel_tool_calls", True, reaches(n=1)),
        ("previous_response_id", "resp_1", refused(400)),
        ("reasoning", {"effort": "high"}, changes(longer_prompt)),
        ("reasoning", {"summary": "detailed"}, refused(501, "reasoning")),
        (
            "include",
            ["message.output_text.logprobs"],
            changes(lambda _, after: after.body["output"][0]["content"][0]["logprobs"]),
        ),
        ("include", ["x"], refused(400)),
        ("store", True, told),  # this server keeps none
        ("store", False, reaches(n=1)),
        ("background", True, refused(400)),
        ("stream", True, streams(lambda raw: "event: response.completed" in raw)),
        ("stream_options", {"include_obfuscation": True}, None),
        ("text", {"format": {"type": "text"}}, reaches(n=1)),
        ("text", {"format": {"type": "json_object"}}, bound(ANY_OBJECT)),
        (
            "text",
            {"format": {"type": "json_schema", "schema": NAMED, "strict": True}},
            bound(JsonNode(json.dumps(NAMED, separators=(",", ":")), closed=True)),
        ),
        ("text", {"format": {"type": "json_schema"}}, refused(400, "text.format.json_schema")),
        ("tool_choice", "auto", reaches(n=1)),
        ("tool_choice", "required", refused(400)),
        ("tools", TOOLS[RESPONSES], changes(longer_prompt)),
        ("tools", [{"type": "web_search_preview"}], refused(501)),
        ("tools", [{"type": "mcp", "server_label": "x"}], refused(501)),
        (
            "top_logprobs",
            2,
            changes(lambda _, after: after.body["output"][0]["content"][0]["logprobs"]),
        ),
        ("truncation", "auto", reaches(truncate_prompt_tokens=-1)),
        ("truncation", "x", refused(400)),
        ("include_reasoning", True, reaches(n=1)),
        ("chat_template_kwargs", {"shout": True}, changes(longer_prompt)),
        ("spaces_between_special_tokens", False, reaches()),
        ("prompt", {"id": "p"}, refused(501)),
        ("conversation", "c", refused(501)),
        ("enable_response_messages", True, refused(501)),
        ("previous_input_messages", [{"a": 1}], refused(501)),
        ("mm_processor_kwargs", {"a": 1}, refused(501)),
        ("media_io_kwargs", {"a": {}}, refused(501)),
        ("service_tier", "flex", told),
        ("user", "u", changes(lambda _, after: after.body["user"] == "u")),
        ("safety_identifier", "s", changes(lambda _, a: a.body["safety_identifier"] == "s")),
        ("prompt_cache_key", "k", changes(lambda _, a: a.body["prompt_cache_key"] == "k")),
        ("session_id", "s", told),
    ],
    MESSAGES: [
        *SPECULATION,
        ("messages", [{"role": "user", "content": "Other."}], changes(other_text)),
        ("model", "alias", changes(lambda _, after: after.body["model"] == "tiny")),
        ("model", "other", refused(404)),
        ("max_tokens", 3, changes(lambda _, after: after.body["usage"]["output_tokens"] == 3)),
        ("system", "Be kind.", changes(longer_prompt)),
        (
            "stop_sequences",
            ["a"],
            changes(lambda before, after: after.text == before.text.partition("a")[0]),
        ),
        ("stream", True, streams(lambda raw: "event: message_stop" in raw)),
        ("temperature", 0.7, reaches()),
        ("top_k", 7, reaches()),
        ("top_p", 0.5, reaches()),
        ("tools", TOOLS[MESSAGES], changes(longer_prompt)),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}], refused(501)),
        ("tool_choice", {"type": "auto"}, reaches(n=1)),
        ("tool_choice", {"type": "any"}, refused(400)),
        ("tool_choice", {"type": "tool", "name": "f"}, refused(400)),
        ("thinking", {"type": "adaptive"}, reaches(n=1)),
        ("thinking", {"type": "enabled", "budget_tokens": 1024}, None),
        ("output_config", {"effort": "high"}, changes(longer_prompt)),
        (
            "output_config",
            {"format": {"type": "json_schema", "schema": OBJECT}},
            bound(ANY_OBJECT),
        ),
        ("output_config", {"format": {"type": "json_schema"}}, refused(400)),
        ("output_format", {"type": "json_schema", "schema": OBJECT}, bound(ANY_OBJECT)),
        *STRUCTURE,
        ("metadata", {"user_id": "u"}, told),
        ("cache_salt", "mine", reaches(lambda seen: seen.request.salt != b"")),
        ("kv_transfer_params", {"a": 1}, refused(501)),
        ("ec_transfer_params", {"a": 1}, refused(501)),
        ("chat_template_kwargs", {"shout": True}, changes(longer_prompt)),
        ("vllm_xargs", {"a": 1}, reaches(extra_args={"a": 1})),
        ("service_tier", "auto", told),
        ("mcp_servers", [{"url": "x"}], refused(501)),
        ("container", "c", refused(501)),
        ("speed", "fast", refused(501)),
        ("priority", 3, refused(400)),
        ("request_id", "mine", changes(lambda _, after: "mine" in after.body["id"])),
        ("x_timing", True, changes(lambda _, after: after.body["x_timing"])),
        ("x_no_such_field", 1, told),
    ],
}
MORE = {"include_stop_str_in_output": {"stop": "a"}, "max_tool_calls": {}}
"""What a field needs beside it."""

WALK = [
    pytest.param(path, field, value, prove, id=f"{path}-{field}-{value!s:.20}")
    for path, rows in ROWS.items()
    for field, value, prove in rows
    if prove is not None
]


@pytest.mark.parametrize(("path", "field", "value", "prove"), WALK)
def test_a_field_is_honoured_refused_or_told_of(asked_server, path, field, value, prove):
    prove(asked_server, path, field, value, MORE.get(field, {}))


# -- fields that mean something only beside others (None in the table) ------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_usage_comes_if_a_stream_asks_for_it(asked_server, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    seen = ask(asked_server, path, {"stream": True, "stream_options": options})
    chunks = [json.loads(line[6:]) for line in seen.raw.split("\n\n")[:-2]]
    assert all(chunk["usage"] for chunk in chunks)
    assert chunks[-1]["choices"] == []
    assert ask(asked_server, path, {"stream_options": options}).status == 400


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_tokens_are_named_by_id_if_asked(asked_server, path):
    logprobs = {"logprobs": True if path == CHAT else 1}
    seen = ask(asked_server, path, {**logprobs, "return_tokens_as_token_ids": True})
    shown = seen.choices[0]["logprobs"]
    names = [one["token"] for one in shown["content"]] if path == CHAT else shown["tokens"]
    assert all(name.startswith("token_id:") for name in names)


def test_echo_of_chat_repeats_the_message_that_goes_on(asked_server):
    messages = [*HELLO, {"role": "assistant", "content": "I think"}]
    change = {"messages": messages, "continue_final_message": True}
    plain = ask(asked_server, CHAT, change)
    echoed = ask(asked_server, CHAT, {**change, "echo": True})
    assert echoed.text == "I think" + plain.text


def test_top_logprobs_are_shown_beside_logprobs(asked_server):
    seen = ask(asked_server, CHAT, {"logprobs": True, "top_logprobs": 2})
    assert all(len(one["top_logprobs"]) == 2 for one in seen.choices[0]["logprobs"]["content"])


def test_one_call_at_a_time_is_refused_where_calls_are_not_read(asked_server):
    seen = ask(asked_server, CHAT, {"tools": TOOLS[CHAT], "parallel_tool_calls": False})
    assert (seen.status, seen.body["error"]["param"]) == (501, "parallel_tool_calls")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_beam_search_is_beam_search_or_refused(asked_server, path):
    seen = ask(asked_server, path, {"use_beam_search": True, "n": 2, "temperature": 0})
    if seen.status == 501:
        assert seen.body["error"]["param"] == "use_beam_search"
    else:
        assert len({c["index"] for c in seen.choices}) == 2, seen.raw


FORCED = [
    (CHAT, "required", None),
    (CHAT, {"type": "function", "function": {"name": "f"}}, "f"),
    (RESPONSES, "required", None),
    (RESPONSES, {"type": "function", "name": "f"}, "f"),
    (MESSAGES, {"type": "any"}, None),
    (MESSAGES, {"type": "tool", "name": "f"}, "f"),
]


@pytest.mark.parametrize(("path", "choice", "named"), FORCED)
def test_a_forced_call_binds_the_engine_without_any_parser(asked_server, path, choice, named):
    (tool,) = tools_by_name([{"type": "function", "function": TOOL}]).values()
    form = arguments_node(tool) if named else json_list_grammar([tool])
    change = {"tools": TOOLS[path], "tool_choice": choice}
    seen = ask(asked_server, path, change)
    assert seen.status == 200, seen.raw
    assert seen.request.constraint == build_constraint(form)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_the_wish_to_choose_freely_is_refused_where_calls_are_not_read(asked_server, path):
    auto = {"type": "auto"} if path == MESSAGES else "auto"
    seen = ask(asked_server, path, {"tools": TOOLS[path], "tool_choice": auto})
    assert seen.status == 400
    assert "--tool-call-parser" in seen.raw
    assert ask(asked_server, path, {"tools": TOOLS[path]}).status == 200


def test_a_thinking_budget_is_told_of(asked_server):
    """Clients cannot ask for thinking without one."""
    change = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1200}
    seen = ask(asked_server, MESSAGES, change)
    assert seen.status == 200, seen.raw
    assert "thinking.budget_tokens" in seen.headers["x-quire-ignored"]


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_prompt_is_cut_at_the_side_that_is_asked_for(asked_server, path):
    whole = ask(asked_server, path, {}).request.prompt
    cut = {"truncate_prompt_tokens": 5}
    assert ask(asked_server, path, cut).request.prompt == whole[-5:]
    assert ask(asked_server, path, {**cut, "truncation_side": "left"}).request.prompt == whole[-5:]
    assert ask(asked_server, path, {**cut, "truncation_side": "right"}).request.prompt == whole[:5]


def test_stream_options_of_responses_are_told_of(asked_server):
    change = {"stream": True, "stream_options": {"include_obfuscation": True}}
    seen = ask(asked_server, RESPONSES, change)
    assert "stream_options.include_obfuscation" in seen.headers["x-quire-ignored"]


# -- nothing is missing -----------------------------------------------------------------------

DOCUMENTED = {
    CHAT: """messages model frequency_penalty presence_penalty temperature top_p logit_bias logprobs
        top_logprobs max_tokens max_completion_tokens n response_format seed stop stream
        stream_options tools tool_choice parallel_tool_calls reasoning_effort user
        thinking_token_budget include_reasoning use_beam_search length_penalty top_k min_p
        repetition_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
        skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
        prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt
        continue_final_message add_special_tokens documents chat_template chat_template_kwargs
        media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id
        return_tokens_as_token_ids return_token_ids return_token_offsets return_prompt_text
        return_weight_versions cache_salt kv_transfer_params ec_transfer_params vllm_xargs
        repetition_detection stream_interval routed_experts_prompt_start watermarking mm_payload
        return_mm_kwargs""",
    COMPLETE: """prompt prompt_embeds model frequency_penalty presence_penalty temperature top_p
        logit_bias logprobs max_tokens n best_of seed stop stream stream_options suffix echo user
        use_beam_search length_penalty top_k min_p repetition_penalty stop_token_ids
        include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
        spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids
        bad_words prompt_logprobs logprob_token_ids add_special_tokens response_format
        structured_outputs priority request_id session_id return_tokens_as_token_ids
        return_token_ids return_token_offsets return_prompt_text return_weight_versions cache_salt
        kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval
        routed_experts_prompt_start watermarking thinking_token_budget""",
    RESPONSES: """input instructions model max_output_tokens max_tool_calls metadata
        parallel_tool_calls previous_response_id reasoning include store background stream
        temperature top_p text tool_choice tools top_logprobs truncation service_tier user
        prompt_cache_key safety_identifier top_k min_p presence_penalty frequency_penalty
        repetition_penalty seed stop stop_token_ids ignore_eos skip_special_tokens
        include_stop_str_in_output logit_bias structured_outputs chat_template_kwargs cache_salt
        priority request_id session_id enable_response_messages previous_input_messages
        include_reasoning kv_transfer_params ec_transfer_params vllm_xargs mm_processor_kwargs
        prompt""",
    MESSAGES: """model messages max_tokens system stop_sequences stream temperature top_k top_p
        tools tool_choice thinking output_config metadata cache_salt kv_transfer_params
        ec_transfer_params chat_template_kwargs vllm_xargs""",
}
BODIES = {
    CHAT: ChatCompletionRequest,
    COMPLETE: CompletionRequest,
    RESPONSES: ResponsesRequest,
    MESSAGES: AnthropicMessagesRequest,
}


@pytest.mark.parametrize("path", ROWS)
def test_each_field_that_is_documented_or_declared_has_a_row(path):
    rows = {field for field, _, _ in ROWS[path]}
    assert not set(DOCUMENTED[path].split()) - rows
    assert not set(BODIES[path].model_fields) - rows
