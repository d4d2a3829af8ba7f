"""The official OpenAI client: a conversation, the probabilities of its tokens, two answers at once.

usage: openai_chat.py [http://127.0.0.1:8000]
"""

import math
import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the capital of Japan?"}]

    answer = client.chat.completions.create(
        model=model, messages=messages, temperature=0, logprobs=True, max_tokens=200
    )
    choice = answer.choices[0]
    print(choice.message.content)
    surest = max(choice.logprobs.content, key=lambda token: token.logprob)
    print(f"surest token: {surest.token!r}, {math.exp(surest.logprob):.1%}")
    print(f"{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out")

    # What other servers call by their own names goes into extra_body.
    two = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me about the sea."}],
        n=2,
        seed=7,
        max_tokens=24,
        extra_body={"top_k": 20, "chat_template_kwargs": {"enable_thinking": False}},
    )
    for choice in two.choices:
        print(f"{choice.index}: {choice.message.content!r} ({choice.finish_reason})")


if __name__ == "__main__":
    main()
