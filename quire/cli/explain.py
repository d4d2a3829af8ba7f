"""quire explain [MODEL] [options]: prints every setting of the engine with its reason. It
takes the flags of `quire serve` and reads no weights. --offline: the settings of LLM()."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire import env
from quire.cli.serve_flags import add_server_options, server_options_from
from quire.config.command_line.option_parser import OptionParser, add_options, options_from
from quire.config.engine_config import Decision, EngineConfig
from quire.config.memory.kv_layout import KVCacheGroup
from quire.config.options import option_specs
from quire.config.vllm_environment import VARIABLE_TO_OPTION, apply_environment
from quire.engine.build import resolve_config
from quire.engine.startup.model_setup import describe_model
from quire.server.options import ServerOptions

SERVER_OPTION_NAMES = tuple(one.name for one in dataclasses.fields(ServerOptions))


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    server_args = {name: value for name, value in vars(args).items() if name in SERVER_OPTION_NAMES}
    rest = {name: value for name, value in vars(args).items() if name not in SERVER_OPTION_NAMES}
    server = not args.offline
    environment = env.read()
    options = apply_environment(options_from(argparse.Namespace(**rest)))
    resolved = resolve_config(describe_model(options, environment), environment, server=server)
    settings, why = flatten_config(resolved.config), list(resolved.decisions)
    if server:
        server_options = server_options_from(argparse.Namespace(**server_args))
        settings |= {
            f"server.{name}": getattr(server_options, name) for name in SERVER_OPTION_NAMES
        }
        settings["server.api_key"] = (
            f"({len(server_options.api_key)} given)" if server_options.api_key else ()
        )
        why += [
            Decision(f"server.{name}", value, "requested") for name, value in server_args.items()
        ]
    why += [
        Decision(name, value, f"set by {variable}")
        for name, value, variable in _settings_from_environment(vars(args))
    ]
    if args.json:
        found = [dataclasses.asdict(one) for one in why if one.field != "server.api_key"]
        print(json.dumps({"config": settings, "why": found}, indent=2, default=str))
    else:
        print(format_table(settings, why))
    return 0


def parser() -> OptionParser:
    """Return the parser of `quire explain`: the flags of `quire serve` and two more."""
    parser = OptionParser(prog="quire explain", usage="%(prog)s [MODEL] [options]")
    parser.description = __doc__
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub name")
    parser.add_argument(
        "--offline", action="store_true", help="choose as LLM() does, not as `quire serve`"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_server_options(parser)
    add_options(parser)
    return parser


def _settings_from_environment(flags: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Return settings from the environment that no flag overrides: name, value, variable."""
    given = env.vllm_variables()
    found = []
    for variable, option in VARIABLE_TO_OPTION.items():
        if given.get(variable) and option not in flags:
            section = option_specs()[option].section if option in option_specs() else "server"
            found.append((f"{section}.{option}", given[variable], variable))
    return found


def flatten_config(config: EngineConfig) -> dict[str, Any]:
    """Return section.name -> value; layers are shortened."""
    found: dict[str, Any] = {}
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        if part is None:  # the model has none
            continue
        if not dataclasses.is_dataclass(part):
            found[section.name] = part
            continue
        for field in dataclasses.fields(part):
            found[f"{section.name}.{field.name}"] = getattr(part, field.name)
    if config.load.hf_token is not None:
        found["load.hf_token"] = "(given)"
    found["cache.layers"] = f"{len(config.cache.layers)} layers"
    found["cache.groups"] = ", ".join(
        f"{len(g.layers)} {_group_kind(g)}" for g in config.cache.groups
    )
    return found


def _group_kind(group: KVCacheGroup) -> str:
    if group.cross:
        return "cross"
    return "full" if group.window is None else f"window {group.window}"


def format_table(settings: dict[str, Any], why: Sequence[Decision]) -> str:
    """Format one line per setting, with the reason of those that were chosen."""
    reasons = {one.field: one.reason for one in why}
    width = max(map(len, settings))
    lines = []
    for name, value in settings.items():
        reason = f"  ({reasons[name]})" if name in reasons else ""
        lines.append(f"{name:<{width}}  {value}{reason}")
    return "\n".join(lines)
