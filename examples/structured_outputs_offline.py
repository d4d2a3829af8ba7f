"""Texts that have a form: a choice, a pattern, a grammar, and a schema to read into a class."""

import json

from pydantic import BaseModel

from quire import LLM, SamplingParams
from quire.core.params import StructuredOutputsParams

DIRECT = {"enable_thinking": False}


class Order(BaseModel):
    name: str
    product: str
    quantity: int
    price: float


FORMS = {
    "Is Rome the capital of Italy?": StructuredOutputsParams(choice=["yes", "no"]),
    "What is 31 + 44?": StructuredOutputsParams(regex=r"The sum is \d+\."),
    "Which two colours do you like?": StructuredOutputsParams(
        grammar='root ::= colour " and " colour\ncolour ::= "red" | "green" | "blue"'
    ),
}


def main() -> None:
    llm = LLM("embedded")

    def ask(text: str, form: StructuredOutputsParams) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=100, structured_outputs=form)
        asked = [{"role": "user", "content": text}]
        (output,) = llm.chat(asked, params, use_tqdm=False, chat_template_kwargs=DIRECT)
        return output.outputs[0].text

    for question, form in FORMS.items():
        print(f"{question} {ask(question, form)}")

    # The model does not see the schema: the prompt says what is wanted.
    text = "Extract name, product, quantity and price as JSON: "
    text += "Lena Fischer bought 3 of the red lamp for 45 dollars."
    schema = Order.model_json_schema()
    answer = ask(text, StructuredOutputsParams(json=schema))
    print(repr(Order.model_validate_json(answer)))

    # However little room there is, what comes is whole, or is refused before it begins.
    for most in (40, 24, 4):
        form = StructuredOutputsParams(json=schema)
        params = SamplingParams(temperature=0.0, max_tokens=most, structured_outputs=form)
        asked = [{"role": "user", "content": text}]
        try:
            (output,) = llm.chat(asked, params, use_tqdm=False, chat_template_kwargs=DIRECT)
            print(most, json.loads(output.outputs[0].text), output.outputs[0].finish_reason)
        except ValueError as error:
            print(most, error)


if __name__ == "__main__":
    main()
