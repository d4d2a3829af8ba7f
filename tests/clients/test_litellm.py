"""litellm, by its providers for servers like this one."""

import asyncio
import os

import pytest

from tests.clients.cases import QUESTIONS, TOOL, WEATHER, ask, check_tool_text
from tests.clients.conftest import KEY, MODEL

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no call home when imported
litellm = pytest.importorskip("litellm", reason="pip install 'quire-llm[clients]'")

PROVIDERS = ["openai", "hosted_vllm"]
TOOLS = [{"type": "function", "function": TOOL}]


def asked(served, provider, text, **extra):
    return {
        "model": f"{provider}/{MODEL}",
        "api_base": served.v1,
        "api_key": KEY,
        "messages": ask(text),
        "temperature": 0,
        "num_retries": 0,
        "timeout": 60,
        **extra,
    }


def content(answer):
    return [choice.message.content for choice in answer.choices]


def parts(answer):
    """Reasoning and content: litellm may cut a <think> block out of a whole answer itself."""
    message = answer.choices[0].message
    return (getattr(message, "reasoning_content", None) or "", message.content or "")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("text", QUESTIONS.values(), ids=QUESTIONS)
def test_a_stream_says_what_the_whole_answer_says(served, provider, text):
    body = asked(served, provider, text)
    whole = litellm.completion(**body)
    chunks = list(litellm.completion(**body, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks)
    assert parts(built) == parts(whole)
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert built.usage.completion_tokens == whole.usage.completion_tokens
    assert built.usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("provider", PROVIDERS)
def test_async_completions(served, provider):
    async def main():
        body = asked(served, provider, "What is 31 + 44?")
        whole = await litellm.acompletion(**body)
        stream = await litellm.acompletion(**body, stream=True)
        said = ""
        async for chunk in stream:
            delta = chunk.choices[0].delta
            said += delta.content or ""
        assert said.endswith(content(whole)[0])

    asyncio.run(main())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_tools_logprobs_n_and_stop_go_through(served, provider):
    tools = litellm.completion(**asked(served, provider, WEATHER, tools=TOOLS, tool_choice="none"))
    check_tool_text(content(tools)[0])
    extra = dict(n=2, temperature=1, seed=3, logprobs=True, top_logprobs=2)
    several = litellm.completion(**asked(served, provider, "Tell me a joke.", **extra))
    assert len(several.choices) == 2
    assert len(several.choices[0].logprobs.content) > 0
    stopped = litellm.completion(**asked(served, provider, "What is 31 + 44?", stop=["="]))
    assert all("=" not in text for text in content(stopped))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_errors_are_its_own(served, provider):
    for change, kind in (
        (dict(temperature=-1), litellm.BadRequestError),
        (dict(model=f"{provider}/other"), litellm.NotFoundError),
        (dict(api_key="wrong"), litellm.AuthenticationError),
    ):
        with pytest.raises(kind):
            litellm.completion(**{**asked(served, provider, "a"), **change})


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_timeout_is_a_timeout_and_ends_the_run(served, provider):
    body = asked(served, provider, "a", max_tokens=3000, timeout=0.3)
    with pytest.raises(litellm.Timeout):
        litellm.completion(**body, extra_body={"ignore_eos": True})
    served.wait_idle()


def test_text_completions(served):
    body = {
        "model": f"text-completion-openai/{MODEL}",
        "api_base": served.v1,
        "api_key": KEY,
        "prompt": "Once upon a time",
        "max_tokens": 20,
        "temperature": 0,
    }
    whole = litellm.text_completion(**body).choices[0].text
    pieces = litellm.text_completion(**body, stream=True)
    assert "".join(c.choices[0].text or "" for c in pieces) == whole
