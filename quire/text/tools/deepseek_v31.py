"""A section of calls, name and arguments with a token between: DeepSeek V3.1."""

from __future__ import annotations

from quire.text.tools.base import Arguments, Close, Dialect, Form, Many, Mark, Name, Written

DIALECT = Dialect(
    name="deepseek_v31",
    forms=(
        Form(
            ("<｜tool▁calls▁begin｜>",),
            (
                Many(
                    (
                        Mark(("<｜tool▁call▁begin｜>",)),
                        Name(end=("<｜tool▁sep｜>",)),
                        Arguments(),
                        Close(("<｜tool▁call▁end｜>",)),
                    )
                ),
                Close(("<｜tool▁calls▁end｜>",)),
            ),
        ),
    ),
    written=Written(
        call="<｜tool▁call▁begin｜>«name»<｜tool▁sep｜>«arguments»<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    signs=(("<｜tool▁calls▁begin｜>",),),
    without=("```json",),
)

detect = DIALECT.detect
