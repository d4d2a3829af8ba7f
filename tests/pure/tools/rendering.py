"""Renders calls as the models of a format write them: the inverse of parsing."""

import json
from dataclasses import dataclass, field

from quire.text.tools._render_calls import call_frame, param_frame, render_value


@dataclass(frozen=True)
class CallToRender:
    name: str
    arguments: dict = field(default_factory=dict)


def render_calls(tool_format, calls):
    """The text of these calls."""
    template = tool_format.template
    texts = []
    for place, call in enumerate(calls):
        frame = call_frame(tool_format, call.name, place)
        texts.append(frame.begin + render_arguments(template, call.arguments) + frame.end)
    return template.before + template.between.join(texts) + template.after


def render_arguments(template, arguments):
    if template.notation == "json":
        return json.dumps(arguments, ensure_ascii=False)
    if template.notation == "braces":
        return render_value(template, arguments)
    return template.param_between.join(
        render_param(template, key, one) for key, one in arguments.items()
    )


def render_param(template, key, value):
    begin, end = param_frame(template, key, text=isinstance(value, str))
    if template.notation == "elements" and has_elements(value):
        items = value.items() if isinstance(value, dict) else [("item", one) for one in value]
        return begin + "".join(render_param(template, name, one) for name, one in items) + end
    return begin + render_value(template, value) + end


def has_elements(value):
    """Whether elements without types hold the value: objects and lists of texts do."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not inner or (isinstance(value, dict) and set(value) == {"item"}):
        return False
    return all(isinstance(one, str) or has_elements(one) for one in inner)
