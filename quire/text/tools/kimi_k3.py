"""Tags opened and closed by tokens, each value with its type: Kimi K3."""

from __future__ import annotations

from quire.text.tools.base import Close, Dialect, Form, Label, Many, Mark, Name, Params, Written

DIALECT = Dialect(
    name="kimi_k3",
    forms=(
        Form(
            ("<|open|>tools<|sep|>",),
            (
                Many(
                    (
                        Mark(('<|open|>call tool="',)),
                        Name(end=('"',)),
                        Label(("<|sep|>",)),
                        Params(
                            key_open='<|open|>argument key="',
                            key_close='"',
                            value_open="<|sep|>",
                            value_close="<|close|>argument<|sep|>",
                            close=("<|close|>call<|sep|>",),
                            outer=("<|close|>tools<|sep|>",),
                            text_mark='type="string"',
                            json_mark='type="',
                        ),
                    )
                ),
                Close(("<|close|>tools<|sep|>",)),
            ),
        ),
    ),
    written=Written(
        call='<|open|>call tool="«name»" index="«place»"<|sep|>«params»<|close|>call<|sep|>',
        before="<|open|>tools<|sep|>",
        after="<|close|>tools<|sep|>",
        values="params",
        param='<|open|>argument key="«key»" type="«type»"<|sep|>«value»<|close|>argument<|sep|>',
        text_attribute="string",
        json_attribute="json",
    ),
    signs=(("<|open|>", "<|sep|>", "tools"),),
)

detect = DIALECT.detect
