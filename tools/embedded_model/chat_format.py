"""The chat format of the embedded model, in Python.

The same text that `chat_template.jinja` renders (a test holds the two together), but fast enough to
write millions of training prompts. A `Chat` is one training document: everything before the last
assistant turn is the prompt, the turn itself is what the model learns to write.
"""

import json
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
TOOLS_HEAD = "These functions can be called:\n<tools>\n"
TOOLS_TAIL = (
    "</tools>\nCall a function by writing:\n<tool_call>\n"
    '{"name": "its name", "arguments": {"key": "value"}}\n</tool_call>'
)
NO_THINK = "<think>\n\n</think>\n\n"


@dataclass
class Chat:
    """One exchange to learn. `think` None: only the direct mode; `direct` False: only with a trace."""

    messages: list[Message]
    answer: str
    think: str | None = None
    calls: list[Message] = field(default_factory=list)
    tools: list[Message] | None = None
    direct: bool = True
    plain: bool = True  # may get a system prompt and earlier turns around it


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def call_text(name: str, arguments: object) -> str:
    args = arguments if isinstance(arguments, str) else dumps(arguments)
    return f'<tool_call>\n{{"name": {dumps(name)}, "arguments": {args}}}\n</tool_call>'


def calls_text(body: str, calls: list[Message]) -> str:
    """Join an answer and its tool calls the way the template does."""
    parts = [call_text(c["name"], c["arguments"]) for c in calls]
    return "\n".join(([body] if body else []) + parts)


def head(system: str | None, tools: list[Message] | None) -> str:
    """Render the system turn, or nothing."""
    if system is None and not tools:
        return ""
    parts = [] if system is None else [system]
    if tools:
        lines = "".join(dumps(t) + "\n" for t in tools)
        parts.append(TOOLS_HEAD + lines + TOOLS_TAIL)
    return "<|im_start|>system\n" + "\n\n".join(parts) + "<|im_end|>\n"


def assistant_text(m: Message, after_query: bool, last: bool, no_think: bool) -> str:
    why = m.get("reasoning_content") or ""
    block = ""
    if after_query and why:
        block = f"<think>\n{why}\n</think>\n\n"
    elif after_query and (last or no_think):
        block = NO_THINK
    return block + calls_text(m.get("content") or "", m.get("tool_calls") or [])


def prompt_text(messages: list[Message], tools: list[Message] | None, no_think: bool) -> str:
    """Render messages with the generation prompt at the end."""
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    rest = messages[1:] if system is not None else messages
    query = max((i for i, m in enumerate(rest) if m["role"] == "user"), default=-1)
    out = [head(system, tools)]
    for i, m in enumerate(rest):
        if m["role"] == "assistant":
            body = assistant_text(m, i > query, i == len(rest) - 1, no_think)
            out.append(f"<|im_start|>assistant\n{body}<|im_end|>\n")
        elif m["role"] == "tool":
            out.append(tool_text(rest, i))
        else:
            out.append(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n")
    out.append("<|im_start|>assistant\n" + (NO_THINK if no_think else ""))
    return "".join(out)


def tool_text(rest: list[Message], i: int) -> str:
    first = i == 0 or rest[i - 1]["role"] != "tool"
    last = i == len(rest) - 1 or rest[i + 1]["role"] != "tool"
    body = f"\n<tool_response>\n{rest[i]['content']}\n</tool_response>"
    return ("<|im_start|>user" if first else "") + body + ("<|im_end|>\n" if last else "")


def answer_text(chat: Chat, no_think: bool) -> str:
    """The text the model must write after the prompt, with its end mark."""
    block = "" if no_think else f"<think>\n{chat.think}\n</think>\n\n"
    return block + calls_text(chat.answer, chat.calls) + "<|im_end|>"
