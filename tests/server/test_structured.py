"""The form of answers, over HTTP: what goes with what, what is told, and how answers end.

The words by themselves are tests/server/test_fields.py's; texts that real grammars allow are
tests/clients' and tests/cpu's. Here the model knows whole texts by heart.
"""

import json
from dataclasses import replace

import httpx
import openai
import pydantic
import pytest

from quire.cli import main
from quire.engine.supervise.process_pipe import RunApiProcess
from quire.errors import RequestError
from quire.grammar.automata import dfa
from quire.grammar.frontends.from_params import StructuredDefaults
from quire.grammar.json_schema import rewrite
from quire.server.options import ServerOptions
from quire.server.process import api_process
from tests.server.harness import Server
from tests.server.test_async_llm import config as engine_config

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, SIMPLE = "/v1/responses", "/v1/messages", "/generate"
HELLO = [{"role": "user", "content": "Hi"}]
BASE = {
    CHAT: {"messages": HELLO},
    COMPLETE: {"prompt": "Hi", "max_tokens": 100},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": HELLO, "max_tokens": 100},
    SIMPLE: {"prompt": "Hi", "max_tokens": 100},
}
OBJECT = {"type": "object"}
FORMAT = {"type": "json_object"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": OBJECT}}
WORDS = {  # each of these is one form
    "response_format": FORMAT,
    "structured_outputs": {"json": OBJECT},
    "guided_decoding": {"json": OBJECT},
    "guided_json": OBJECT,
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
    "guided_json_object": True,
    "structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}},
}


@pytest.fixture
def own(tokenizer):
    """A server of the test's own, to say how its grammars turn out."""
    with Server(tokenizer).running() as running:
        yield running
        running.wait_idle()
        assert running.model.bound.held == 0, "a grammar is still held"


def ask(server, path, **change):
    return httpx.post(server.url + path, json={**BASE[path], **change}, timeout=60)


def error_of(got):
    error = got.json()["error"]
    return error.get("param"), error["message"]


# -- what goes together -----------------------------------------------------------------------


PAIRS = [(a, b) for i, a in enumerate(WORDS) for b in list(WORDS)[i + 1 :]]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_forms_at_once_are_refused_and_both_are_named(server, one, other):
    got = ask(server, CHAT, **{one: WORDS[one], other: WORDS[other]})
    param, message = error_of(got)
    assert got.status_code == 400
    assert one in message
    assert other in message
    assert param in (one, other)


@pytest.mark.parametrize(
    ("path", "own_word"),
    [
        (RESPONSES, {"text": {"format": FORMAT}}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": OBJECT}}}),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": OBJECT}}),
    ],
)
def test_the_word_of_a_dialect_is_one_of_them(server, path, own_word):
    assert ask(server, path, **own_word).status_code == 200
    got = ask(server, path, **own_word, guided_json=OBJECT)
    assert got.status_code == 400
    assert "guided_json" in got.text
    assert next(iter(own_word)) in got.text


def test_a_text_format_is_no_form(server):
    got = ask(server, CHAT, response_format={"type": "text"}, guided_choice=["a"])
    assert got.status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETE, SIMPLE])
def test_a_beam_search_has_no_form(server, path):
    got = ask(server, path, use_beam_search=True, n=2, guided_json=OBJECT)
    assert (got.status_code, error_of(got)[0]) == (400, "guided_json")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_call_and_a_form_of_the_whole_text_exclude_each_other(server, choice):
    got = ask(server, CHAT, tools=[TOOL], tool_choice=choice, structured_outputs={"json": OBJECT})
    param, message = error_of(got)
    assert (got.status_code, param) == (400, "structured_outputs")
    assert "tool_choice" in message


def test_settings_of_older_releases_hold_for_any_json(own):
    forms = []
    own.model.bound.check_constraint = forms.append
    how = {"guided_whitespace_pattern": " ?", "guided_decoding_backend": "guidance:no-fallback"}
    got = ask(own, CHAT, response_format=FORMAT, **how)
    assert got.status_code == 200
    assert "x-quire-ignored" not in got.headers
    assert json.loads(forms[0].form)["whitespace_pattern"] == " ?"
    assert forms[0].backend == "llguidance"


def test_the_options_of_the_server_hold(tokenizer):
    house = StructuredDefaults("xgrammar", disable_any_whitespace=True)
    with Server(tokenizer, services={"structured_defaults": house}).running() as running:
        forms = []
        running.model.bound.check_constraint = forms.append
        assert ask(running, CHAT, response_format=FORMAT).status_code == 200
        running.wait_idle()
    assert json.loads(forms[0].form)["whitespace"] is False
    assert forms[0].backend == "llguidance"


