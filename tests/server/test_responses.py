import asyncio
import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from quire.server.options import ServerOptions
from quire.server.routes.response_store import ResponseStore, StoredResponse
from tests.server.harness import Server

HELLO = "Say something nice."
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    "strict": None,
}
EVENTS = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def keeper(tokenizer):
    """A server that keeps responses, a few, and takes its time over a step."""
    options = ServerOptions(enable_responses_store=True, responses_store_size=3)
    with Server(tokenizer, options=options, step_s=0.002).running() as running:
        yield running


@pytest.fixture(scope="module")
def kept(keeper):
    with openai.OpenAI(
        base_url=f"{keeper.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_stays_behind_in_the_keeper(request):
    yield
    if "keeper" in request.fixturenames:
        request.getfixturevalue("keeper").wait_idle()


def user(text):
    return [{"role": "user", "content": text}]


def streamed(http, **body):
    """The events as (name of the event line, its data), each in the form of the official types."""
    with http.stream("POST", "/v1/responses", json={"model": "tiny", "stream": True, **body}) as r:
        assert r.status_code == 200, r.read()
        assert r.headers["content-type"].startswith("text/event-stream")
        raw = r.read().decode()
    return parse(raw)


def parse(raw):
    blocks = raw.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        first, second = block.split("\n")
        found.append((first.removeprefix("event: "), json.loads(second.removeprefix("data: "))))
    for _, data in found:
        EVENTS.validate_python(data)
    return found


# -- one answer -------------------------------------------------------------------------------


def test_an_answer_is_what_the_official_type_says(client, server):
    got = client.responses.create(model="tiny", input=HELLO)
    Response.model_validate(got.model_dump())
    assert got.id.startswith("resp")
    assert got.object == "response"
    assert got.status == "completed"
    assert got.model == "tiny"
    assert got.output_text == server.answer(user(HELLO))
    assert [one.type for one in got.output] == ["message"]
    assert got.output[0].status == "completed"
    assert got.error is None
    assert got.completed_at >= got.created_at


def test_usage_counts_as_the_chat_route_does(client):
    chat = client.chat.completions.create(model="tiny", messages=user(HELLO)).usage
    got = client.responses.create(model="tiny", input=HELLO).usage
    assert (got.input_tokens, got.output_tokens) == (chat.prompt_tokens, chat.completion_tokens)
    assert got.total_tokens == chat.total_tokens
    assert got.output_tokens_details.reasoning_tokens == 0


def test_tokens_from_the_prefix_cache_are_told(client):
    text = "the same long words again and again"
    client.responses.create(model="tiny", input=text)
    again = client.responses.create(model="tiny", input=text).usage
    assert 0 < again.input_tokens_details.cached_tokens < again.input_tokens


def test_instructions_stand_before_the_input(client, server):
    got = client.responses.create(model="tiny", instructions="Be kind.", input=HELLO)
    assert got.instructions == "Be kind."
    expected = [{"role": "system", "content": "Be kind."}, *user(HELLO)]
    assert got.output_text == server.answer(expected)


def test_a_whole_conversation_goes_in_as_items(client, server):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "2", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": "and one more?"},
    ]
    got = client.responses.create(model="tiny", input=items)
    expected = [*user("1 + 1?"), {"role": "assistant", "content": "2"}, *user("and one more?")]
    assert got.output_text == server.answer(expected)


def test_what_was_asked_is_told_back(client):
    got = client.responses.create(
        model="tiny",
        input=HELLO,
        metadata={"run": "7"},
        tools=[TOOL],
        tool_choice="none",
        temperature=0.5,
        top_p=0.9,
        user="me",
        max_output_tokens=50,
        truncation="auto",
    )
    assert got.metadata == {"run": "7"}
    assert (got.temperature, got.top_p) == (0.5, 0.9)
    assert got.tools[0].name == "add"
    assert (got.tool_choice, got.user, got.truncation) == ("none", "me", "auto")
    assert got.max_output_tokens == 50


def test_what_was_not_asked_is_told_as_it_was_used(client):
    got = client.responses.create(model="tiny", input=HELLO)
    assert (got.temperature, got.top_p) == (1.0, 1.0)
    assert got.service_tier == "default"
    assert got.max_output_tokens is None


def test_the_limit_of_tokens_makes_it_incomplete(client):
    got = client.responses.create(model="tiny", input=HELLO, max_output_tokens=3)
    assert got.status == "incomplete"
    assert got.incomplete_details.reason == "max_output_tokens"
    assert got.output[0].status == "incomplete"
    assert got.usage.output_tokens == 3
    assert got.completed_at is None


