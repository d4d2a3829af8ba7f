"""Rewrites the words of a command line before argparse parses them.

`_` becomes `-` in names; `-O2` becomes `--optimization-level=2`; `--x=false` becomes `--no-x`;
`--config FILE` becomes the flags in the file, before all others; and all
`--dict.key value` of one dict become one JSON flag.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.config.values import FALSE_WORDS, TRUE_WORDS
from quire.errors import ConfigError

log = logging.getLogger(__name__)

Actions = Mapping[str, argparse.Action]
"""argparse's actions by flag."""


class BooleanFlag(argparse.Action):
    """A flag without a value: --x sets True; --no-x and, for --enable-x, --disable-x set False."""

    def __init__(self, option_strings: Sequence[str], dest: str, **named: Any) -> None:
        self.true_flags = tuple(option_strings)
        self.false_flags = tuple(
            dict.fromkeys(no for flag in option_strings for no in negations(flag))
        )
        super().__init__([*self.true_flags, *self.false_flags], dest, nargs=0, **named)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string in self.true_flags)


def negations(flag: str) -> list[str]:
    """Return the flags that negate a flag."""
    if not flag.startswith("--"):
        return []
    found = [f"--no-{flag[2:]}"]
    for word, opposite in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if flag.startswith(word):
            found.append(opposite + flag.removeprefix(word))
    return found


def rewrite_argv(argv: Sequence[str], actions: Actions) -> list[str]:
    """Return the words for argparse. Logs flags that are given twice."""
    words = [normalize_flag(word) for word in argv]
    if "--optimization-level" in actions:
        words = _expand_optimization_levels(words)
    words = _expand_boolean_values(words, actions)
    _warn_duplicate_flags(words, actions)
    if "--config" in actions:
        words = expand_config_files(words, actions)
    return merge_dotted_flags(words, actions)


def normalize_flag(word: str) -> str:
    """Turn --max_model_len=8 into --max-model-len=8; keep other words, and keys after a dot."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    flag, dot, key = name.partition(".")
    return flag.replace("_", "-") + dot + key + equals + value


def _expand_optimization_levels(words: Sequence[str]) -> list[str]:
    """-O2, -O 2, -O=2: an optimization level. -O.mode 3, -O '{...}': a compilation config."""
    out, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if re.fullmatch(r"-O=?\d", word):
            out.append(f"--optimization-level={word[-1]}")
        elif word == "-O" and rest:
            value = rest.pop(0)
            name = "optimization-level" if value.isdigit() else "compilation-config"
            out.append(f"--{name}={value}")
        elif word.startswith("-O."):
            out.append(f"--compilation-config{word[2:]}")
        else:
            out.append(word)
    return out


def _expand_boolean_values(words: Sequence[str], actions: Actions) -> list[str]:
    """Rewrite --x=false and --x False as --no-x."""
    out, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        action = actions.get(flag)
        if not isinstance(action, BooleanFlag):
            out.append(word)
            continue
        if not equals and rest and rest[0].lower() in ("true", "false"):
            value = rest.pop(0)
        if value and value.lower() not in TRUE_WORDS + FALSE_WORDS:
            raise ConfigError(f"{flag} is True or False, got {value!r}")
        is_true = (flag in action.true_flags) == (value.lower() not in FALSE_WORDS)
        out.append(action.true_flags[0] if is_true else action.false_flags[0])
    return out


def _warn_duplicate_flags(words: Iterable[str], actions: Actions) -> None:
    """Log flags that are given twice: the last one counts, unless values accumulate."""
    seen: set[tuple[str, str]] = set()
    for word in words:
        flag, _, _ = word.partition("=")
        name, _, keys = flag.partition(".")
        action = actions.get(name)
        if action is None or is_cumulative(action) or keys.endswith("+"):
            continue
        if (action.dest, keys) in seen:
            log.warning("%s is given several times; the last one counts", flag)
        seen.add((action.dest, keys))


def is_cumulative(action: argparse.Action) -> bool:
    """Whether repeating the flag adds to the earlier values."""
    return isinstance(action, (argparse._AppendAction, argparse._CountAction))


# -- files ------------------------------------------------------------------------------------


def expand_config_files(words: Sequence[str], actions: Actions) -> list[str]:
    """Replace `--config FILE` by the file's flags, placed first so that the command line wins."""
    before: list[str] = []
    after: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag != "--config" or not (equals or rest):
            after.append(word)
            continue
        path = value if equals else rest.pop(0)
        # The flag itself is placed after them: it ends a list, which would otherwise take the next
        # word
        before += [*config_file_to_argv(Path(path), actions), f"--config={path}"]
    return before + after


