"""A JSON list of objects whose key is the name: Apertus."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, ObjectStep, ToolFormat

FORMAT = ToolFormat(
    name="apertus",
    syntaxes=(
        CallSyntax(
            ("<|tools_prefix|>",),
            (
                ObjectStep(name=(), arguments=(), many=True, keyed=True),
                CloseStep(("<|tools_suffix|>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call='{"«name»": «arguments»}',
        before="<|tools_prefix|>[",
        after="]<|tools_suffix|>",
        between=", ",
        name_in_json=True,
    ),
    template_markers=(("<|tools_prefix|>",),),
)

detect = FORMAT.detect
