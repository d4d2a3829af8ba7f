"""Constraints of outputs, offline: every form of the option, on the embedded model."""

import json
import subprocess
import sys

import pydantic
import pytest

from quire import LLM, SamplingParams
from quire.core.params import BeamSearchParams, GuidedDecodingParams, StructuredOutputsParams
from quire.errors import RequestError, Unsupported
from quire.llm.legacy_guided import GuidedDecodingRequest

CAPITAL = "What is the capital of France?"
ASK = [{"role": "user", "content": CAPITAL}]
DIRECT = {"enable_thinking": False}
CITIES = StructuredOutputsParams(choice=["Rome", "Paris"])


class City(pydantic.BaseModel):
    name: str
    big: bool


@pytest.fixture(scope="module")
def llm():
    return LLM("embedded", max_model_len=1024, kv_cache_memory_bytes=1 << 26)


@pytest.fixture(autouse=True)
def _clean(llm):
    yield
    stats = llm.llm_engine.engine.stats()
    assert (stats.running, stats.waiting, stats.held_blocks) == (0, 0, 0)


def params(form=CITIES, **more):
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 60, "structured_outputs": form, **more}
    )


def texts(outputs):
    return [one.text for output in outputs for one in output.outputs]


def chat(llm, form, **named):
    return texts(llm.chat(ASK, params(form), use_tqdm=False, chat_template_kwargs=DIRECT, **named))[
        0
    ]


def test_chat_answers_in_the_form(llm):
    assert chat(llm, CITIES) == "Paris"
    assert chat(llm, {"regex": r"It is [A-Z][a-z]+\."}) == "It is Paris."
    assert json.loads(chat(llm, {"json_object": True})) is not None


def test_a_class_of_pydantic_is_a_schema(llm):
    text = chat(llm, StructuredOutputsParams(json=City))
    assert City.model_validate_json(text)
    assert chat(llm, StructuredOutputsParams(json=City.model_json_schema())) == text
    assert chat(llm, StructuredOutputsParams(json=json.dumps(City.model_json_schema()))) == text


def test_each_prompt_may_have_a_form_of_its_own(llm):
    digits = params(StructuredOutputsParams(regex="[0-9]{2}"))
    given = [params(), params(None, max_tokens=5), digits]
    bound, free, number = llm.generate([CAPITAL] * 3, given, use_tqdm=False)
    assert texts([bound])[0] in CITIES.choice
    assert texts([free]) == texts(llm.generate(CAPITAL, params(None, max_tokens=5)))
    assert texts([number])[0].isdigit()
    assert [one.outputs[0].finish_reason for one in (bound, free, number)] == [
        "stop",
        "length",
        "stop",
    ]


def test_each_of_several_outputs_has_the_form(llm):
    form = StructuredOutputsParams(regex="[a-z]{3,9}")
    several = params(form, n=4, temperature=1.5, seed=3, best_of=6)
    (output,) = llm.generate(CAPITAL, several, use_tqdm=False)
    assert len(output.outputs) == 4
    assert all(one.text.isalpha() and 3 <= len(one.text) <= 9 for one in output.outputs)


def test_enqueued_requests_have_it_too(llm):
    llm.enqueue([CAPITAL, "The capital of Italy is"], params())
    llm.enqueue_chat(ASK, params(), chat_template_kwargs=DIRECT)
    assert all(text in CITIES.choice for text in texts(llm.wait_for_completion()))


def test_steps_by_hand_have_it_too(llm):
    engine = llm.llm_engine
    engine.add_request("a", CAPITAL, params())
    done = []
    while engine.has_unfinished_requests():
        done += engine.step()
    assert texts(done)[-1] in CITIES.choice


@pytest.mark.parametrize(
    "options",
    [
        {"guided_choice": ["Rome", "Paris"]},
        GuidedDecodingRequest(guided_choice=["Rome", "Paris"]),
        {
            "guided_json": None,
            "guided_choice": ["Rome", "Paris"],
            "guided_decoding_backend": "auto",
        },
    ],
)
def test_words_of_older_releases_bind_all_outputs(llm, options):
    got = llm.generate([CAPITAL] * 2, params(None), guided_options_request=options)
    assert set(texts(got)) <= set(CITIES.choice)
    older = params(None, guided_decoding=GuidedDecodingParams(choice=["Rome", "Paris"]))
    assert texts(llm.generate([CAPITAL] * 2, older)) == texts(got)


