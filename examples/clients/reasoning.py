"""Thoughts apart from the answer: whole, as a stream, switched off, and kept to a few tokens.

Start the server with --reasoning-parser auto.
usage: reasoning.py [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
QUESTION = "9.11 and 9.8, which is larger?"


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    asked = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
    }

    answer = client.chat.completions.create(**asked)
    message = answer.choices[0].message
    print("thoughts:", message.reasoning_content)
    print("answer:", message.content)
    print("tokens of thought:", answer.usage.completion_tokens_details.reasoning_tokens)

    for chunk in client.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        print(getattr(delta, "reasoning_content", None) or delta.content or "", end="|")
    print()

    # Templates that know how to go without thinking are told; any other model is kept from it.
    direct = client.chat.completions.create(**asked, reasoning_effort="none")
    print("without thoughts:", direct.choices[0].message.content)

    brief = client.chat.completions.create(**asked, extra_body={"thinking_token_budget": 8})
    print("after 8 tokens of thought:", brief.choices[0].message)


if __name__ == "__main__":
    main()
