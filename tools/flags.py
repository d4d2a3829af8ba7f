"""Writes docs/flags.md from the options: python tools/flags.py. A test proves the page current."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from quire.cli.serve_flags import serve_parser
from quire.config import vllm_environment, vllm_options
from quire.config.command_line.help_text import VLLM_GROUP_TITLE
from quire.env import Env
from quire.env import __file__ as env_file

PAGE = Path(__file__).resolve().parents[1] / "docs/flags.md"
HEAD = """# Flags of `quire serve`

Made by `python tools/flags.py` from the options; do not edit it by hand.

- `--max-model-len` and `--max_model_len` are the same. A flag without a value, `--x`, has `--no-x`;
  `--enable-x` has `--disable-x`, and the other way round; `--x=false` works too.
- Where a value is a JSON object, keys can be set one by one: `--hf-overrides.rope_scaling.factor 2`;
  `--name.key+ VALUE` appends to a list.
- Counts and sizes take k, m, g, t (thousands) and K, M, G, T (1024s); sizes also KiB, MB and so on.
- `None` and an empty value say "not given" where that is possible.
- `--config FILE.yaml` holds `name: value` lines, also below the names of the groups. The command line
  wins over the file, and the file over the environment.
- A flag given twice is logged, and the last one counts.
- `quire serve --help` shows one line a flag, `--help=cache` a group, `--help=WORD` what has the word in
  its name or text, `--help=all` everything.
- The engine's options (from *model* on) are also keywords of `LLM(...)`, with `_` for `-`.
"""
VARIABLES = """## Environment variables

Debugging, and what must be known before options exist:
"""
FOREIGN = """## Names of other engines

What users of this kind of engine type, and releases of years ago knew. Each is accepted with a line
in the log that says what became of it, or refused with the reason if leaving it out would change
results.
"""
FOREIGN_VARIABLES = """## Variables of other engines

A `VLLM_*` variable that means an option applies where the option is not given. An unknown name
gets one warning; with `--fail-on-environ-validation` it is an error.
"""


def page() -> str:
    """The whole page."""
    parser = serve_parser()
    parts = [HEAD]
    for group in parser._action_groups:
        actions = [one for one in group._group_actions if one.help != argparse.SUPPRESS]
        if actions and group.title != VLLM_GROUP_TITLE:
            parts.append(_group(group.title or "", group.description or "", actions))
    parts += [VARIABLES, "\n".join(_variables()), ""]
    parts += [FOREIGN, "\n".join(_foreign(parser)), ""]
    parts += [FOREIGN_VARIABLES, "\n".join(_foreign_variables())]
    return "\n".join(parts) + "\n"


def _group(title: str, about: str, actions: Iterable[argparse.Action]) -> str:
    lines = [f"## {title[:1].upper()}{title[1:]}", "", about, "", "| flag | meaning |", "|---|---|"]
    for action in actions:
        names = [flag for flag in action.option_strings if not flag.startswith("--no-")]
        if action.nargs == 0 or not names:
            call = ", ".join(f"`{flag}`" for flag in names) or f"`{action.metavar}`"
        else:
            value = str(action.metavar).replace("|", "\\|") + (
                " ..." if action.nargs == "+" else ""
            )
            call = ", ".join(f"`{flag} {value}`" for flag in names)
        lines.append(f"| {call} | {_cell(action.help)} |")
    return "\n".join([line for line in lines if line != "" or about] + [""])


def _cell(text: str | None) -> str:
    return (text or "").replace("%%", "%").replace("|", "\\|")


def _variables() -> Iterable[str]:
    source = Path(env_file).read_text(encoding="utf-8")
    for name in Env.__slots__:
        text = source.partition(f"    {name}: ")[2].partition('"""')[2].partition('"""')[0]
        variable, _, meaning = " ".join(text.split()).partition(": ")
        yield f"- `{variable}`: {meaning}"


def _foreign(parser: argparse.ArgumentParser) -> Iterable[str]:
    """Yield the table of vLLM's names."""
    others = next(group for group in parser._action_groups if group.title == VLLM_GROUP_TITLE)
    yield "| name | effect |"
    yield "|---|---|"
    for name in [action.dest for action in others._group_actions]:
        short = f", `{vllm_options.SHORT_FLAGS[name]}`" if name in vllm_options.SHORT_FLAGS else ""
        yield f"| `--{name.replace('_', '-')}`{short} | {_cell(vllm_options.describe_effect(name))} |"


def _foreign_variables() -> Iterable[str]:
    yield "| variable | meaning |"
    yield "|---|---|"
    for name, option in sorted(vllm_environment.VARIABLE_TO_OPTION.items()):
        yield f"| `{name}` | `--{option.replace('_', '-')}` |"
    for name in sorted(vllm_environment.READ):
        ours = name.replace("VLLM_", "QUIRE_")
        own = ours in Path(env_file).read_text(encoding="utf-8")
        yield f"| `{name}` | {f'as `{ours}`' if own else 'set-up of the log'} |"
    for name, why in sorted((vllm_environment.UNSUPPORTED | vllm_environment.NO_EFFECT).items()):
        yield f"| `{name}` | no effect: {why} |"
    yield (
        "| names that begin with "
        + ", ".join(f"`{one}`" for one in vllm_environment.IGNORED_PREFIXES)
        + (" | no effect: other hardware, or a feature that is off |")
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {page().count(chr(10))} lines")
