"""EngineArgs: the options as one flat object, as in vLLM.

It checks the given values, and makes Options of them. Every name that quire accepts is a
field, so `LLM(**dataclasses.asdict(EngineArgs(...)))` works.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from quire.config import vllm_options
from quire.config.options import Options, option_specs
from quire.errors import ConfigError


def _post_init(self: Any) -> None:
    self.options()


def _options(self: Any) -> Options:
    """Return the options tree of the given values."""
    given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    defaults = {spec.name: spec.default for spec in option_specs().values()}
    return Options.from_flat({name: v for name, v in given.items() if v != defaults.get(name)})


def _repr(self: Any) -> str:
    """Show the given values, without defaults and secrets."""
    given = [
        f for f in dataclasses.fields(self) if getattr(self, f.name) not in (None, f.default, {})
    ]
    shown = [f"{f.name}={getattr(self, f.name)!r}" for f in given if f.name != "hf_token"]
    return f"{type(self).__name__}({', '.join(shown)})"


def _from_cli_args(cls: Callable[..., Any], args: argparse.Namespace) -> Any:
    """Make one from a parsed command line; other names are ignored."""
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(args).items() if name in names}
    model = given.pop("model_tag", None)
    return cls(**(given | ({} if model is None else {"model": model})))


def _add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add every engine option to a parser."""
    from quire.config.command_line.option_parser import add_options

    add_options(parser)
    return parser


def _fields() -> list[tuple[str, Any, Any]]:
    own = [(s.name, s.hint, _field(s.default)) for s in option_specs().values()]
    others = [
        (n, Any, dataclasses.field(default=None))
        for n in vllm_options.option_names()
        if n not in option_specs()
    ]
    return own + others


def _field(default: object) -> Any:
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict)
    return dataclasses.field(default=default)


EngineArgs: Any = dataclasses.make_dataclass(
    "EngineArgs",
    _fields(),
    repr=False,
    namespace={
        "__post_init__": _post_init,
        "__repr__": _repr,
        "__doc__": "Every engine option, flat. See quire.config.options for their meaning.",
        "__module__": __name__,
        "options": _options,
        "from_cli_args": classmethod(_from_cli_args),
        "add_cli_args": staticmethod(_add_cli_args),
    },
)

AsyncEngineArgs: Any = dataclasses.make_dataclass(
    "AsyncEngineArgs", [], repr=False, bases=(EngineArgs,), namespace={"__module__": __name__}
)


def options_of(given: Any) -> Options:
    """Make Options from EngineArgs, Options, or flat names."""
    if isinstance(given, Options):
        return given
    if isinstance(given, EngineArgs):
        return _options(given)
    if isinstance(given, dict):
        return Options.from_flat(given)
    raise ConfigError(f"engine arguments must be EngineArgs or a dict, got {type(given).__name__}")
