"""A JSON object between tokens: InternLM 2 and 3."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Mark, Object, Written

DIALECT = Dialect(
    name="internlm",
    forms=(
        Form(
            ("<|action_start|>",),
            (Mark(("<|plugin|>",)), Object(), Close(("<|action_end|>",))),
        ),
    ),
    written=Written(
        call='<|action_start|><|plugin|>{"name": "«name»", "parameters": «arguments»}'
        "<|action_end|>",
        between="\n",
        name_in_json=True,
    ),
    signs=(("<|plugin|>",),),
)

detect = DIALECT.detect
