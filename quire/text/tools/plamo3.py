"""A section of requests, each with a name and arguments in JSON: PLaMo 3."""

from __future__ import annotations

from quire.text.tools.base import (
    ArgumentsStep,
    CallSyntax,
    CallTemplate,
    CloseStep,
    LiteralStep,
    NameStep,
    RepeatStep,
    ToolFormat,
)


def _tag(edge: str, name: str) -> str:
    return f"<|plamo:{edge}_tool_{name}:plamo|>"


ARGUMENTS = _tag("begin", "arguments")
JSON_MARK, MESSAGE = "<|plamo:constrain|>json", "<|plamo:msg|>"

FORMAT = ToolFormat(
    name="plamo3",
    syntaxes=(
        CallSyntax(
            (_tag("begin", "requests"),),
            (
                RepeatStep(
                    (
                        LiteralStep((_tag("begin", "request"),)),
                        LiteralStep((_tag("begin", "name"),)),
                        NameStep(end=(_tag("end", "name"),)),
                        LiteralStep((ARGUMENTS,)),
                        LiteralStep((JSON_MARK,), optional=True),
                        LiteralStep((MESSAGE,), optional=True),
                        ArgumentsStep(),
                        CloseStep((_tag("end", "arguments"),)),
                        CloseStep((_tag("end", "request"),)),
                    )
                ),
                CloseStep((_tag("end", "requests"),)),
            ),
        ),
    ),
    template=CallTemplate(
        call=f"{_tag('begin', 'request')}{_tag('begin', 'name')}«name»{_tag('end', 'name')}"
        f"{ARGUMENTS}{JSON_MARK}{MESSAGE}«arguments»{_tag('end', 'arguments')}"
        f"{_tag('end', 'request')}",
        before=_tag("begin", "requests"),
        after=_tag("end", "requests"),
    ),
    template_markers=((_tag("begin", "requests"),),),
)

detect = FORMAT.detect
