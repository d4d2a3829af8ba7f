"""As DeepSeek V3.2, in another outer tag: DeepSeek V4."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Many, Mark, Name, Params, Written

CLOSE = ("</｜DSML｜tool_calls>", "</｜DSML｜toolcalls>", "</｜DSML｜tool>")

DIALECT = Dialect(
    name="deepseek_v4",
    forms=(
        Form(
            ("<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>"),
            (
                Many(
                    (
                        Mark(('<｜DSML｜invoke name="',)),
                        Name(end=('"',)),
                        Mark((">",)),
                        Params(
                            key_open='<｜DSML｜parameter name="',
                            key_close='"',
                            value_open=">",
                            value_close="</｜DSML｜parameter>",
                            close=("</｜DSML｜invoke>",),
                            outer=CLOSE,
                            text_mark='string="true"',
                            json_mark='string="false"',
                        ),
                    )
                ),
                Close(CLOSE),
            ),
        ),
    ),
    written=Written(
        call='<｜DSML｜invoke name="«name»">\n«params»</｜DSML｜invoke>',
        before="<｜DSML｜tool_calls>\n",
        after="\n</｜DSML｜tool_calls>",
        between="\n",
        values="params",
        param='<｜DSML｜parameter name="«key»" string="«type»">«value»</｜DSML｜parameter>\n',
        text_attribute="true",
        json_attribute="false",
    ),
    signs=(("｜DSML｜", "tool_calls"),),
)

detect = DIALECT.detect