def test_labels_of_a_schema_are_told_of_and_what_nobody_knows_too(server):
    schema = {"name": "n", "description": "d", "schema": OBJECT, "x": 1}
    got = ask(server, CHAT, response_format={"type": "json_schema", "json_schema": schema})
    told = got.headers["x-quire-ignored"].split(",")
    assert got.status_code == 200
    assert [one.rpartition(".")[2] for one in told] == ["name", "description", "x"]


def test_a_strict_server_refuses_what_nobody_knows_but_no_label(tokenizer):
    with Server(tokenizer, options=ServerOptions(strict=True)).running() as running:
        schema = {"name": "n", "description": "d", "schema": OBJECT}
        wanted = {"type": "json_schema", "json_schema": schema}
        assert ask(running, CHAT, response_format=wanted).status_code == 200
        schema["x"] = 1
        got = ask(running, CHAT, response_format=wanted)
        assert (got.status_code, error_of(got)[0]) == (400, "response_format.json_schema.x")
        running.wait_idle()


def test_a_schema_is_refused_with_its_place(server):
    schema = {"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}}
    for word, change in {
        "guided_json": {"guided_json": schema},
        "structured_outputs.json": {"structured_outputs": {"json": json.dumps(schema)}},
        "response_format.json_schema.schema": {
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}
        },
        "response_format.schema": {"response_format": {**FORMAT, "schema": schema}},
    }.items():
        got = ask(server, CHAT, **change)
        param, message = error_of(got)
        assert (got.status_code, param) == (400, word)
        assert message.startswith(f"{word}: ")
        assert "/properties/a" in message


