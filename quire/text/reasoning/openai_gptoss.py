"""gpt-oss: messages with headers that name a channel (the harmony format).

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.

analysis is reasoning; final, and commentary to nobody, are content. Messages to a recipient are
calls, and left as they are for the reader of tools.
"""

from __future__ import annotations

from quire.text.reasoning.base import WHITE, Channels, Dialect, Kind, Mode, Turn

_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_HEADS = {mark: Turn("header", "after") for mark in ("<|start|>", "<|channel|>")}


def _mode_of(header: str) -> str:
    if "to=" in header:
        return "call"
    channel = header.rpartition("<|channel|>")[2]
    return "analysis" if channel.split("<|", 1)[0].strip().startswith("analysis") else "final"


_after = {mark: Turn("between") for mark in _ENDS} | _HEADS

DIALECT = Dialect(
    {
        "between": Mode(kind=Kind.CONTENT, lead=WHITE, marks=_HEADS),
        "header": Mode(
            kind=Kind.HEADER,
            marks={"<|message|>": Turn(_mode_of)} | {mark: Turn("between") for mark in _ENDS},
        ),
        "analysis": Mode(kind=Kind.REASONING, marks=_after, joint="\n"),
        "final": Mode(kind=Kind.CONTENT, marks=_after, joint="\n"),
        "call": Mode(
            kind=Kind.CONTENT,
            verbatim=True,
            marks={mark: Turn("between", "before") for mark in _ENDS} | _HEADS,
        ),
    },
    "between",
    [
        ("<|channel|>analysis<|message|>", "analysis"),
        ("<|channel|>final<|message|>", "final"),
        ("<|channel|>commentary<|message|>", "final"),
    ],
    plain="between",
    channels=Channels(
        thought="<|channel|>analysis<|message|>",
        content="<|channel|>final<|message|>",
        end="<|end|>",
        next="<|start|>assistant",
    ),
)


def detect(template: str) -> bool:
    return "<|channel|>" in template and "<|start|>" in template
