"""A JSON list in a tag in capitals: Nemotron Nano 2."""

from __future__ import annotations

from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, ObjectStep, ToolFormat

FORMAT = ToolFormat(
    name="nemotron_json",
    syntaxes=(CallSyntax(("<TOOLCALL>",), (ObjectStep(many=True), CloseStep(("</TOOLCALL>",)))),),
    template=CallTemplate(
        call='{"name": "«name»", "arguments": «arguments»}',
        before="<TOOLCALL>[",
        after="]</TOOLCALL>",
        between=", ",
        name_in_json=True,
    ),
    template_markers=(("<TOOLCALL>",),),
)

detect = FORMAT.detect
