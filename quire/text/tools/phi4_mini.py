"""A JSON list after a word: Phi 4 mini."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, ObjectStep, ToolFormat

FORMAT = ToolFormat(
    name="phi4_mini",
    syntaxes=(CallSyntax(("functools[",), (ObjectStep(many=True),), reread_chars=1),),
    template=CallTemplate(
        call='{"name": "«name»", "arguments": «arguments»}',
        before="functools[",
        after="]",
        between=", ",
        name_in_json=True,
    ),
    template_markers=(
        ("<|/tool|>",),
        ("functools[",),
    ),
)

detect = FORMAT.detect
