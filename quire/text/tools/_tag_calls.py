"""Calls as tags in an outer tag, each with a tag for every parameter."""

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


def function_calls(outer: str) -> CallSyntax:
    """<outer><function=NAME><parameter=KEY>VALUE</parameter></function></outer>"""
    params = ParamsStep(
        key_open="<parameter=",
        key_close=">",
        value_close="</parameter>",
        close=("</function>",),
        outer=(f"</{outer}>",),
    )
    call = RepeatStep((LiteralStep(("<function=",)), NameStep(end=(">",)), params))
    return CallSyntax((f"<{outer}>",), (call, CloseStep((f"</{outer}>",))))


def invoke_format(
    name: str,
    outer: str,
    *,
    prefix: str = "",
    marker: str,
    channels: str = "",
    excluded_markers: tuple[str, ...] = (),
) -> ToolFormat:
    """<outer><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></outer>

    prefix: of the tags in the outer one. marker: what a chat template of this format has.
    """
    begin, end = f"<{prefix}", f"</{prefix}"
    params = ParamsStep(
        key_open=f'{begin}parameter name="',
        key_close='"',
        value_open=">",
        value_close=f"{end}parameter>",
        close=(f"{end}invoke>",),
        outer=(f"</{outer}>",),
    )
    literal, name_step = LiteralStep((f'{begin}invoke name="',)), NameStep(end=('"',))
    call = RepeatStep((literal, name_step, LiteralStep((">",)), params))
    return ToolFormat(
        name=name,
        channels=channels,
        syntaxes=(CallSyntax((f"<{outer}>",), (call, CloseStep((f"</{outer}>",)))),),
        template=CallTemplate(
            call=f'{begin}invoke name="«name»">\n«params»{end}invoke>',
            before=f"<{outer}>\n",
            after=f"\n</{outer}>",
            between="\n",
            notation="params",
            param=f'{begin}parameter name="«key»">«value»{end}parameter>\n',
        ),
        template_markers=((marker,),),
        excluded_markers=excluded_markers,
    )
