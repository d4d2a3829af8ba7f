"""A JSON list of actions between tokens: Command R7B, A and later."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Object, Written

DIALECT = Dialect(
    name="cohere_command3",
    forms=(
        Form(
            ("<|START_ACTION|>",),
            (
                Object(name=("tool_name",), many=True),
                Close(("<|END_ACTION|>",)),
            ),
        ),
    ),
    written=Written(
        call='{"tool_call_id": "«place»", "tool_name": "«name»", "parameters": «arguments»}',
        before="<|START_ACTION|>[\n    ",
        after="\n]<|END_ACTION|>",
        between=",\n    ",
        name_in_json=True,
    ),
    signs=(("<|START_ACTION|>",),),
)

detect = DIALECT.detect
