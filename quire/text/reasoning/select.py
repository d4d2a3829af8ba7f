"""Selects the reasoning format of a model: by name, by chat template, or from a plug-in file."""

from __future__ import annotations

from types import ModuleType

from quire.errors import ConfigError
from quire.registry import PluginRegistry
from quire.text.plugin_file import load_plugin_file
from quire.text.reasoning.base import ReasoningFormat

NOT_BUILT = frozenset({"hf", "beam"})
"""Names that read a `response_template` in tokenizer_config.json, in other engines."""
REASONING_FORMATS = PluginRegistry(
    "quire.text.reasoning", "quire.reasoning_parsers", "reasoning parser"
)
GENERIC_FORMAT = "qwen3"
"""Has no marks of its own: chosen where no other format matches."""


def format_names() -> list[str]:
    """Names of all formats."""
    return REASONING_FORMATS.names()


def select_reasoning_format(
    name: str, template: str | None = None, plugin: str | None = None
) -> ReasoningFormat | None:
    """The format of this name; "auto": of the template, None if it shows no reasoning.

    plugin: a file of Python with `FORMAT`; its name is NAME or that of the file.
    Raises ConfigError with the nearest names.
    """
    if plugin is not None:
        module = load_plugin_file(plugin, "reasoning parser")
        if name in (vars(module).get("NAME", module.__name__), "auto"):
            return _format_of(module)
    if name == "auto":
        found = detect_reasoning_format(template or "")
        return None if found is None else _format_of(REASONING_FORMATS.load(found))
    if name in NOT_BUILT:
        raise ConfigError(
            f"the reasoning parser {name!r}, which reads the response_template of "
            f"tokenizer_config.json, is not built yet; name the format of the model, or give a "
            f"plug-in file of your own"
        )
    return _format_of(REASONING_FORMATS.load(name.replace("-", "_")))


def check_reasoning_marks(
    reasoning: ReasoningFormat | None, start: str, end: str, param: str
) -> None:
    """Raise ConfigError unless these are the format's own marks; "" leaves one out.

    param: the option that gives them.
    """
    if not (start.strip() or end.strip()):
        return
    own = () if reasoning is None else reasoning.reasoning_marks
    for one, other in own:
        if start.strip() in ("", one.strip()) and end.strip() in ("", other.strip()):
            return
    given = f"{param} has the marks {start!r} and {end!r}"
    if not own:
        raise ConfigError(f"{given}, and there is no reasoning parser with marks: name one")
    allowed = " or ".join(f"{one!r} and {other!r}" for one, other in own)
    raise ConfigError(
        f"{given}, the reasoning parser {allowed}; other marks are not built yet: leave them out, "
        f"or give a plug-in file with them (--reasoning-parser-plugin)"
    )


def detect_reasoning_format(template: str) -> str | None:
    """The name of the format that a chat template is written for."""
    found = [name for name in format_names() if REASONING_FORMATS.load(name).detect(template)]
    own = [name for name in found if name != GENERIC_FORMAT]
    return own[0] if own else found[0] if found else None


def _format_of(module: ModuleType) -> ReasoningFormat:
    reasoning_format = vars(module).get("FORMAT")
    if reasoning_format is None:
        raise ConfigError(f"the reasoning parser {module.__name__!r} has no FORMAT")
    if not isinstance(reasoning_format, ReasoningFormat):
        message = f"{module.__name__}: FORMAT must be a quire.text.reasoning.base.ReasoningFormat"
        raise ConfigError(message)
    return reasoning_format
