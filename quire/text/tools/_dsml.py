"""The tags of DeepSeek V3.2 and later, which differ in the outer tag and in a space."""

from __future__ import annotations

from quire.text.tools.base import (
    CallSyntax,
    CallTemplate,
    CloseStep,
    LiteralStep,
    NameStep,
    ParamsStep,
    RepeatStep,
    ToolFormat,
)

MARKER = "｜DSML｜"


def dsml_format(name: str, outer: tuple[str, ...], *, space: str = "", sign: str) -> ToolFormat:
    """A format whose calls stand in one of these outer tags; the first is what models write.

    space: after the marker of every tag. sign: what a chat template shows beside the marker.
    """
    begin, end = f"<{MARKER}{space}", f"</{MARKER}{space}"
    closings = tuple(f"{end}{tag}>" for tag in outer)
    params = ParamsStep(
        key_open=f'{begin}parameter name="',
        key_close='"',
        value_open=">",
        value_close=f"{end}parameter>",
        close=(f"{end}invoke>",),
        outer=closings,
        text_mark='string="true"',
        json_mark='string="false"',
    )
    call = (
        LiteralStep((f'{begin}invoke name="',)),
        NameStep(end=('"',)),
        LiteralStep((">",)),
        params,
    )
    return ToolFormat(
        name=name,
        syntaxes=(
            CallSyntax(
                tuple(f"{begin}{tag}>" for tag in outer), (RepeatStep(call), CloseStep(closings))
            ),
            CallSyntax(
                call[0].texts,
                (*call[1:], CloseStep(closings, optional=True)),
                declared_only=True,
            ),
        ),
        template=CallTemplate(
            call=f'{begin}invoke name="«name»">\n«params»{end}invoke>',
            before=f"{begin}{outer[0]}>\n",
            after=f"\n{closings[0]}",
            between="\n",
            notation="params",
            param=f'{begin}parameter name="«key»" string="«type»">«value»{end}parameter>\n',
            text_attribute="true",
            json_attribute="false",
        ),
        template_markers=((MARKER, sign),),
    )
