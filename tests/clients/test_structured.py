"""Answers that have a form, through the clients people have, from a model that really answers."""

import json
import re
from enum import Enum
from typing import Literal

import httpx
import openai
import pydantic
import pytest

from tests.clients.cases import ask
from tests.clients.conftest import KEY, MODEL

DIRECT = {"chat_template_kwargs": {"enable_thinking": False}}
TEXT = "Lena Fischer bought 3 of the red lamp for 45 dollars."
EXTRACT = f"Extract name, product, quantity and price as JSON: {TEXT}"
CAPITAL = "What is the capital of France?"


class Order(pydantic.BaseModel):
    name: str
    product: str
    quantity: int
    price: float


LENA = Order(name="Lena Fischer", product="red lamp", quantity=3, price=45)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Part(pydantic.BaseModel):
    id: int = pydantic.Field(ge=10, lt=100)
    code: str = pydantic.Field(pattern="^[A-Z]{2}-[0-9]{2}$")
    colours: list[Colour] = pydantic.Field(min_length=1, max_length=3)


class Thing(pydantic.BaseModel):
    """Much of what people write in such classes."""

    kind: Literal["box", "bag"]
    label: str | None = pydantic.Field(max_length=20)
    first: Part
    others: list[Part] = pydantic.Field(max_length=2)
    size: int | Literal["large"]
    is_new: bool


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served.v1, api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def asked(text=EXTRACT, **change):
    return {
        "model": MODEL,
        "messages": ask(text),
        "temperature": 0,
        "max_tokens": 300,
        "extra_body": DIRECT,
        **change,
    }


# -- the official client ------------------------------------------------------------------------


def test_a_class_is_parsed_into(client):
    got = client.chat.completions.parse(**asked(), response_format=Order)
    assert got.choices[0].message.parsed == LENA
    assert got.choices[0].finish_reason == "stop"
    assert client.beta.chat.completions.parse(**asked(), response_format=Order) is not None


def test_a_stream_says_what_the_whole_answer_says(client):
    whole = client.chat.completions.parse(**asked(), response_format=Order)
    with client.chat.completions.stream(**asked(), response_format=Order) as stream:
        kinds = {event.type for event in stream}
        built = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.choices[0].message.parsed == LENA


def test_responses_are_parsed_too(client):
    say = {"model": MODEL, "input": EXTRACT, "temperature": 0, "extra_body": DIRECT}
    whole = client.responses.parse(**say, text_format=Order)
    assert whole.output_parsed == LENA
    with client.responses.stream(**say, text_format=Order) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == LENA


@pytest.mark.parametrize("seed", range(2))
def test_each_of_several_answers_fits_a_class_of_many_kinds(client, seed):
    change = {"n": 3, "seed": seed, "temperature": 1.5, "max_tokens": 600}
    got = client.chat.completions.parse(**asked("Make one up.", **change), response_format=Thing)
    assert len(got.choices) == 3
    for one in got.choices:
        assert one.message.parsed is not None, one
        assert not re.search(r"\s{3}", re.sub(r'"(\\.|[^"\\])*"', '""', one.message.content))


@pytest.mark.parametrize("kind", ["text", "json_object"])
def test_json_mode_needs_no_schema(client, kind):
    got = client.chat.completions.create(**asked(CAPITAL), response_format={"type": kind})
    text = got.choices[0].message.content
    assert isinstance(json.loads(text), dict) if kind == "json_object" else "Paris" in text


WORDS = {
    "a choice": ({"choice": ["Rome", "Paris"]}, lambda text: text == "Paris"),
    "a pattern": ({"regex": r"It is [A-Z][a-z]+\."}, lambda text: text == "It is Paris."),
    "a grammar": (
        {"grammar": 'root ::= "<" ("Rome" | "Paris") ">"'},
        lambda text: text in ("<Rome>", "<Paris>"),
    ),
    "a structural tag": (
        {
            "structural_tag": json.dumps(
                {
                    "type": "structural_tag",
                    "format": {
                        "type": "tag",
                        "begin": "<city>",
                        "content": {"type": "json_schema", "json_schema": {"enum": ["Paris", 3]}},
                        "end": "</city>",
                    },
                }
            )
        },
        lambda text: text in ('<city>"Paris"</city>', "<city>3</city>"),
    ),
}


@pytest.mark.parametrize(("form", "fits"), WORDS.values(), ids=WORDS)
def test_other_forms_go_through_extra_body(client, form, fits):
    extra = {**DIRECT, "structured_outputs": form}
    got = client.chat.completions.create(**asked(CAPITAL, extra_body=extra))
    assert fits(got.choices[0].message.content), got
    older = {f"guided_{name}": value for name, value in form.items()}
    if "structural_tag" not in form:
        again = client.chat.completions.create(**asked(CAPITAL, extra_body={**DIRECT, **older}))
        assert again.choices[0].message.content == got.choices[0].message.content


