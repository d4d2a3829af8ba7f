"""Answers that have a form: a class, a schema, a choice, a pattern; whole and as a stream.

usage: structured_outputs.py [http://127.0.0.1:8000]
"""

import json
import sys

from openai import BadRequestError, OpenAI
from pydantic import BaseModel

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
DIRECT = {"chat_template_kwargs": {"enable_thinking": False}}
TEXT = "Lena Fischer bought 3 of the red lamp for 45 dollars."
EXTRACT = f"Extract name, product, quantity and price as JSON: {TEXT}"


class Order(BaseModel):
    name: str
    product: str
    quantity: int
    price: float


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    model = client.models.list().data[0].id
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": EXTRACT}],
        "temperature": 0,
        "extra_body": DIRECT,
    }

    answer = client.chat.completions.parse(**asked, response_format=Order)
    print(repr(answer.choices[0].message.parsed))

    with client.chat.completions.stream(**asked, response_format=Order) as stream:
        for event in stream:
            if event.type == "content.delta":
                print(event.delta, end="|")
        print()
        print(repr(stream.get_final_completion().choices[0].message.parsed))

    response = client.responses.parse(
        model=model, input=EXTRACT, text_format=Order, temperature=0, extra_body=DIRECT
    )
    print(repr(response.output_parsed))

    # What is not in OpenAI's protocol goes into extra_body.
    for question, form in {
        "Is Rome the capital of Italy?": {"choice": ["yes", "no"]},
        "What is 31 + 44?": {"regex": r"The sum is \d+\."},
    }.items():
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            extra_body={**DIRECT, "structured_outputs": form},
        )
        print(f"{question} {answer.choices[0].message.content}")

    # A keyword that cannot be honoured is refused, with its place; nothing is dropped in silence.
    schema = Order.model_json_schema()
    schema["properties"]["price"] = {"$ref": "https://example.com/price.json"}
    try:
        client.chat.completions.create(**asked, response_format=json_schema(schema))
    except BadRequestError as error:
        print(json.dumps(error.body, indent=2))


def json_schema(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "order", "schema": schema}}


if __name__ == "__main__":
    main()
