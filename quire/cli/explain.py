"""quire explain [MODEL] [options]: every setting the engine would run with, and why. It
takes the flags of `quire serve` and reads no weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire import env
from quire.cli.flags import add_server_options, server_options_from
from quire.config.cli import OptionParser, add_options, options_from
from quire.config.config import EngineConfig, Why
from quire.config.environment import OPTIONS, over
from quire.config.options import specs
from quire.engine.build import decide, describe
from quire.server.options import ServerOptions

OWN = tuple(one.name for one in dataclasses.fields(ServerOptions))


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    asked = {name: value for name, value in vars(args).items() if name in OWN}
    rest = {name: value for name, value in vars(args).items() if name not in OWN}
    server = args.server or bool(asked)
    environment = env.read()
    options = over(options_from(argparse.Namespace(**rest)))
    resolved = decide(describe(options, environment), options, environment, server=server)
    settings, why = flat(resolved.config), list(resolved.why)
    if server:
        made = server_options_from(argparse.Namespace(**asked))
        settings |= {f"server.{name}": getattr(made, name) for name in OWN}
        settings["server.api_key"] = f"({len(made.api_key)} given)" if made.api_key else ()
        why += [Why(f"server.{name}", value, "asked for") for name, value in asked.items()]
    why += [Why(name, value, f"{variable} says so") for name, value, variable in _heard(vars(args))]
    if args.json:
        found = [dataclasses.asdict(one) for one in why if one.field != "server.api_key"]
        print(json.dumps({"config": settings, "why": found}, indent=2, default=str))
    else:
        print(table(settings, why))
    return 0


def parser() -> OptionParser:
    """The flags of `quire explain`: those of `quire serve` and two more."""
    parser = OptionParser(prog="quire explain", usage="%(prog)s [MODEL] [options]")
    parser.description = __doc__
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub name")
    parser.add_argument(
        "--server", action="store_true", help="as `quire serve` would choose; so do its flags"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_server_options(parser)
    add_options(parser)
    return parser


def _heard(said: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Settings that the environment says and the command line does not: name, value, variable."""
    given = env.foreign()
    found = []
    for variable, option in OPTIONS.items():
        if given.get(variable) and option not in said:
            section = specs()[option].section if option in specs() else "server"
            found.append((f"{section}.{option}", given[variable], variable))
    return found


def flat(config: EngineConfig) -> dict[str, Any]:
    """section.name -> value; the layers in short."""
    found: dict[str, Any] = {}
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        for field in dataclasses.fields(part):
            found[f"{section.name}.{field.name}"] = getattr(part, field.name)
    if config.load.hf_token is not None:
        found["load.hf_token"] = "(given)"
    found["cache.layers"] = f"{len(config.cache.layers)} layers"
    found["cache.groups"] = ", ".join(
        f"{len(g.layers)} {'full' if g.window is None else f'window {g.window}'}"
        for g in config.cache.groups
    )
    return found


def table(settings: dict[str, Any], why: Sequence[Why]) -> str:
    """One line per setting, with the reason of those that were chosen."""
    reasons = {one.field: one.reason for one in why}
    width = max(map(len, settings))
    lines = []
    for name, value in settings.items():
        reason = f"  ({reasons[name]})" if name in reasons else ""
        lines.append(f"{name:<{width}}  {value}{reason}")
    return "\n".join(lines)
