"""A JSON list of objects whose key is the name: Apertus."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Object, Written

DIALECT = Dialect(
    name="apertus",
    forms=(
        Form(
            ("<|tools_prefix|>",),
            (
                Object(name=(), arguments=(), many=True, keyed=True),
                Close(("<|tools_suffix|>",)),
            ),
        ),
    ),
    written=Written(
        call='{"«name»": «arguments»}',
        before="<|tools_prefix|>[",
        after="]<|tools_suffix|>",
        between=", ",
        name_in_json=True,
    ),
    signs=(("<|tools_prefix|>",),),
)

detect = DIALECT.detect
