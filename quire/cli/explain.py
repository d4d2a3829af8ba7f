"""quire explain [MODEL] [options]: every setting the engine would run with, and why. No weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from quire import env
from quire.config.cli import OptionParser, add_options, options_from
from quire.config.config import EngineConfig, Why
from quire.engine.build import decide, describe


def main(argv: Sequence[str]) -> int:
    parser = OptionParser(prog="quire explain", usage="%(prog)s [MODEL] [options]")
    parser.description = __doc__
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub name")
    parser.add_argument("--server", action="store_true", help="as `quire serve` would choose")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_options(parser)
    args = parser.parse_args(argv)
    options, environment = options_from(args), env.read()
    resolved = decide(describe(options, environment), options, environment, server=args.server)
    settings = flat(resolved.config)
    if args.json:
        why = [dataclasses.asdict(one) for one in resolved.why]
        print(json.dumps({"config": settings, "why": why}, indent=2, default=str))
    else:
        print(table(settings, resolved.why))
    return 0


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
