"""After a token a JSON list, or (since v11) a name, perhaps an id, and its arguments: Mistral."""

from __future__ import annotations

from quire.text.tools.base import Arguments, Dialect, Either, Form, Name, Object, Written

DIALECT = Dialect(
    name="mistral",
    forms=(
        Form(
            ("[TOOL_CALLS]",),
            (
                Either(
                    ("[", "{"),
                    (Object(id=("id",), many=True),),
                    (
                        Name(end=("[ARGS]", "[CALL_ID]"), before=("{",), id_after="[CALL_ID]"),
                        Arguments(),
                    ),
                ),
            ),
        ),
    ),
    written=Written(call="[TOOL_CALLS]«name»[ARGS]«arguments»"),
    signs=(("[TOOL_CALLS]",),),
    ids="nine",
)

detect = DIALECT.detect
