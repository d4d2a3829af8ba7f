"""The code blocks of the documents, and the comment above each that sets its use.

<!-- run -->              run by tests/server/test_docs_run.py, in the order of the page
<!-- prints -->           what the block before it printed; `...` stands for anything
<!-- shown: REASON -->    not run, and why; its quire commands are parsed all the same
<!-- fails: TEXT -->      run, and must fail with TEXT in its output
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "docs/quickstart.md",
    "docs/serving.md",
    "docs/pooling.md",
    "docs/multimodal.md",
    "docs/speculative.md",
    "docs/quantize.md",
    "docs/observability.md",
    "docs/migrating-from-vllm.md",
    "docs/troubleshooting.md",
    "docs/deploy/open-webui.md",
    "docs/deploy/litellm.md",
    "docs/deploy/ray-serve.md",
    "docs/deploy/kserve.md",
    "docs/deploy/nginx.md",
)
CODE = ("sh", "python")
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>run|prints|shown|fails)(?:: (?P<note>.*?))? -->\n)?"
    r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    kind: str
    mark: str | None
    note: str | None
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """Of one page, in order."""
    path = ROOT / page
    text = path.read_text() if path.exists() else ""
    return [
        Block(page, text.count("\n", 0, m.start()) + 1, m["kind"], m["mark"], m["note"], m["text"])
        for m in _BLOCK.finditer(text)
    ]


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each `quire ...` in a shell block."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote that goes on: a body, not a command
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words and words[0] == "quire":
            yield [word for word in words[1:] if word not in ("&", "|", ";")]