def test_what_was_given_is_not_written_to(llm):
    given = params(GuidedDecodingParams(choice=["Rome"], backend="auto"))
    before = repr(given)
    llm.generate(CAPITAL, given, guided_options_request=None)
    llm.generate(CAPITAL, params(None), guided_options_request={"guided_choice": ["Rome"]})
    assert repr(given) == before


@pytest.mark.parametrize("thinks", [True, False])
def test_the_form_begins_behind_the_reasoning(llm, thinks):
    (output,) = llm.chat(
        ASK,
        params(max_tokens=300),
        reasoning_parser="qwen3",
        chat_template_kwargs={"enable_thinking": thinks},
        use_tqdm=False,
    )
    one = output.outputs[0]
    assert one.text.strip() == "Paris"
    assert bool(one.reasoning) == thinks


REFUSED = [
    (StructuredOutputsParams(json={"$ref": "https://example.com/a"}), "structured_outputs.json"),
    (StructuredOutputsParams(regex="(a"), "structured_outputs.regex"),
    (StructuredOutputsParams(grammar="root ::= nowhere"), "structured_outputs.grammar"),
    (StructuredOutputsParams(choice=["a"], backend="outlines"), "structured_outputs.choice"),
    (StructuredOutputsParams(choice=["a"], backend="no_such"), "structured_outputs.choice"),
]


@pytest.mark.parametrize(("form", "param"), REFUSED)
def test_what_is_wrong_raises_and_nothing_runs(llm, form, param):
    with pytest.raises(RequestError) as caught:
        llm.generate([CAPITAL] * 3, [params(), params(), params(form)], use_tqdm=False)
    assert caught.value.param == param
    assert llm.wait_for_completion() == []


def test_fewer_tokens_than_any_whole_text_takes_are_refused(llm):
    with pytest.raises(RequestError, match=r"has [0-9]+ tokens") as caught:
        llm.generate(CAPITAL, params(StructuredOutputsParams(json=City), max_tokens=2))
    assert caught.value.param == "max_tokens"


def test_a_beam_search_has_no_form(llm):
    beams = BeamSearchParams(beam_width=2, max_tokens=4, structured_outputs=CITIES)
    with pytest.raises(Unsupported):
        llm.beam_search([CAPITAL], beams)
    plain = BeamSearchParams(beam_width=2, max_tokens=4)
    with pytest.raises(Unsupported):
        llm.generate(CAPITAL, plain, guided_options_request={"guided_choice": ["a"]})


@pytest.mark.parametrize(
    "options", [{"guided_jsn": {}}, "x", {"guided_json": {}, "guided_regex": "a"}]
)
def test_empty_or_too_long_words_are_refused(llm, options):
    with pytest.raises(RequestError):
        llm.generate(CAPITAL, params(None), guided_options_request=options)
    with pytest.raises(RequestError, match="not both"):
        llm.generate(CAPITAL, params(), guided_options_request={"guided_choice": ["a"]})


def test_without_a_tokenizer_there_is_no_form():
    bare = LLM("embedded", skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24)
    with pytest.raises(RequestError, match="tokenizer"):
        bare.generate({"prompt_token_ids": [5, 6]}, params())


ASYNC = """
import asyncio
from quire import AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.core.params import StructuredOutputsParams as Form

async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs("embedded", max_model_len=512))
    try:
        form = Form(choice=["Rome", "Paris"])
        params = SamplingParams(temperature=0, structured_outputs=form)
        async for output in engine.generate("The capital is", params, "a"):
            pass
        assert output.outputs[0].text in form.choice, output
        for bad in (Form(regex="a{40}"), Form(json={"$ref": "https://example.com/a"})):
            params = SamplingParams(max_tokens=3, structured_outputs=bad)
            try:
                async for output in engine.generate("The capital is", params, "b"):
                    pass
            except ValueError as error:
                print(type(error).__name__, error.param)
    finally:
        engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.usefixtures("forked")
def test_the_engine_in_a_process_of_its_own_keeps_to_it_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ASYNC)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *("RequestError", "max_tokens"),
        *("RequestError", "structured_outputs.json"),
    ]
