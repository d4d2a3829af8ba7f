"""A section of calls, each with an id that holds the name: Kimi K2."""

from __future__ import annotations

from quire.text.tools.base import Arguments, Close, Dialect, Form, Many, Mark, Name, Written

DIALECT = Dialect(
    name="kimi_k2",
    forms=(
        Form(
            ("<|tool_calls_section_begin|>",),
            (
                Many(
                    (
                        Mark(("<|tool_call_begin|>",)),
                        Name(end=("<|tool_call_argument_begin|>",), numbered=True),
                        Arguments(),
                        Close(("<|tool_call_end|>",)),
                    )
                ),
                Close(("<|tool_calls_section_end|>",)),
            ),
        ),
    ),
    written=Written(
        call="<|tool_call_begin|>functions.«name»:«place»<|tool_call_argument_begin|>«arguments»"
        "<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    signs=(("<|tool_calls_section_begin|>",),),
    ids="numbered",
)

detect = DIALECT.detect
