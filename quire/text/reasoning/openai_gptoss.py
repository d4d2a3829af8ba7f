"""gpt-oss: messages with headers that name a channel (the harmony format).

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.

analysis is reasoning; final, and commentary without a recipient, are content. Messages to a
recipient are
calls, and left as they are for the reader of tools.
"""

from __future__ import annotations

from quire.text.reasoning.base import (
    WHITESPACE,
    ChannelMarkup,
    ModeKind,
    ModeTransition,
    ParserMode,
    ReasoningFormat,
)

_MESSAGE_ENDINGS = ("<|end|>", "<|return|>", "<|call|>")
_HEADER_TRANSITIONS = {
    mark: ModeTransition("header", "after") for mark in ("<|start|>", "<|channel|>")
}


def _mode_of(header: str) -> str:
    if "to=" in header:
        return "call"
    channel = header.rpartition("<|channel|>")[2]
    return "analysis" if channel.split("<|", 1)[0].strip().startswith("analysis") else "final"


_message_transitions = {
    mark: ModeTransition("between") for mark in _MESSAGE_ENDINGS
} | _HEADER_TRANSITIONS

FORMAT = ReasoningFormat(
    {
        "between": ParserMode(
            kind=ModeKind.CONTENT, strip_leading=WHITESPACE, transitions=_HEADER_TRANSITIONS
        ),
        "header": ParserMode(
            kind=ModeKind.HEADER,
            transitions={"<|message|>": ModeTransition(_mode_of)}
            | {mark: ModeTransition("between") for mark in _MESSAGE_ENDINGS},
        ),
        "analysis": ParserMode(
            kind=ModeKind.REASONING, transitions=_message_transitions, separator="\n"
        ),
        "final": ParserMode(
            kind=ModeKind.CONTENT, transitions=_message_transitions, separator="\n"
        ),
        "call": ParserMode(
            kind=ModeKind.CONTENT,
            keep_header=True,
            transitions={mark: ModeTransition("between", "before") for mark in _MESSAGE_ENDINGS}
            | _HEADER_TRANSITIONS,
        ),
    },
    "between",
    [
        ("<|channel|>analysis<|message|>", "analysis"),
        ("<|channel|>final<|message|>", "final"),
        ("<|channel|>commentary<|message|>", "final"),
    ],
    plain="between",
    channels=ChannelMarkup(
        reasoning="<|channel|>analysis<|message|>",
        content="<|channel|>final<|message|>",
        end="<|end|>",
        next_message="<|start|>assistant",
    ),
)


def detect(template: str) -> bool:
    return "<|channel|>" in template and "<|start|>" in template
