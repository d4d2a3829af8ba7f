"""Parses `tool_choice` of OpenAI's chat API: which calls an answer may, must or must not make.

    none | auto | required | {"type": "function", "function": {"name"}}
    {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}

Other APIs are translated into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.errors import RequestError, Unsupported

ToolChoiceMode = Literal["none", "auto", "required"]
_ALLOWED = "'none', 'auto', 'required' or the choice of a function"


@dataclass(frozen=True, slots=True)
class ToolChoicePolicy:
    """The choice of a request. is_explicit: the request has one; else it is the default."""

    mode: ToolChoiceMode
    is_explicit: bool = False
    function: str | None = None
    """The one function; then mode is required."""
    allowed: frozenset[str] | None = None
    """Only these functions; None: all."""

    @property
    def is_required(self) -> bool:
        """The answer is calls and nothing else."""
        return self.mode == "required"


def parse_tool_choice(
    given: object, names: Sequence[str], param: str = "tool_choice"
) -> ToolChoicePolicy:
    """Parse `tool_choice`. names: of the functions declared. Raises RequestError."""
    if given is None:
        return ToolChoicePolicy("auto")
    if isinstance(given, str):
        policy = _parse_word(given, param)
    elif isinstance(given, Mapping):
        policy = _parse_object(given, param)
    else:
        raise RequestError(f"{param} must be {_ALLOWED}, got {given!r:.80}", param=param)
    if policy.is_required and not names:
        raise RequestError(f"{param} requires a call: tools must be given", param=param)
    wanted = {policy.function} if policy.function is not None else policy.allowed or set()
    for name in sorted(one for one in wanted if one is not None):
        if name not in names:
            known = ", ".join(names[:8]) or "none"
            message = f"{param} names {name!r:.80}, which is not among the tools ({known:.400})"
            raise RequestError(message, param=param)
    return policy


def _parse_word(given: str, param: str) -> ToolChoicePolicy:
    if given == "none":
        return ToolChoicePolicy("none", is_explicit=True)
    if given == "auto":
        return ToolChoicePolicy("auto", is_explicit=True)
    if given == "required":
        return ToolChoicePolicy("required", is_explicit=True)
    raise RequestError(f"{param} must be {_ALLOWED}, got {given!r:.80}", param=param)


def _parse_object(given: Mapping[str, object], param: str) -> ToolChoicePolicy:
    kind = given.get("type", "function")
    if kind == "function":
        return ToolChoicePolicy("required", is_explicit=True, function=_function_name(given, param))
    if kind == "allowed_tools":
        return _parse_allowed_tools(given, param)
    message = f"{param}: only functions are served here, not {kind!r:.40}"
    raise Unsupported(message, param=param)


def _function_name(given: Mapping[str, object], param: str) -> str:
    function = given.get("function", given)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"{param} must have the name of a function", param=param)
    return name


def _parse_allowed_tools(given: Mapping[str, object], param: str) -> ToolChoicePolicy:
    inner = given.get("allowed_tools", given)
    inner = inner if isinstance(inner, Mapping) else {}
    mode, tools = inner.get("mode", "auto"), inner.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(f"{param}.mode must be 'auto' or 'required'", param=param)
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise RequestError(f"{param}.tools must be a non-empty list of tools", param=param)
    names = []
    for tool in tools:
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            raise Unsupported(f"{param}.tools: only functions are served here", param=param)
        names.append(_function_name(tool, param))
    return ToolChoicePolicy(
        "required" if mode == "required" else "auto", True, allowed=frozenset(names)
    )
