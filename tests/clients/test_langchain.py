"""LangChain's ChatOpenAI, with nothing changed but base_url, key and model."""

import asyncio
import json

import openai
import pytest

from tests.clients.cases import CITY, QUESTIONS, TOOL, WEATHER, check_tool_text
from tests.clients.conftest import KEY, MODEL

pytest.importorskip("langchain_openai", reason="pip install 'quire-llm[clients]'")

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI


def model(served, **settings):
    settings = {"temperature": 0, "max_retries": 0, **settings}
    return ChatOpenAI(base_url=served.v1, api_key=KEY, model=MODEL, **settings)


@pytest.mark.parametrize("text", QUESTIONS.values(), ids=QUESTIONS)
def test_a_stream_says_what_invoke_says(served, text):
    chat = model(served, stream_usage=True)
    whole = chat.invoke(text)
    built = None
    for chunk in chat.stream(text):
        built = chunk if built is None else built + chunk
    assert built.content == whole.content
    assert built.usage_metadata == whole.usage_metadata
    assert built.response_metadata["finish_reason"] == "stop"
    assert whole.response_metadata["model_name"] == MODEL


def test_batches_keep_their_order(served):
    chat = model(served)
    got = chat.batch(list(QUESTIONS.values()), config={"max_concurrency": 4})
    assert [one.content for one in got] == [chat.invoke(t).content for t in QUESTIONS.values()]


def test_async_streams(served):
    async def main():
        chat = model(served)
        whole = await chat.ainvoke("What is 31 + 44?")
        said = "".join([chunk.content async for chunk in chat.astream("What is 31 + 44?")])
        assert said == whole.content

    asyncio.run(main())


def test_bound_tools_reach_the_model(served):
    bound = model(served).bind_tools([TOOL], tool_choice="none")
    whole = bound.invoke(WEATHER)
    check_tool_text(whole.content)
    assert "".join(chunk.content for chunk in bound.stream(WEATHER)) == whole.content


def test_a_conversation_with_a_tool_result(served):
    call = {"name": "get_weather", "args": {"city": CITY}, "id": "call_1", "type": "tool_call"}
    messages = [
        SystemMessage("You are a helpful assistant."),
        HumanMessage(WEATHER),
        AIMessage("", tool_calls=[call]),
        ToolMessage(json.dumps({"temperature": 21}), tool_call_id="call_1"),
    ]
    assert "21" in model(served).bind_tools([TOOL], tool_choice="none").invoke(messages).content


def test_logprobs_and_stop_are_passed(served):
    chat = model(served)
    got = chat.bind(logprobs=True, top_logprobs=2, stop=["is"]).invoke(QUESTIONS["a capital"])
    content = got.response_metadata["logprobs"]["content"]
    assert len(content) == got.usage_metadata["output_tokens"]
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert "is" not in got.content


def test_extra_fields_go_through(served):
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "top_k": 1}
    got = model(served, extra_body=extra).invoke(QUESTIONS["a capital"])
    assert "<think>" not in got.content
    assert CITY in got.content


def test_several_generations(served):
    chat = model(served, n=3, temperature=1.2, seed=5)
    got = chat.generate([[HumanMessage("Tell me a joke.")]])
    assert len(got.generations[0]) == 3


def test_plain_completions(served):
    plain = OpenAI(
        base_url=served.v1, api_key=KEY, model=MODEL, temperature=0, max_tokens=20, max_retries=0
    )
    whole = plain.invoke("Once upon a time")
    assert "".join(plain.stream("Once upon a time")) == whole


def test_errors_are_those_of_the_openai_client(served):
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(base_url=served.v1, api_key=KEY, model="other", max_retries=0).invoke("a")
    with pytest.raises(openai.AuthenticationError):
        ChatOpenAI(base_url=served.v1, api_key="no", model=MODEL, max_retries=0).invoke("a")
    with pytest.raises(openai.BadRequestError):
        model(served, temperature=3).invoke("a")