def test_plain_completions_have_a_form_too(client):
    got = client.completions.create(
        model=MODEL,
        prompt=["The capital of Italy is", "The capital of France is"],
        temperature=0,
        extra_body={"guided_choice": [" Paris", " Rome"]},
    )
    assert [one.text for one in got.choices] == [" Rome", " Paris"]
    assert got.choices[0].finish_reason == "stop"


def test_logprobs_are_told_of_each_token(client):
    say = asked(CAPITAL, logprobs=True, top_logprobs=2)
    say["extra_body"] = {**DIRECT, "guided_choice": ["Rome", "Paris"]}
    one = client.chat.completions.create(**say).choices[0]
    assert "".join(token.token for token in one.logprobs.content) == one.message.content


def test_what_a_schema_cannot_ask_is_told_with_its_place(client):
    schema = Order.model_json_schema()
    schema["properties"]["price"] = {"$ref": "https://example.com/price.json"}
    wanted = {"type": "json_schema", "json_schema": {"name": "order", "schema": schema}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**asked(), response_format=wanted, stream=stream)
        assert caught.value.param == "response_format.json_schema.schema"
        assert "/properties/price" in caught.value.body["message"]


def test_a_text_is_whole_at_any_length_that_is_not_refused(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.parse(**asked(max_tokens=1), response_format=Order)
    assert caught.value.param == "max_tokens"
    least = int(re.search(r"has (\d+) tokens", str(caught.value))[1])
    schema = {"type": "json_schema", "json_schema": {"name": "o", "schema": schema_of(Order)}}
    for most in range(least, least + 25, 4):
        got = client.chat.completions.create(**asked(max_tokens=most), response_format=schema)
        one = got.choices[0]
        assert Order.model_validate_json(one.message.content)
        assert got.usage.completion_tokens <= most
        assert one.finish_reason in ("stop", "length")


def schema_of(kind):
    return {**kind.model_json_schema(), "additionalProperties": False}


def test_a_batch_file_has_forms(served, client):
    url = f"{served.v1}/chat/completions/batch"
    say = {**asked(), "messages": [ask(EXTRACT), ask(CAPITAL)], **DIRECT}
    del say["extra_body"]
    schema = {"type": "json_schema", "json_schema": {"name": "o", "schema": schema_of(Order)}}
    headers = {"Authorization": f"Bearer {KEY}"}
    got = httpx.post(url, json={**say, "response_format": schema}, headers=headers, timeout=60)
    found = [json.loads(one["message"]["content"]) for one in got.json()["choices"]]
    extracted, _ = (Order.model_validate(one) for one in found)
    assert extracted == LENA


# -- others -------------------------------------------------------------------------------------


def test_anthropics_client_parses_too(served):
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    say = {"model": MODEL, "max_tokens": 200, "messages": ask(EXTRACT)}
    extra = {"extra_body": {**DIRECT, "temperature": 0}}
    with anthropic.Anthropic(base_url=served.url, api_key=KEY, max_retries=0) as client:
        got = client.messages.parse(**say, **extra, output_format=Order)
        assert got.parsed_output == LENA
        with client.messages.stream(**say, **extra, output_format=Order) as stream:
            assert stream.get_final_message().parsed_output == LENA
        wanted = {"format": {"type": "json_schema", "schema": schema_of(Order)}}
        got = client.messages.create(**say, **extra, output_config=wanted)
        assert Order.model_validate_json(got.content[0].text) == LENA
        wanted["format"]["schema"] = {"$ref": "https://example.com/a.json"}
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
            client.messages.create(**say, **extra, output_config=wanted)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of langchain itself
@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_langchain_gives_structured_output(served, method):
    langchain = pytest.importorskip("langchain_openai", reason="pip install 'quire-llm[clients]'")
    chat = langchain.ChatOpenAI(
        base_url=served.v1, api_key=KEY, model=MODEL, temperature=0, extra_body=DIRECT
    )
    bound = chat.with_structured_output(Order, method=method)
    assert bound.invoke(EXTRACT) == LENA
    assert list(bound.stream(EXTRACT))[-1] == LENA


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_passes_a_class(served, provider):
    litellm = pytest.importorskip("litellm", reason="pip install 'quire-llm[clients]'")
    say = {**asked(), **DIRECT, "model": f"{provider}/{MODEL}"}
    del say["extra_body"]
    got = litellm.completion(
        **say, api_base=served.v1, api_key=KEY, response_format=Order, num_retries=0
    )
    assert Order.model_validate_json(got.choices[0].message.content) == LENA
