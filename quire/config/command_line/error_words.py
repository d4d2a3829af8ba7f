"""Error words: names options in a message as flags, for errors of a command line.

max_model_len=9000 exceeds ...      --max-model-len 9000 exceeds ...
hf_overrides must be ...            --hf-overrides must be ...
"""

from __future__ import annotations

import re
from collections.abc import Collection

_PYTHON_ONLY = (" or a function", " or None")
_VALUE = r"(?P<value>\{.*?\}(?!\})|'[^']*'|[^\s;,:)]*[^\s;,:).])"


def flags_in_message(message: str, names: Collection[str]) -> str:
    """Return the message with these option names, and values behind a `=`, as flags.

    Names of one word count only where they begin the message or have a value.
    """
    for words in _PYTHON_ONLY:
        message = message.replace(words, "")
    any_name = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w./\"'-])(?P<name>{any_name})(?![\w./\"'-])(?:=(?!=){_VALUE})?")

    def flag(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        if "_" not in name and value is None and found.start() > 0:
            return found[0]
        dashed = name.replace("_", "-")
        if value in ("True", "False"):
            return f"--{dashed}" if value == "True" else f"--no-{dashed}"
        if value is not None:
            value = f"'{value}'" if value.startswith("{") else value.strip("'")
        return f"--{dashed}" if value is None else f"--{dashed} {value}"

    return pattern.sub(flag, message)
