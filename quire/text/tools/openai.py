"""Messages for functions in channels: harmony, which gpt-oss writes. Its analysis is reasoning."""

from __future__ import annotations

from quire.text.tools.base import Dialect, Form, Message, Written

ENDS = ("<|end|>", "<|call|>", "<|return|>")

DIALECT = Dialect(
    name="openai",
    forms=(
        Form(("<|start|>",), (Message("<|message|>", ENDS, ("<|start|>",)),)),
        Form(
            ("<|channel|>",),
            (Message("<|message|>", ENDS, ("<|start|>",), header="<|channel|>"),),
        ),
    ),
    written=Written(
        call="<|channel|>commentary to=functions.«name» <|constrain|>json<|message|>«arguments»"
        "<|call|>",
        between="<|start|>assistant",
    ),
    signs=(("<|channel|>", "<|message|>", "functions"),),
    drop=ENDS,
)

detect = DIALECT.detect
