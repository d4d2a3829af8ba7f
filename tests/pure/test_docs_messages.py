"""Messages quoted in docs/troubleshooting.md are in the source: a reader searches the page for them."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = [
    *re.findall(r"^\*\*((?:`[^`\n]+`(?:, )?)+)", PAGE, re.M),  # a paragraph that begins with it
    *re.findall(r"^\| ((?:`[^`\n]+`(?:, )?)+) \|", PAGE, re.M),  # the first column of a table
]
MESSAGES = [one for group in QUOTED for one in re.findall(r"`([^`]+)`", group) if " " in one]
VARIES = r"\.\.\.|--[a-z-]+|'[^']*'|\d[\d.,]*(?: [GMK]iB)?|\b[A-Zxy]\b|--prot"
"""Parts of a message that are not the same each time."""


def said(path):
    """Every text in a module, values of f-strings cut out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
            yield "".join(parts)


@pytest.fixture(scope="module")
def everything():
    return "\n".join(
        re.sub(r"%[sdr]", "\0", text)
        for path in (ROOT / "quire").rglob("*.py")
        for text in said(path)
    )


def test_there_are_messages():
    assert len(MESSAGES) > 15


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_in_the_source(message, everything):
    longest = max(re.split(VARIES, message), key=len).strip(" :;,()?=")
    assert len(longest) > 7, longest
    assert longest in everything, longest
