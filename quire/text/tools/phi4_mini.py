"""A JSON list after a word: Phi 4 mini."""

from __future__ import annotations

from quire.text.tools.base import Dialect, Form, Object, Written

DIALECT = Dialect(
    name="phi4_mini",
    forms=(Form(("functools[",), (Object(many=True),), keep=1),),
    written=Written(
        call='{"name": "«name»", "arguments": «arguments»}',
        before="functools[",
        after="]",
        between=", ",
        name_in_json=True,
    ),
    signs=(
        ("<|/tool|>",),
        ("functools[",),
    ),
)

detect = DIALECT.detect
