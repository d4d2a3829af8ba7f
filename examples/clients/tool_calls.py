"""Tools, end to end: the model asks for a call, the script makes it, the model answers. Then calls
that are forced, and a call as it is written.

Start the server with --enable-auto-tool-choice --tool-call-parser auto --reasoning-parser auto.
usage: tool_calls.py [http://127.0.0.1:8000]
"""

import json
import sys

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


class GetWeather(BaseModel):
    """Current weather in a city"""

    city: str


class Add(BaseModel):
    """Add two numbers"""

    a: float = Field(ge=0)
    b: float = Field(ge=0)


def get_weather(city: str) -> object:
    return {"city": city, "temperature": 18, "sky": "clear"}


def add(a: float, b: float) -> object:
    return {"sum": a + b}


FUNCTIONS = {"get_weather": get_weather, "add": add}
# These are strict functions: a call that begins is what its class says, or it does not begin.
TOOLS = [
    pydantic_function_tool(GetWeather, name="get_weather"),
    pydantic_function_tool(Add, name="add"),
]


def converse(client: OpenAI, asked: dict, question: str) -> str:
    """Ask until the model answers in words."""
    messages: list = [{"role": "user", "content": question}]
    while True:
        message = client.chat.completions.create(messages=messages, **asked).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            told = {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
            messages.append(told)


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    model = client.models.list().data[0].id
    asked = {"model": model, "tools": TOOLS, "temperature": 0, "max_tokens": 500}

    print(converse(client, asked, "What is the weather in Paris?"))

    # Whatever the question: a call of this function, and of no other.
    asked["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
    named = {"type": "function", "function": {"name": "add"}}
    answer = client.chat.completions.create(tool_choice=named, **asked).choices[0]
    print("named:", answer.message.tool_calls[0].function, answer.finish_reason)

    # One call, of whichever function the model likes best, as it is written.
    stream = client.chat.completions.create(
        tool_choice="required", parallel_tool_calls=False, stream=True, **asked
    )
    for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or ():
            print(call.function.name or "", end=" ")
            print(call.function.arguments or "", end="|")
    print()


if __name__ == "__main__":
    main()
