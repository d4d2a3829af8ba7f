"""Muse: messages with headers that name a recipient.

     to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hi.<|eot|>

A message to `self` is reasoning, one to `user` is content; the text of one to a function holds a
call, which the tool parser reads.
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

_ENDINGS = ("<|eom|>", "<|eot|>", "<|end_of_text|>")
_NEXT = {mark: ModeTransition("between") for mark in _ENDINGS} | {
    "<|start|>": ModeTransition("header")
}


def _mode_of(header: str) -> str:
    return "reasoning" if header.rpartition("to=")[2].strip() == "self" else "content"


FORMAT = ReasoningFormat(
    {
        "header": ParserMode(
            kind=ModeKind.HEADER,
            transitions={"<|message|>": ModeTransition(_mode_of)}
            | {mark: ModeTransition("between") for mark in _ENDINGS},
        ),
        "between": ParserMode(
            kind=ModeKind.CONTENT,
            strip_leading=WHITESPACE,
            transitions={"<|start|>": ModeTransition("header")},
        ),
        "reasoning": ParserMode(kind=ModeKind.REASONING, transitions=_NEXT, separator="\n"),
        "content": ParserMode(kind=ModeKind.CONTENT, transitions=_NEXT, separator="\n"),
    },
    "header",
    [("to=self<|message|>", "reasoning"), ("<|message|>", "content")],
    plain="between",
    channels=ChannelMarkup(
        reasoning=" to=self<|message|>",
        content=" to=user<|message|>",
        end="<|eom|>",
        next_message="<|start|>assistant",
        call=(" to=", "<|message|>"),
    ),
)


def detect(template: str) -> bool:
    return "<atem:function_calls>" in template
