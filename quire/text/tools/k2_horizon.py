"""A name and keys, types and values in tags: K2 Horizon."""

from __future__ import annotations

from quire.text.tools.base import (
    Close,
    Dialect,
    Either,
    Form,
    Many,
    Mark,
    Name,
    Object,
    Params,
    Written,
)

DIALECT = Dialect(
    name="k2_horizon",
    forms=(
        Form(
            ("<ifm|tool_calls>",),
            (
                Many(
                    (
                        Mark(("<ifm|tool_call>",)),
                        Either(
                            ("{",),
                            (Object(), Close(("</ifm|tool_call>",))),
                            (
                                Name(before=("<ifm|arg_key>", "</ifm|tool_call>")),
                                Params(
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
                Close(("</ifm|tool_calls>",)),
            ),
        ),
    ),
    written=Written(
        call="<ifm|tool_call>«name»«params»</ifm|tool_call>",
        before="<ifm|tool_calls>",
        after="</ifm|tool_calls>",
        values="params",
        param="<ifm|arg_key>«key»</ifm|arg_key><ifm|arg_type>«type»</ifm|arg_type>"
        "<ifm|arg_value>«value»</ifm|arg_value>",
        text_attribute="string",
        json_attribute="json",
    ),
    signs=(("<ifm|tool_call>",),),
)

detect = DIALECT.detect
