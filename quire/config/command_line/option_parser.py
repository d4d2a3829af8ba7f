"""Option parser: builds an argparse parser from the options. No option is declared here.

`_` and `-` are equal in names; a flag `--x` has `--no-x`; a dict takes JSON or `--name.key value`;
`--config file.yaml` gives flags, which the command line overrides; unknown flags name the nearest.
argv_rewrite.py rewrites the words for that; help_text.py prints --help.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from quire.config import vllm_options
from quire.config.command_line.argv_rewrite import BooleanFlag, negations, rewrite_argv
from quire.config.command_line.help_text import VLLM_GROUP_TITLE, HelpAction, format_overview
from quire.config.options import Options, OptionSpec, option_docs, option_specs, section_classes


class OptionParser(argparse.ArgumentParser):
    """An argument parser with the rules above. Sub-parsers are of the same class."""

    def __init__(self, *given: Any, **named: Any) -> None:
        has_help = named.pop("add_help", True)
        super().__init__(*given, **({"allow_abbrev": False} | named | {"add_help": False}))
        if has_help:
            self.add_argument("-h", "--help", action=HelpAction)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        import sys

        argv = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(rewrite_argv(argv, self._option_string_actions), namespace)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        found, extra = self.parse_known_args(args, namespace)
        if extra:
            self.report_unknown(extra)
        return found

    def report_unknown(self, extra: Sequence[str]) -> NoReturn:
        """Report unknown arguments, with similar names."""
        flags = [one for one in extra if one.startswith("-")] or list(extra)
        parts = []
        for flag in flags:
            near = difflib.get_close_matches(flag.partition("=")[0], self.flags(), n=3)
            parts.append(f"{flag} (did you mean {' or '.join(near)}?)" if near else flag)
        self.error(f"unknown argument {', '.join(parts)}")

    def error(self, message: str) -> NoReturn:
        """Print the error, without a usage text of hundreds of options."""
        self.exit(2, f"{self.prog}: error: {message}\ntry `{self.prog} --help`\n")

    def format_help(self) -> str:
        return format_overview(self) + "\n"

    def flags(self) -> list[str]:
        """Return every flag of this parser and its sub-parsers."""
        found = dict.fromkeys(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    found.update(dict.fromkeys(parser._option_string_actions))
        return list(found)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every engine option, in groups, and the accepted names of other engines.

    Options that are not given do not appear in the namespace. A flag that the parser already has
    keeps its meaning.
    """
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,  # replaced by the flags in it before the command line is parsed
        help="YAML file of flags; the command line wins.",
    )
    for section, kind in section_classes().items():
        group = parser.add_argument_group(f"{section} options", (kind.__doc__ or "").strip())
        for spec in option_specs().values():
            if spec.section == section:
                _add_option(group, spec)
    others = parser.add_argument_group(
        VLLM_GROUP_TITLE, "Accepted for compatibility; the log names their effect."
    )
    for name in vllm_options.option_names():
        _add_vllm_option(others, name)


def unused_flags(parser: argparse._ActionsContainer, flags: Iterable[str]) -> list[str]:
    """Return those of the flags that the parser does not have yet."""
    return [flag for flag in flags if flag not in parser._option_string_actions]


def add_boolean_flag(
    group: argparse._ArgumentGroup, flags: Iterable[str], dest: str, about: str
) -> None:
    """Add a boolean flag. Negations whose names are taken are left out."""
    unavailable = [no for flag in flags for no in negations(flag) if not unused_flags(group, [no])]
    action = BooleanFlag(list(flags), dest, default=argparse.SUPPRESS, help=about)
    action.false_flags = tuple(no for no in action.false_flags if no not in unavailable)
    action.option_strings = [*action.true_flags, *action.false_flags]
    group._add_action(action)


def _add_option(group: argparse._ArgumentGroup, spec: OptionSpec) -> None:
    flags = [f"--{spec.name.replace('_', '-')}"]
    if spec.alias:
        flags.append(f"--{spec.alias.replace('_', '-')}")
    if spec.short:
        flags.append(spec.short)
    flags = unused_flags(group, flags)
    if not flags:
        return
    about = option_docs()[spec.name].replace("%", "%%")
    if spec.is_flag:
        default = " Default: on." if spec.default is True else ""
        add_boolean_flag(group, flags, spec.name, about + default)
        return
    if spec.default not in (None, {}, ()):
        about += f" Default: {spec.default}."
    group.add_argument(
        *flags,
        dest=spec.name,
        nargs="+" if takes_tuple(spec.hint) else None,
        default=argparse.SUPPRESS,
        metavar=metavar(spec.name, spec.hint),
        help=about,
    )


def metavar(name: str, hint: Any) -> str:
    """Return the placeholder of the value in the help: the choices if they are few."""
    choices = [str(one) for one in get_args(hint)] if get_origin(hint) is Literal else []
    shown = "|".join(choices)
    return shown if choices and len(shown) < 24 else name.rpartition("_")[2].upper()


def takes_tuple(hint: Any) -> bool:
    """Whether a field of this type takes several values."""
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return any((get_origin(one) or one) is tuple for one in hints)


def _add_vllm_option(group: argparse._ArgumentGroup, name: str) -> None:
    long = f"--{name.replace('_', '-')}"
    if not unused_flags(group, [long]):
        return
    flags = [
        long,
        *unused_flags(
            group, [vllm_options.SHORT_FLAGS[name]] if name in vllm_options.SHORT_FLAGS else []
        ),
    ]
    about = vllm_options.describe_effect(name).replace("%", "%%")
    if name in vllm_options.BOOLEAN_OPTIONS:
        add_boolean_flag(group, flags, name, about)
        return
    group.add_argument(
        *flags,
        dest=name,
        nargs="*" if name in vllm_options.LIST_OPTIONS else None,
        default=argparse.SUPPRESS,
        metavar="VALUE",
        help=about,
    )


def options_from(args: argparse.Namespace, extra: Mapping[str, object] | None = None) -> Options:
    """Make Options of a parsed command line. `extra` has priority. Ignores other names."""
    return Options.from_flat(flat_options_from(args) | dict(extra or {}))


def flat_options_from(args: argparse.Namespace) -> dict[str, object]:
    """Return the given engine options by flat name, as text or values."""
    known: Iterable[str] = {*option_specs(), *vllm_options.option_names()}
    flat = {name: value for name, value in vars(args).items() if name in known}
    positional = flat.pop("model_tag", None)
    return flat | ({"model": positional} if positional is not None else {})
