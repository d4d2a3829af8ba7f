"""A section of calls, arguments in a fenced block of JSON: DeepSeek V3 and R1."""

from __future__ import annotations

from quire.text.tools.base import Arguments, Close, Dialect, Form, Label, Many, Mark, Name, Written

DIALECT = Dialect(
    name="deepseek_v3",
    forms=(
        Form(
            ("<｜tool▁calls▁begin｜>",),
            (
                Many(
                    (
                        Mark(("<｜tool▁call▁begin｜>",)),
                        Label(("<｜tool▁sep｜>",)),
                        Name(end=("\n",), before=("```json",)),
                        Mark(("```json",)),
                        Arguments(),
                        Close(("```",)),
                        Close(("<｜tool▁call▁end｜>",)),
                    )
                ),
                Close(("<｜tool▁calls▁end｜>",)),
            ),
        ),
    ),
    written=Written(
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>«name»\n```json\n«arguments»\n```"
        "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
        between="\n",
    ),
    signs=(("<｜tool▁calls▁begin｜>", "```json"),),
)

detect = DIALECT.detect
