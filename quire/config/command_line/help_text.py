"""Help text: prints one line per flag, in groups; with a word, the matching flags in full.

--help            one line for each flag, and the other forms of --help
--help=GROUP      all flags of a group, in full
--help=WORD       the flags with this word in their name, in full; else those with it in their text
--help=all        everything, including names of other engines
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence

TEXT_COLUMN = 34
"""Column of the descriptions."""
VLLM_GROUP_TITLE = "names of other engines"
"""Title of the group that is shown only on request."""


class HelpAction(argparse.Action):
    """-h, --help, --help=WORD."""

    def __init__(self, option_strings: Sequence[str], dest: str, **named: object) -> None:
        super().__init__(
            option_strings, argparse.SUPPRESS, nargs="?", metavar="WORD", default=argparse.SUPPRESS,
            help="Print this help; with a word, the matching flags in full.",
        )  # fmt: skip

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        word = str(values) if values else ""
        text = format_topic(parser, word) if word else format_overview(parser)
        if text is None:
            parser.exit(2, f"no flag matches {word!r}{_suggest(parser, word)}\n")
        print(text)  # noqa: T201  help is the requested output
        parser.exit(0)


def format_overview(parser: argparse.ArgumentParser) -> str:
    """Format one line for each flag."""
    lines = [_usage(parser), ""]
    if parser.description:
        lines += [parser.description.strip(), ""]
    groups = [group for group in parser._action_groups if _visible_actions(group)]
    for group in groups:
        if group.title == VLLM_GROUP_TITLE:
            continue
        lines.append(f"{group.title}:" + (f" {group.description}" if group.description else ""))
        lines += [_format_line(action) for action in _visible_actions(group)]
        lines.append("")
    lines.append("A boolean flag --x has --no-x. In names, _ and - are equal. More help:")
    titles = [_group_keyword(group) for group in groups if _is_options(group)]
    if titles:
        lines.append(f"  --help=GROUP   the flags of a group in full: {', '.join(titles)}")
    lines.append("  --help=WORD    the flags with the word in their name, or else in their text")
    lines.append("  --help=all     every flag")
    return "\n".join(lines)


def format_topic(parser: argparse.ArgumentParser, word: str) -> str | None:
    """Format a group, the flags that match a word, or everything. None: nothing matches."""
    groups = [group for group in parser._action_groups if _visible_actions(group)]
    if word.lower() == "all":
        return "\n".join(
            [
                _usage(parser),
                "",
                *(_format_group(group, _visible_actions(group)) for group in groups),
            ]
        )
    wanted = word.lower().removesuffix("config").removesuffix(" options").strip()
    for group in groups:
        if _is_options(group) and _group_keyword(group) == wanted:
            return _format_group(group, _visible_actions(group))
    for matches in (_is_named, _has_word, _has_part, _has_text):
        found = [
            (group, [one for one in _visible_actions(group) if matches(one, word)])
            for group in groups
        ]
        parts = [_format_group(group, actions) for group, actions in found if actions]
        if parts:
            return "\n".join(parts)
    return None


def _usage(parser: argparse.ArgumentParser) -> str:
    if parser.usage is None:
        return f"usage: {parser.prog} [options]"
    return f"usage: {parser.usage % {'prog': parser.prog}}"


def _visible_actions(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    return [one for one in group._group_actions if one.help != argparse.SUPPRESS]


def _is_options(group: argparse._ArgumentGroup) -> bool:
    title = group.title or ""
    return title.endswith(" options") or title == VLLM_GROUP_TITLE


def _group_keyword(group: argparse._ArgumentGroup) -> str:
    """The name of a group in --help=GROUP."""
    title = group.title or ""
    return "foreign" if title == VLLM_GROUP_TITLE else title.removesuffix(" options")


def _is_named(action: argparse.Action, word: str) -> bool:
    wanted = word.lower().lstrip("-").replace("_", "-")
    return any(flag.lstrip("-") == wanted for flag in action.option_strings)


def _has_word(action: argparse.Action, word: str) -> bool:
    """A name of the flag has the word between dashes."""
    wanted = word.lower().lstrip("-").replace("_", "-")
    return any(f"-{wanted}-" in f"-{flag.lstrip('-')}-" for flag in action.option_strings)


def _has_part(action: argparse.Action, word: str) -> bool:
    wanted = word.lower().lstrip("-").replace("_", "-")
    return any(wanted in flag for flag in action.option_strings)


def _has_text(action: argparse.Action, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", action.help or "", re.I) is not None


def _format_line(action: argparse.Action) -> str:
    """Format a flag with the first sentence of its text, and its default."""
    text = (action.help or "").replace("%%", "%")
    text, _, default = text.partition(" Default: ")
    first = re.split(r"(?<=[^A-Z0-9 ]{2})\. (?=[A-Z0-9])", text, maxsplit=1)[0].rstrip(".")
    if default:
        first += f" [{default.removesuffix('.')}]"
    return _two_columns(_format_flag(action), _wrapped(first))


def _format_group(group: argparse._ArgumentGroup, actions: Iterable[argparse.Action]) -> str:
    lines = [f"{group.title}:" + (f" {group.description}" if group.description else "")]
    for action in actions:
        text = (action.help or "").replace("%%", "%")
        names = " ".join(_format_aliases(action))
        lines.append(_two_columns(_format_flag(action), _wrapped(text + names)))
    return "\n".join([*lines, ""])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _terminal_width() - TEXT_COLUMN, break_on_hyphens=False)


def _format_flag(action: argparse.Action) -> str:
    """Format the first flag and its value."""
    if not action.option_strings:
        return str(action.metavar or action.dest)
    flag = next((f for f in action.option_strings if f.startswith("--")), action.option_strings[0])
    if action.nargs == 0:
        return flag
    value = str(action.metavar or action.dest.upper())
    if action.nargs == "?":
        return f"{flag}[={value}]"
    return f"{flag} {value}" + (" ..." if action.nargs in ("+", "*") else "")


def _format_aliases(action: argparse.Action) -> list[str]:
    """List its other names in a sentence."""
    call = _format_flag(action).partition(" ")[0].partition("[")[0]
    others = [f for f in action.option_strings if f != call and not f.startswith("--no-")]
    return [f" Also {', '.join(others)}."] if others else []


def _two_columns(left: str, right: Sequence[str]) -> str:
    pad = " " * TEXT_COLUMN
    head = f"  {left}"
    if len(head) + 2 > TEXT_COLUMN:
        return "\n".join([head, *(pad + line for line in right)])
    return "\n".join(
        [head.ljust(TEXT_COLUMN) + "".join(right[:1]), *(pad + line for line in right[1:])]
    )


def _terminal_width() -> int:
    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))


def _suggest(parser: argparse.ArgumentParser, word: str) -> str:
    names = [flag.lstrip("-") for flag in parser._option_string_actions]
    near = difflib.get_close_matches(word.lower().replace("_", "-"), names, n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
