"""After a token a JSON list, or (since v11) a name, perhaps an id, and its arguments: Mistral."""

from __future__ import annotations

from quire.text.tools.base import (
    ArgumentsStep,
    BranchStep,
    CallSyntax,
    CallTemplate,
    NameStep,
    ObjectStep,
    ToolFormat,
)

FORMAT = ToolFormat(
    name="mistral",
    syntaxes=(
        CallSyntax(
            ("[TOOL_CALLS]",),
            (
                BranchStep(
                    ("[", "{"),
                    (ObjectStep(id=("id",), many=True),),
                    (
                        NameStep(end=("[ARGS]", "[CALL_ID]"), before=("{",), id_after="[CALL_ID]"),
                        ArgumentsStep(),
                    ),
                ),
            ),
        ),
    ),
    template=CallTemplate(call="[TOOL_CALLS]«name»[ARGS]«arguments»"),
    template_markers=(("[TOOL_CALLS]",),),
    id_style="nine",
)

detect = FORMAT.detect
