"""Requests of each kind: a server answers the first of them as fast as the others.

For tests/server/test_first_requests.py and bench/first_minutes.py. NAME stands for a word that
differs from request to request, so that no prefix and no grammar is cached.
"""

import json

FLAGS = (
    *("--enable-reasoning", "--reasoning-parser", "auto", "--trust-request-chat-template"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "auto"),
)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"messages": [{"role": "user", "content": "What is the capital of NAME?"}]}
TEXT = {"prompt": "Once upon a time in NAME"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"NAME": {"type": "integer"}}, "required": ["NAME"]}
FIRST = {
    "chat": (CHAT, USER),
    "chat, streamed": (CHAT, {**USER, "stream": True}),
    "completion": (COMPLETIONS, TEXT),
    "completion, streamed": (COMPLETIONS, {**TEXT, "stream": True}),
    "token ids": (COMPLETIONS, {"prompt": [5, 6, 7]}),
    "several prompts": (COMPLETIONS, {"prompt": ["a NAME", "b NAME"]}),
    "greedy": (COMPLETIONS, {**TEXT, "temperature": 0}),
    "top": (COMPLETIONS, {**TEXT, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 3}),
    "penalties": (COMPLETIONS, {**TEXT, "frequency_penalty": 0.5, "repetition_penalty": 1.1}),
    "logprobs": (CHAT, {**USER, "logprobs": True, "top_logprobs": 3}),
    "prompt logprobs": (COMPLETIONS, {**TEXT, "prompt_logprobs": 2}),
    "logit bias": (COMPLETIONS, {**TEXT, "logit_bias": {"5": 3}}),
    "min tokens": (COMPLETIONS, {**TEXT, "min_tokens": 3}),
    "bad words": (COMPLETIONS, {**TEXT, "bad_words": ["time"]}),
    "stop": (COMPLETIONS, {**TEXT, "stop": ["time"]}),
    "n": (COMPLETIONS, {**TEXT, "n": 2}),
    "beams": (COMPLETIONS, {**TEXT, "n": 2, "use_beam_search": True}),
    "echo": (COMPLETIONS, {**TEXT, "echo": True, "logprobs": 1}),
    "tools": (CHAT, {**USER, "tools": [TOOL]}),
    "tools, streamed": (CHAT, {**USER, "tools": [TOOL], "stream": True}),
    "a call and its result": (
        CHAT,
        {
            "messages": [
                *USER["messages"],
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "a", "content": "rain"},
            ],
            "tools": [TOOL],
        },
    ),
    "a forced call": (CHAT, {**USER, "tools": [TOOL], "tool_choice": "required"}),
    "thoughts": (CHAT, {**USER, "chat_template_kwargs": {"enable_thinking": True}}),
    "json": (CHAT, {**USER, "response_format": {"type": "json_object"}}),
    "schema": (
        CHAT,
        {
            **USER,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            },
        },
    ),
    "regex": (CHAT, {**USER, "structured_outputs": {"regex": "NAME[a-z]{3}"}}),
    "choice": (CHAT, {**USER, "structured_outputs": {"choice": ["NAME", "no"]}}),
    "grammar": (CHAT, {**USER, "structured_outputs": {"grammar": 'root ::= "NAME" | "no"'}}),
    "own template": (CHAT, {**USER, "chat_template": "NAME {{ messages[0].content }}"}),
    "response": ("/v1/responses", {"input": "hello NAME"}),
    "response, streamed": ("/v1/responses", {"input": "hello NAME", "stream": True}),
    "message": ("/v1/messages", {**USER, "max_tokens": 4}),
    "message, streamed": ("/v1/messages", {**USER, "max_tokens": 4, "stream": True}),
    "generate": ("/generate", TEXT),
    "tokenize": ("/tokenize", TEXT),
    "tokenize a chat": ("/tokenize", USER),
    "detokenize": ("/detokenize", {"tokens": [5, 6]}),
    "a wrong field": (CHAT, {**USER, "max_tokens": -1}),
    "no such route": ("/v1/nothing", {}),
}
PAGES = ["/v1/models", "/metrics", "/docs", "/openapi.json", "/", "/health", "/ready", "/load"]


def requests_of(name):
    """Return (kind, method, path, body) of one request of each kind, with the name filled in."""
    for kind, (path, body) in FIRST.items():
        if path in (CHAT, COMPLETIONS, "/generate"):
            body = {"max_tokens": 24, **body}
        yield kind, "POST", path, json.loads(json.dumps(body).replace("NAME", name))
    for page in PAGES:
        yield page, "GET", page, None