def test_tools_reach_the_template_in_the_form_of_the_chat_route(client, server):
    got = client.responses.create(model="tiny", input=HELLO, tools=[TOOL])
    function = {key: TOOL[key] for key in ("name", "description", "parameters")}
    text = server.tokenizer.template().render(
        user(HELLO), [{"type": "function", "function": function}]
    )
    ids = server.tokenizer.encode(text, add_special_tokens=False)
    assert got.usage.input_tokens == len(ids)
    assert got.output_text == server.model.text(ids)


def test_logprobs_come_when_they_are_included(client):
    got = client.responses.create(
        model="tiny", input=HELLO, include=["message.output_text.logprobs"], top_logprobs=2
    )
    shown = got.output[0].content[0].logprobs
    assert len(shown) == got.usage.output_tokens
    assert all(len(one.top_logprobs) == 2 for one in shown)
    assert got.top_logprobs == 2


def test_sampling_fields_of_this_engine_are_honoured(client, server):
    whole = server.answer(user(HELLO))
    stop = whole[3:6]
    got = client.responses.create(model="tiny", input=HELLO, extra_body={"stop": [stop]})
    assert got.output_text == whole[: whole.index(stop)]


def test_template_variables_are_honoured(client, server):
    extra = {"chat_template_kwargs": {"shout": True}}
    got = client.responses.create(model="tiny", input=HELLO, extra_body=extra)
    assert got.output_text == server.answer(user(HELLO), shout=True)


# -- a stream ---------------------------------------------------------------------------------


def test_events_come_in_their_order_with_their_numbers(http):
    events = streamed(http, input=HELLO)
    names = [name for name, _ in events]
    deltas = names.count("response.output_text.delta")
    assert deltas >= 1
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [data["type"] for _, data in events] == names
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"max_output_tokens": 9},
        {"stop": ["at", "汉"]},
        {"top_logprobs": 1, "include": ["message.output_text.logprobs"]},
    ],
)
def test_a_stream_ends_in_the_object_that_comes_unstreamed(http, place, extra):
    body = {"input": f"number {place}", "seed": 1, "temperature": 0, **extra}
    whole = http.post("/v1/responses", json={"model": "tiny", **body}).json()
    events = streamed(http, **body)
    last = events[-1][1]["response"]
    for one in (whole, last):
        base = one.pop("id").removeprefix("resp")
        for name in ("created_at", "completed_at"):
            one.pop(name)
        one["usage"].pop("input_tokens_details")  # the second finds more in the cache
        for item in one["output"]:
            assert base[1:] in item.pop("id")
    assert last == whole
    text = "".join(d["delta"] for n, d in events if n == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"]


def test_the_official_stream_helper_reads_it(client, server):
    with client.responses.stream(model="tiny", input=HELLO) as stream:
        seen = [event.type for event in stream]
        got = stream.get_final_response()
    assert seen[0] == "response.created"
    assert got.output_text == server.answer(user(HELLO))


def test_logprobs_are_streamed_with_their_text(http):
    events = streamed(http, input=HELLO, top_logprobs=1)
    shown = [one for n, d in events if n.endswith("text.delta") for one in d["logprobs"]]
    done = next(d for n, d in events if n == "response.output_text.done")
    assert all(len(one["top_logprobs"]) == 1 for one in shown)
    assert done["logprobs"][: len(shown)] == shown
    assert len(done["logprobs"]) == events[-1][1]["response"]["usage"]["output_tokens"]


def test_a_fault_of_the_engine_is_the_last_event(tokenizer):
    with (
        Server(tokenizer, step_s=0.001).running() as broken,
        openai.OpenAI(base_url=f"{broken.url}/v1", api_key="none", max_retries=0) as made,
    ):
        stream = made.responses.create(
            model="tiny", input=HELLO, stream=True, extra_body={"ignore_eos": True}
        )
        events = []
        for event in stream:
            events.append(event)
            if len(events) == 6:
                broken.executor.fail_with = RuntimeError("at /secret/place")
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"
    assert "/secret" not in events[-1].response.error.message


def test_a_client_that_goes_away_ends_its_response(server, http):
    body = {"model": "tiny", "input": HELLO, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/responses", json=body) as response:
        next(response.iter_lines())
    server.wait_idle()


# -- refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": []}, 400, "input"),
        ({"input": [3]}, 400, "input"),
        ({"input": [{"type": "message"}]}, 400, "input"),
        ({"input": [{"role": "user"}]}, 400, "input"),
        ({"input": [{"content": "x"}]}, 400, "input"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, 400, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, 400, "input"),
        ({"input": [{"type": "web_search_call"}]}, 501, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 501, "input"),
        ({"truncation": "maybe"}, 400, "truncation"),
        ({"include": ["everything"]}, 400, "include"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"top_logprobs": 21}, 400, "top_logprobs"),
        ({"temperature": 3}, 400, "temperature"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format.json_schema"),
        ({"text": {"format": {}}}, 400, "text.format.type"),
        ({"tools": [{"type": "web_search_preview"}]}, 501, "tools"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "auto"}, 400, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, 400, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, 501, "tool_choice"),
        ({"reasoning": {"summary": "detailed"}}, 501, "reasoning.summary"),
        ({"prompt": {"id": "pmpt_1"}}, 501, "prompt"),
        ({"conversation": "conv_1"}, 501, "conversation"),
        ({"background": True}, 400, "background"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"model": "other"}, 404, "model"),
        ({"input": 3}, 400, "input"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(http, body, status, param):
    got = http.post("/v1/responses", json={"model": "tiny", "input": HELLO, **body})
    assert got.status_code == status, got.text
    assert got.json()["error"]["param"] == param, got.text


def test_fields_that_change_nothing_are_told(http):
    body = {
        "model": "tiny",
        "input": HELLO,
        "store": True,
        "service_tier": "flex",
        "text": {"verbosity": "low"},
        "prompt_cache_retention": "24h",
        "no_such_field": 1,
    }
    got = http.post("/v1/responses", json=body)
    told = got.headers["x-quire-ignored"].split(",")
    assert sorted(told) == [
        *("no_such_field", "prompt_cache_retention", "service_tier", "store", "text.verbosity")
    ]


# -- the store --------------------------------------------------------------------------------


def test_without_a_store_nothing_is_said_to_be_stored(client):
    got = client.responses.create(model="tiny", input=HELLO, store=True)
    assert got.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError, match="--enable-responses-store"):
        client.responses.retrieve(got.id)


