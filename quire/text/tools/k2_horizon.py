"""A name and keys, types and values in tags: K2 Horizon."""

from __future__ import annotations

from quire.text.tools.base import (
    BranchStep,
    CallSyntax,
    CallTemplate,
    CloseStep,
    LiteralStep,
    NameStep,
    ObjectStep,
    ParamsStep,
    RepeatStep,
    ToolFormat,
)

FORMAT = ToolFormat(
    name="k2_horizon",
    declared_only=True,
    syntaxes=(
        CallSyntax(
            ("<ifm|tool_calls>",),
            (
                RepeatStep(
                    (
                        LiteralStep(("<ifm|tool_call>",)),
                        BranchStep(
                            ("{",),
                            (ObjectStep(), CloseStep(("</ifm|tool_call>",))),
                            (
                                NameStep(before=("<ifm|arg_key>", "</ifm|tool_call>")),
                                ParamsStep(
                                    key_open="<ifm|arg_key>",
                                    key_close="</ifm|arg_key>",
                                    value_open="<ifm|arg_value>",
                                    value_close="</ifm|arg_value>",
                                    close=("</ifm|tool_call>",),
                                    outer=("</ifm|tool_calls>",),
                                    text_mark="<ifm|arg_type>string<",
                                    json_mark="<ifm|arg_type>",
                                ),
                            ),
                        ),
                    )
                ),
                CloseStep(("</ifm|tool_calls>",)),
            ),
        ),
    ),
    template=CallTemplate(
        call="<ifm|tool_call>«name»«params»</ifm|tool_call>",
        before="<ifm|tool_calls>",
        after="</ifm|tool_calls>",
        notation="params",
        param="<ifm|arg_key>«key»</ifm|arg_key><ifm|arg_type>«type»</ifm|arg_type>"
        "<ifm|arg_value>«value»</ifm|arg_value>",
        text_attribute="string",
        json_attribute="json",
    ),
    template_markers=(("<ifm|tool_call>",),),
)

detect = FORMAT.detect