ODD = {
    "type": "object",
    "self": {"vendor": "x"},
    "properties": {"a": {"type": "string", "format": "city", "propertyOrder": 1}},
    "javaType": "A",
}
ODD_NAMES = ["format.city", "javaType", "propertyOrder", "self"]
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"schema": ODD}}
ODD_TOOL = {"type": "function", "function": {"name": "f", "parameters": ODD}}
FORCED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "change", "place"),
    [
        (CHAT, {"response_format": JSON_SCHEMA}, "response_format.json_schema.schema"),
        (COMPLETE, {"guided_json": ODD}, "guided_json"),
        (SIMPLE, {"structured_outputs": {"json": ODD}}, "structured_outputs.json"),
        (RESPONSES, {"text": {"format": {**FORMAT, "schema": ODD}}}, "text.format.schema"),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": ODD}}},
            "output_config.format.schema",
        ),
        (CHAT, {"tools": [ODD_TOOL], "tool_choice": "required"}, "tools.0.function.parameters"),
        (CHAT, {"tools": [ODD_TOOL], "tool_choice": FORCED}, "tools.0.function.parameters"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_keywords_that_are_not_enforced_are_named_in_a_header(server, path, change, place, stream):
    got = ask(server, path, **change, stream=stream)
    assert got.status_code == 200, got.text
    named = got.headers["x-quire-ignored"].split(",")
    assert [one for one in named if one.startswith(place)] == [f"{place}.{n}" for n in ODD_NAMES]


def test_strict_refuses_keywords_that_are_not_enforced(server):
    for schema in (ODD, {"type": "array", "items": {"type": "string"}, "uniqueItems": True}):
        inner = {"name": "n", "strict": True, "schema": schema}
        got = ask(server, CHAT, response_format={"type": "json_schema", "json_schema": inner})
        param, message = error_of(got)
        assert (got.status_code, param) == (400, "response_format.json_schema.schema")
        assert "strict is true" in message
        tool = {"name": "f", "strict": True, "parameters": {"properties": {"a": schema}}}
        wanted = [{"type": "function", "function": tool}]
        got = ask(server, CHAT, tools=wanted, tool_choice="required")
        assert (got.status_code, error_of(got)[0]) == (400, "tools[0].function.parameters")
    plain = {"name": "n", "strict": True, "schema": {**OBJECT, "title": "t", "description": "d"}}
    got = ask(server, CHAT, response_format={"type": "json_schema", "json_schema": plain})
    assert got.status_code == 200


def test_a_strict_server_refuses_keywords_that_are_not_enforced(tokenizer):
    with Server(tokenizer, options=ServerOptions(strict=True)).running() as running:
        got = ask(running, CHAT, guided_json=ODD)
        assert (got.status_code, error_of(got)[0]) == (400, "guided_json")
        assert "format.city" in error_of(got)[1]
        running.wait_idle()


def test_an_api_process_rewrites_no_schema(own, monkeypatch):
    """Compile workers do, under limits of their own: its event loop serves other streams."""
    monkeypatch.setattr(rewrite, "SchemaWriter", None)
    monkeypatch.setattr(dfa, "RegexDfa", None)
    ways = [
        {"properties": {f"k{n}": {"type": "integer"}}, "required": [f"k{n}"]} for n in range(60)
    ]
    schema = {"oneOf": ways, "not": {"pattern": "a|b"}, "patternProperties": {"(a+)+$": {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"oneOf": ways[:2]}}}
    for path in BASE:
        assert ask(own, path, guided_json=schema).status_code == 200
    for choice in ("required", FORCED):
        got = ask(own, CHAT, tools=[tool], tool_choice=choice)
        assert got.status_code == 200, got.text


def test_a_schema_that_a_worker_refuses_is_named_by_its_field(own):
    own.model.bound.outcome = RequestError("the JSON schema, at /oneOf: too much")
    got = ask(own, CHAT, guided_json=OBJECT)
    assert (got.status_code, error_of(got)[0]) == (400, "guided_json")
    got = ask(own, CHAT, tools=[TOOL], tool_choice="required")
    assert (got.status_code, error_of(got)[0]) == (400, "tools")
    assert "at /oneOf" in error_of(got)[1]


def test_nothing_is_generated_where_the_prompt_is_only_scored(own):
    own.model.bound.outcome = RequestError("never asked for")
    got = ask(own, COMPLETE, max_tokens=0, echo=True, guided_json=OBJECT)
    assert got.status_code == 200
    got = ask(own, COMPLETE, max_tokens=0, echo=True, guided_json="{")
    assert got.status_code == 400


# -- answers ----------------------------------------------------------------------------------


def texts(path, got):
    body = got.json()
    if path == RESPONSES:
        return [body["output"][0]["content"][0]["text"]]
    if path == MESSAGES:
        return [body["content"][0]["text"]]
    if path == SIMPLE:
        return [text.removeprefix("Hi") for text in body["text"]]
    return [c["text"] if path == COMPLETE else c["message"]["content"] for c in body["choices"]]


@pytest.mark.parametrize("path", BASE)
def test_the_text_is_whole_to_its_last_token(own, path):
    """Nothing is cut off as an end token where the form ended the text."""
    got = ask(own, path, guided_json=OBJECT)
    assert texts(path, got) == [own.model.bound.texts[0]]


@pytest.mark.parametrize("end", ["stop", "length"])
@pytest.mark.parametrize("path", [CHAT, COMPLETE, RESPONSES, MESSAGES])
def test_how_a_text_ended_is_said_in_each_dialect(own, path, end):
    own.model.bound.end = end
    body = ask(own, path, guided_json=OBJECT).json()
    if path == RESPONSES:
        said = body["status"]
        reason = (body["incomplete_details"] or {}).get("reason")
        assert (said, reason) == {
            "stop": ("completed", None),
            "length": ("incomplete", "max_output_tokens"),
        }[end]
    elif path == MESSAGES:
        assert body["stop_reason"] == {"stop": "end_turn", "length": "max_tokens"}[end]
    else:
        assert body["choices"][0]["finish_reason"] == end


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("stream", [False, True])
def test_each_of_several_answers_has_the_form(own, path, stream):
    with openai.OpenAI(base_url=f"{own.url}/v1", api_key="x", max_retries=0) as client:
        create = client.chat.completions.create if path == CHAT else client.completions.create
        change = {"extra_body": {"guided_json": OBJECT}, "n": 2, "stream": stream}
        got = create(model="tiny", **BASE[path], **change)
        said = ["", ""]
        for chunk in got if stream else [got]:
            for one in chunk.choices:
                message = one.text if path == COMPLETE else None
                if message is None:
                    message = (one.delta if stream else one.message).content
                said[one.index] += message or ""
    assert said == own.model.bound.texts


def test_each_of_several_prompts_has_the_form(own):
    got = ask(own, COMPLETE, prompt=["a", "b"], guided_json=OBJECT)
    assert texts(COMPLETE, got) == [own.model.bound.texts[0]] * 2
    got = httpx.post(
        f"{own.url}/v1/chat/completions/batch",
        json={"messages": [HELLO, HELLO], "response_format": FORMAT},
    )
    assert texts(CHAT, got) == [own.model.bound.texts[0]] * 2


def test_a_batch_file_has_forms_and_faults(own, tmp_path):
    lines = [{"response_format": FORMAT}, {"guided_regex": "("}, {"guided_json": OBJECT, "n": 2}]
    asked = [
        {"custom_id": str(i), "method": "POST", "url": CHAT, "body": {**BASE[CHAT], **line}}
        for i, line in enumerate(lines)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, asked)))
    words = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main(["run-batch", *words, "--url", f"{own.url}/v1"]) == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    said = [one["response"]["body"].get("choices", ()) for one in found]
    assert [[c["message"]["content"] for c in one] for one in said] == [
        own.model.bound.texts[:1],
        [],
        own.model.bound.texts,
    ]
    assert found[1]["error"]["param"] == "guided_regex"