def test_a_kept_response_can_be_had_again_and_forgotten(kept):
    made = kept.responses.create(model="tiny", input=HELLO)
    assert made.to_dict()["store"] is True
    assert kept.responses.retrieve(made.id).to_dict() == made.to_dict()
    kept.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        kept.responses.retrieve(made.id)


def test_a_streamed_response_is_kept_as_well(kept):
    *_, last = kept.responses.create(model="tiny", input=HELLO, stream=True)
    assert kept.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()


def test_a_response_that_failed_is_kept_as_it_was_told(kept):
    late = {"X-Request-Timeout": "0.05"}
    extra = {"ignore_eos": True}
    *_, last = kept.responses.create(
        model="tiny", input=HELLO, stream=True, extra_headers=late, extra_body=extra
    )
    assert last.response.status == "failed"
    assert kept.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()


def test_what_is_not_to_be_stored_is_not(kept):
    made = kept.responses.create(model="tiny", input=HELLO, store=False)
    assert made.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        kept.responses.retrieve(made.id)


def test_the_oldest_goes_when_there_are_too_many(kept):
    made = [kept.responses.create(model="tiny", input=f"number {i}").id for i in range(4)]
    with pytest.raises(openai.NotFoundError):
        kept.responses.retrieve(made[0])
    for one in made[1:]:
        assert kept.responses.retrieve(one).id == one


def test_a_response_goes_on_from_an_earlier_one(kept, keeper):
    first = kept.responses.create(model="tiny", input="one", instructions="Be kind.")
    second = kept.responses.create(
        model="tiny", input="two", instructions="Be brief.", previous_response_id=first.id
    )
    third = kept.responses.create(model="tiny", input="three", previous_response_id=second.id)
    talk = [
        *user("one"),
        {"role": "assistant", "content": first.output_text},
        *user("two"),
    ]
    brief = [{"role": "system", "content": "Be brief."}, *talk]
    assert second.output_text == keeper.answer(brief)
    rest = [*talk, {"role": "assistant", "content": second.output_text}, *user("three")]
    assert third.output_text == keeper.answer(rest)
    assert third.previous_response_id == second.id


def test_an_unknown_earlier_response_is_not_found(kept):
    with pytest.raises(openai.NotFoundError):
        kept.responses.create(model="tiny", input="two", previous_response_id="resp_none")


def wait_for(kept, response_id, *statuses):
    for _ in range(2000):
        got = kept.responses.retrieve(response_id)
        if got.status in statuses:
            return got
    raise AssertionError(got.status)


