"""A chat in the terminal in forty lines, over HTTP alone: server-sent events read by hand.

An empty line ends it. (`quire chat` does more, and needs no server.)

usage: terminal_chat.py [http://127.0.0.1:8000]
"""

import json
import sys
from collections.abc import Iterator
from urllib.request import Request, urlopen

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


def answer(messages: list[dict[str, str]]) -> Iterator[str]:
    """The pieces of the answer, as they come."""
    body = {"model": "embedded", "messages": messages, "stream": True, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = Request(f"{URL}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urlopen(request) as events:
        for line in events:
            if line.startswith(b"data: {"):  # others are blank, or the last: data: [DONE]
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                yield from (one["delta"].get("content") or "" for one in chunk["choices"])


def main() -> None:
    messages: list[dict[str, str]] = []
    while asked := input("you: ").strip():
        messages.append({"role": "user", "content": asked})
        said = ""
        print("quire: ", end="")
        for piece in answer(messages):
            print(piece, end="", flush=True)
            said += piece
        print()
        messages.append({"role": "assistant", "content": said})


if __name__ == "__main__":
    try:
        main()
    except (EOFError, KeyboardInterrupt):
        print()