class Answer(pydantic.BaseModel):
    a: int


def test_the_official_client_parses_into_a_class(own):
    with openai.OpenAI(base_url=f"{own.url}/v1", api_key="x", max_retries=0) as client:
        got = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Answer)
        assert got.choices[0].message.parsed == Answer(a=1)
        asked = {"model": "tiny", "messages": HELLO, "response_format": Answer}
        with client.chat.completions.stream(**asked) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == Answer(a=1)
        got = client.responses.parse(model="tiny", input="Hi", text_format=Answer)
        assert got.output_parsed == Answer(a=1)


# -- what the engine finds out ----------------------------------------------------------------


def streamed(path):
    return [{}] if path == SIMPLE else [{}, {"stream": True}]


@pytest.mark.parametrize("path", [CHAT, COMPLETE, RESPONSES, MESSAGES])
def test_a_grammar_that_fails_is_a_fault_of_the_request(own, path):
    own.model.bound.outcome = RequestError("this takes more than 10 s to compile")
    for stream in streamed(path):
        got = ask(own, path, guided_json=OBJECT, **stream)
        assert got.status_code == 400, got.text
        assert "guided_json: this takes more than 10 s" in got.json()["error"]["message"]
        assert path == MESSAGES or got.json()["error"]["param"] == "guided_json"


@pytest.mark.parametrize(
    ("path", "word", "given"),
    [
        (CHAT, "max_completion_tokens", {"max_completion_tokens": 2}),
        (CHAT, "max_tokens", {"max_tokens": 2}),
        (COMPLETE, "max_tokens", {"max_tokens": 2}),
        (RESPONSES, "max_output_tokens", {"max_output_tokens": 2}),
        (MESSAGES, "max_tokens", {"max_tokens": 2}),
    ],
)
def test_fewer_tokens_than_any_whole_text_takes_are_refused(own, path, word, given):
    for stream in streamed(path):
        got = ask(own, path, response_format=FORMAT, **given, **stream)
        message = got.json()["error"]["message"]
        assert got.status_code == 400, got.text
        assert message.startswith(f"{word}=2 ")
        assert "has 3 tokens" in message
        assert path == MESSAGES or got.json()["error"]["param"] == word
    given = dict.fromkeys(given, 3)
    own.model.bound.texts = ["{ }"]
    assert ask(own, path, response_format=FORMAT, **given).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETE, RESPONSES, MESSAGES])
def test_a_fault_that_is_found_late_is_an_event(own, path):
    object.__setattr__(own.services, "early_error_wait_s", 0.01)
    own.model.bound.has_outcomes = False
    own.model.bound.outcome = RequestError("too much")
    change = {**BASE[path], "guided_json": OBJECT, "stream": True}
    with httpx.stream("POST", own.url + path, json=change, timeout=60) as got:
        assert got.status_code == 200
        own.model.bound.settle()
        said = "".join(got.iter_text())
    assert "guided_json: too much" in said
    assert "invalid_request_error" in said or "BadRequestError" in said or "failed" in said


def test_heads_wait_longer_than_a_grammar_may_take(tokenizer):
    given = engine_config(len(tokenizer))
    given = replace(given, structured=replace(given.structured, compile_seconds=30.0))
    orders = RunApiProcess(options={}, folder="", index=0, count=1, socket_fds=[], log_level="")
    state = api_process.build_app_state(given, tokenizer, ServerOptions(), None, orders=orders)
    assert state.early_error_wait_s == 45


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_a_grammar_is_compiled_leaves_nothing_behind(own, stream):
    own.model.bound.has_outcomes = False
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            own.url + CHAT,
            json={**BASE[CHAT], "guided_json": OBJECT, "stream": stream},
            timeout=0.1,
        )
    own.wait_idle()
    assert own.model.bound.held == 0


def test_a_server_without_a_tokenizer_gives_texts_no_form(tokenizer):
    own = Server(tokenizer, services={})
    object.__setattr__(own.services, "tokenizer", None)
    with own.running():
        got = ask(own, COMPLETE, prompt=[5, 6], guided_json=OBJECT)
        assert (got.status_code, error_of(got)[0]) == (400, "guided_json")
        own.wait_idle()
