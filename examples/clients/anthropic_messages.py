"""The official Anthropic client on /v1/messages: whole, streaming, and counting tokens.

usage: anthropic_messages.py [http://127.0.0.1:8000]
"""

import sys

from anthropic import Anthropic

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


def main() -> None:
    client = Anthropic(base_url=URL, api_key="none")
    asked = [{"role": "user", "content": "What is the capital of Spain?"}]

    counted = client.messages.count_tokens(model="embedded", messages=asked)
    print(f"the prompt has {counted.input_tokens} tokens")

    message = client.messages.create(model="embedded", max_tokens=200, messages=asked)
    for block in message.content:  # a server that reads thoughts sends them as blocks of their own
        print(block.text if block.type == "text" else f"[{block.type}]")
    print(f"({message.stop_reason})")

    with client.messages.stream(model="embedded", max_tokens=200, messages=asked) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
