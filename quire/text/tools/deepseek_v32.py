"""Tags with a marker of their own, each value marked as text or JSON: DeepSeek V3.2."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Many, Mark, Name, Params, Written

CLOSE = ("</｜DSML｜function_calls>",)

DIALECT = Dialect(
    name="deepseek_v32",
    forms=(
        Form(
            ("<｜DSML｜function_calls>",),
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
        before="<｜DSML｜function_calls>\n",
        after="\n</｜DSML｜function_calls>",
        between="\n",
        values="params",
        param='<｜DSML｜parameter name="«key»" string="«type»">«value»</｜DSML｜parameter>\n',
        text_attribute="true",
        json_attribute="false",
    ),
    signs=(("｜DSML｜", "function_calls"),),
)

detect = DIALECT.detect
