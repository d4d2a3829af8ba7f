"""Arguments in braces, strings between tokens: Gemma 4."""

from __future__ import annotations

from quire.text.tools._values import Language
from quire.text.tools.base import Arguments, Close, Dialect, Form, Mark, Name, Written

QUOTE = '<|"|>'
BRACES = Language(quotes=(QUOTE,), bare=True)

DIALECT = Dialect(
    name="gemma4",
    forms=(
        Form(
            ("<|tool_call>",),
            (
                Mark(("call:",)),
                Name(before=("{",)),
                Arguments(BRACES),
                Close(("<tool_call|>",)),
            ),
        ),
    ),
    written=Written(
        call="<|tool_call>call:«name»«arguments»<tool_call|>",
        values="braces",
        quote=QUOTE,
    ),
    signs=(("<|tool_call>",),),
)

detect = DIALECT.detect
