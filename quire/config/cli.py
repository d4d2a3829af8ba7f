"""argparse and YAML, generated from the options. No option is declared here.

`_` and `-` are equal in names; a flag `--x` has `--no-x`; a dict takes JSON or `--name.key value`;
`--config file.yaml` gives flags, which the command line overrides; unknown flags name the nearest.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin

from quire.config import foreign
from quire.config.options import Options, Spec, docs, section_classes, specs
from quire.errors import ConfigError


class OptionParser(argparse.ArgumentParser):
    """An argument parser with the rules above. Sub-parsers are of the same class."""

    def __init__(self, *given: Any, **named: Any) -> None:
        named.setdefault("allow_abbrev", False)
        super().__init__(*given, **named)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        import sys

        argv = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._rewrite(argv), namespace)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        found, extra = self.parse_known_args(args, namespace)
        if extra:
            self.unknown(extra)
        return found

    def unknown(self, extra: Sequence[str]) -> NoReturn:
        """Report arguments nobody knows, with the nearest names."""
        flags = [one for one in extra if one.startswith("-")] or list(extra)
        parts = []
        for flag in flags:
            near = difflib.get_close_matches(flag.partition("=")[0], self.flags(), n=3)
            parts.append(f"{flag} (did you mean {' or '.join(near)}?)" if near else flag)
        self.error(f"unknown argument {', '.join(parts)}")

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, without the page of usage that hundreds of options make."""
        self.exit(2, f"{self.prog}: error: {message}\ntry `{self.prog} --help`\n")

    def flags(self) -> list[str]:
        """Every flag of this parser and its sub-parsers."""
        found = dict.fromkeys(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    found.update(dict.fromkeys(parser._option_string_actions))
        return list(found)

    def _rewrite(self, argv: list[str]) -> list[str]:
        if "--config" not in self._option_string_actions:
            return [dashed(one) for one in argv]  # a command's own parser does the rest
        argv = with_file([dashed(one) for one in argv])
        return join_dotted(argv)


def dashed(word: str) -> str:
    """--max_model_len=8 as --max-model-len=8; other words as they are. Keys after a dot stay."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    flag, dot, key = name.partition(".")
    return flag.replace("_", "-") + dot + key + equals + value


def with_file(argv: Sequence[str]) -> list[str]:
    """The flags of `--config FILE` first, so that the command line wins."""
    words = list(argv)
    for i, word in enumerate(words):
        if word == "--config" and i + 1 < len(words):
            return [*file_flags(Path(words[i + 1])), *words[:i], *words[i + 2 :]]
        if word.startswith("--config="):
            return [*file_flags(Path(word.partition("=")[2])), *words[:i], *words[i + 1 :]]
    return words


def file_flags(path: Path) -> list[str]:
    """A YAML file of options as command-line words."""
    import yaml

    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--config takes a .yaml file, got {str(path)!r}")
    if not path.is_file():
        raise ConfigError(f"--config: no file {path}")
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as e:
        raise ConfigError(f"--config: {path} is not YAML: {e}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"--config: {path} must hold `name: value` lines")
    return [word for name, value in given.items() for word in _words(str(name), value)]


def _words(name: str, value: object) -> list[str]:
    flag = dashed(f"--{name}")
    if value is True:
        return [flag]
    if value is False:
        return [f"--no-{flag[2:]}"]
    if value is None:
        return []
    if isinstance(value, list) and not any(isinstance(one, (dict, list)) for one in value):
        return [flag, *map(str, value)]
    return [f"{flag}={json.dumps(value) if isinstance(value, (dict, list)) else value}"]


def join_dotted(argv: Sequence[str]) -> list[str]:
    """`--hf-overrides.rope_scaling.factor 2` as one JSON flag per dict."""
    trees: dict[str, dict[str, Any]] = {}
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        if not (word.startswith("--") and "." in name):
            words.append(word)
            continue
        text = value if equals else next(rest, "")
        flag, *keys = name.split(".")
        at = trees.setdefault(flag, {})
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = _json_or_text(text)
    return words + [f"{flag}={json.dumps(tree)}" for flag, tree in trees.items()]


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every engine option, in groups, and the accepted names of other engines, hidden.

    Options that are not given do not appear in the namespace.
    """
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of flags; the command line wins."
    )
    for section, kind in section_classes().items():
        about = (kind.__doc__ or "").strip()
        group = parser.add_argument_group(f"{section} options", about)
        for spec in specs().values():
            if spec.section == section:
                _add(group, spec)
    hidden = parser.add_argument_group("names of other engines")
    for name in foreign.names():
        _add_foreign(hidden, name, set(parser._option_string_actions))


def _add(group: argparse._ArgumentGroup, spec: Spec) -> None:
    flags = [f"--{spec.name.replace('_', '-')}"]
    if spec.alias:
        flags.append(f"--{spec.alias.replace('_', '-')}")
    if spec.short:
        flags.append(spec.short)
    about = docs()[spec.name].replace("%", "%%")
    if spec.is_flag:
        action = argparse.BooleanOptionalAction
        group.add_argument(*flags, action=action, default=argparse.SUPPRESS, help=about)
        return
    if spec.default not in (None, {}, ()):
        about += f" Default: {spec.default}."
    many = _takes_tuple(spec.hint)
    group.add_argument(
        *flags,
        dest=spec.name,
        nargs="+" if many else None,
        default=argparse.SUPPRESS,
        metavar=spec.name.rpartition("_")[2].upper(),
        help=about,
    )


def _takes_tuple(hint: Any) -> bool:
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return any((get_origin(one) or one) is tuple for one in hints)


def _add_foreign(group: argparse._ArgumentGroup, name: str, taken: set[str]) -> None:
    flag = f"--{name.replace('_', '-')}"
    if flag in taken:
        return
    hide = argparse.SUPPRESS
    if name in foreign.FLAGS:
        group.add_argument(
            flag, dest=name, action=argparse.BooleanOptionalAction, default=hide, help=hide
        )
        return
    group.add_argument(flag, dest=name, nargs="?", const=True, default=hide, help=hide)


def options_from(args: argparse.Namespace, extra: Mapping[str, object] | None = None) -> Options:
    """Options of a parsed command line. `extra` wins. Names that are no options are left alone."""
    return Options.of(flat_from(args) | dict(extra or {}))


def flat_from(args: argparse.Namespace) -> dict[str, object]:
    """The engine options that were given, by flat name, as text or values."""
    known: Iterable[str] = {*specs(), *foreign.names()}
    flat = {name: value for name, value in vars(args).items() if name in known}
    positional = flat.pop("model_tag", None)
    return flat | ({"model": positional} if positional is not None else {})
