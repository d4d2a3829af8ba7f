"""The official OpenAI client on /v1/responses: whole, and as typed events.

usage: openai_responses.py [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    response = client.responses.create(
        model="embedded",
        instructions="Answer in one word.",
        input="What is the capital of France?",
        max_output_tokens=200,
        temperature=0,
    )
    print(f"{response.status}: {response.output_text}")

    events = client.responses.create(
        model="embedded", input="What is 2 + 3?", temperature=0, max_output_tokens=200, stream=True
    )
    for event in events:
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
        elif event.type == "response.completed":
            print(f"\n({event.response.usage.output_tokens} tokens)")


if __name__ == "__main__":
    main()
