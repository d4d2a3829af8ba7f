"""The official OpenAI client, streaming: text as it comes, then what it cost.

usage: openai_stream.py [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    chunks = client.chat.completions.create(
        model="embedded",
        messages=[{"role": "user", "content": "What is the capital of Italy?"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:  # the last chunk: usage, and no choices
            print(f"\n({chunk.usage.completion_tokens} tokens)")


if __name__ == "__main__":
    main()
