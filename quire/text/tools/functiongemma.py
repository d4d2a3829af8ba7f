"""Arguments in braces, strings between tokens: FunctionGemma."""

from __future__ import annotations

from quire.text.tools._values import Language
from quire.text.tools.base import Arguments, Close, Dialect, Form, Mark, Name, Written

QUOTE = "<escape>"
BRACES = Language(quotes=(QUOTE,), bare=True)

DIALECT = Dialect(
    name="functiongemma",
    forms=(
        Form(
            ("<start_function_call>",),
            (
                Mark(("call:",)),
                Name(before=("{",)),
                Arguments(BRACES),
                Close(("<end_function_call>",)),
            ),
        ),
    ),
    written=Written(
        call="<start_function_call>call:«name»«arguments»<end_function_call>",
        values="braces",
        quote=QUOTE,
    ),
    signs=(("<start_function_call>",),),
)

detect = DIALECT.detect