def test_a_response_of_the_background_goes_on_by_itself(kept, keeper):
    made = kept.responses.create(model="tiny", input=HELLO, background=True)
    assert made.status in ("queued", "in_progress")
    got = wait_for(kept, made.id, "completed")
    assert got.output_text == keeper.answer(user(HELLO))
    assert got.background is True


def test_a_response_of_the_background_can_be_cancelled(kept, keeper):
    made = kept.responses.create(
        model="tiny", input=HELLO, background=True, extra_body={"ignore_eos": True}
    )
    wait_for(kept, made.id, "in_progress")
    got = kept.responses.cancel(made.id)
    assert got.status == "cancelled"
    keeper.wait_idle()
    assert kept.responses.cancel(made.id).status == "cancelled"  # again: it stays as it is
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        kept.responses.create(model="tiny", input="two", previous_response_id=made.id)


def test_a_response_of_the_foreground_cannot_be_cancelled(kept):
    made = kept.responses.create(model="tiny", input=HELLO)
    with pytest.raises(openai.BadRequestError, match="background"):
        kept.responses.cancel(made.id)


def test_a_stream_of_the_background_can_be_taken_up_again(kept, keeper):
    first = []
    stream = kept.responses.create(model="tiny", input=HELLO, background=True, stream=True)
    for event in stream:
        first.append(event)
        if len(first) == 7:
            break
    stream.close()  # the client goes away; the response does not
    assert [e.type for e in first[:3]] == [
        *("response.created", "response.queued", "response.in_progress")
    ]
    made = first[0].response.id
    rest = list(kept.responses.retrieve(made, stream=True, starting_after=6))
    assert [e.sequence_number for e in [*first, *rest]] == list(range(7 + len(rest)))
    assert rest[-1].type == "response.completed"
    assert rest[-1].response.output_text == keeper.answer(user(HELLO))


def test_an_id_that_is_taken_is_not_given_twice(kept):
    named = {"X-Request-Id": "mine"}
    made = [
        kept.responses.create(model="tiny", input=HELLO, extra_headers=named).id for _ in range(2)
    ]
    assert made == ["resp_mine", "resp_mine_2"]
    assert [kept.responses.retrieve(one).id for one in made] == made


def test_background_needs_that_it_may_be_stored(kept):
    with pytest.raises(openai.BadRequestError, match="store"):
        kept.responses.create(model="tiny", input=HELLO, background=True, store=False)


def test_no_more_run_in_the_background_than_may_be_kept(kept, keeper):
    made = [
        kept.responses.create(
            model="tiny", input=HELLO, background=True, extra_body={"ignore_eos": True}
        )
        for _ in range(3)
    ]
    with pytest.raises(openai.RateLimitError):
        kept.responses.create(model="tiny", input=HELLO, background=True)
    for one in made:
        kept.responses.cancel(one.id)
    keeper.wait_idle()


def test_a_fault_of_the_background_is_told_to_who_asks(tokenizer):
    options = ServerOptions(enable_responses_store=True)
    with Server(tokenizer, options=options).running() as broken:
        broken.executor.fail_with = RuntimeError("broken")
        with openai.OpenAI(base_url=f"{broken.url}/v1", api_key="none", max_retries=0) as made:
            asked = made.responses.create(model="tiny", input=HELLO, background=True)
            got = wait_for(made, asked.id, "failed")
    assert got.error.code == "server_error"


def ended(number, text):
    body = {"id": f"resp_{number}", "background": False, "status": "completed", "output": text}
    made = StoredResponse(body)
    made.mark_ended([])
    return made


def test_what_is_kept_weighs_no_more_than_it_may():
    store = ResponseStore(most=100, max_bytes=5000)
    for number in range(8):
        store.add(ended(number, "x" * 1000))
    assert len(store) == 4
    with pytest.raises(HTTPException):
        store.get("resp_3")
    assert store.get("resp_4").size_bytes > 1000


def test_what_still_runs_is_never_dropped():
    store = ResponseStore(most=2)
    running = StoredResponse({"id": "resp_run", "background": True, "status": "in_progress"})
    store.add(running)
    for number in range(5):
        store.add(ended(number, ""))
    assert store.get("resp_run") is running
    assert len(store) == 3


def test_a_stream_that_is_slow_to_come_is_kept_alive():
    async def watch():
        kept = StoredResponse(
            {"id": "resp_1", "background": True, "status": "queued"}, keeps_events=True
        )
        kept.add_events([b"first"])
        events = kept.events(0, 0.01)
        seen = [await anext(events), await anext(events)]
        kept.add_events([b"second"])
        kept.mark_ended([])
        return seen + [one async for one in events]

    assert asyncio.run(watch()) == [b"first", b": keep-alive\n\n", b"second"]