def config_file_to_argv(path: Path, actions: Actions) -> list[str]:
    """Return a YAML file of options as command-line words. Sections of options may be nested."""
    given = _read_yaml(path)
    words = []
    for name, value in _flatten_sections(given, actions):
        flag = normalize_flag(f"--{name}")
        action = actions.get(flag.partition(".")[0])
        if flag == "--config":
            raise ConfigError(f"--config: {path} names another file, which would not be read")
        if action is None:
            raise ConfigError(
                f"--config: {path} sets {name!r}, which is not an option{_suggest(flag, actions)}"
            )
        words += _option_to_argv(flag, value, action)
    return words


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--config takes a .yaml file, got {str(path)!r}")
    try:
        text = path.read_text(encoding="utf-8")
        given = yaml.safe_load(text) or {}
        for name in _duplicate_keys(yaml.compose(text, yaml.SafeLoader)):
            log.warning("%s has %s several times; the last one counts", path, name)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"--config: {path} is not YAML: {e}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"--config: {path} must hold `name: value` lines")
    return given


def _duplicate_keys(node: Any) -> list[str]:
    """Return keys that a YAML mapping, at any depth, has more than once."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return []
    keys = [key.value for key, _ in node.value]
    again = sorted({str(key) for key in keys if keys.count(key) > 1})
    return again + [name for _, value in node.value for name in _duplicate_keys(value)]


def _flatten_sections(given: Mapping[str, Any], actions: Actions) -> Iterable[tuple[str, Any]]:
    """Yield names and values; a mapping under a name that is not a flag is a section."""
    for name, value in given.items():
        is_section = isinstance(value, dict) and (
            name == "model" or normalize_flag(f"--{name}") not in actions
        )
        if is_section and all(
            normalize_flag(f"--{one}").partition(".")[0] in actions for one in value
        ):
            yield from _flatten_sections(value, actions)
        else:
            yield str(name), value


def _option_to_argv(flag: str, value: object, action: argparse.Action) -> list[str]:
    if value is None:
        return []
    if isinstance(action, BooleanFlag):
        return _expand_boolean_values([f"{flag}={str(value).lower()}"], {flag: action})
    if action.nargs == 0:  # it takes no value and cannot be negated
        return [flag] if value is True else []
    if isinstance(value, list) and not any(isinstance(one, (dict, list)) for one in value):
        if is_cumulative(action) and action.nargs is None:
            return [f"{flag}={one}" for one in value]
        if action.nargs in ("+", "*"):
            return [flag, *map(str, value)]
    return [f"{flag}={json.dumps(value) if isinstance(value, (dict, list)) else value}"]


def _suggest(flag: str, actions: Actions) -> str:
    near = difflib.get_close_matches(flag, [one for one in actions if one.startswith("--")], n=2)
    return (
        f"; did you mean {' or '.join(one[2:].replace('-', '_') for one in near)}?" if near else ""
    )


# -- dicts ------------------------------------------------------------------------------------


def merge_dotted_flags(argv: Sequence[str], actions: Actions) -> list[str]:
    """Merge `--hf-overrides.rope_scaling.factor 2` into one JSON flag per dict. `key+` appends.

    JSON given for the same flag is kept; the keys are merged over it.
    """
    trees: dict[str, dict[str, Any]] = {}
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        flag, *keys = name.split(".")
        if not keys or flag not in actions or not flag.startswith("-"):
            words.append(word)
            continue
        text = value if equals else next(rest, "")
        _set_nested(trees.setdefault(actions[flag].dest, {}), keys, _json_or_text(text), name)
    if not trees:
        return words
    words, given = _extract_json_flags(words, trees, actions)
    for dest, tree in trees.items():
        long = next(one for one, action in actions.items() if action.dest == dest)
        words.append(f"{long}={json.dumps(_merge_dicts(given.get(dest, {}), tree))}")
    return words


def _set_nested(tree: dict[str, Any], keys: Sequence[str], value: object, name: str) -> None:
    at = tree
    for key in keys[:-1]:
        at = at.setdefault(key, {})
        if not isinstance(at, dict):
            raise ConfigError(f"{name}: {key} is already set; set it once")
    last = keys[-1]
    if last.endswith("+"):
        more = value if isinstance(value, list) else [value]
        at[last[:-1]] = [*at.get(last[:-1], []), *more]
    else:
        at[last] = value


def _extract_json_flags(
    words: Sequence[str], trees: Mapping[str, object], actions: Actions
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return the words without the JSON given for these dicts, and that JSON."""
    kept: list[str] = []
    given: dict[str, dict[str, Any]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        action = actions.get(flag)
        if action is None or action.dest not in trees or not (equals or rest):
            kept.append(word)
            continue
        found = _json_or_text(value if equals else rest.pop(0))
        if not isinstance(found, dict):
            raise ConfigError(f"{flag} is given as {found!r} and by its keys: give one of them")
        given[action.dest] = found
    return kept, given


def _merge_dicts(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(under)
    for key, value in over.items():
        below = out.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = _merge_dicts(below, value)
        out[key] = value
    return out


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
