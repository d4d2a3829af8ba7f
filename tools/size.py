"""Report how long functions and files are; with --check, fail on a file over 600 lines without a reason.

usage: python tools/size.py [--check]

Reasons stand in tools/size_allow.txt: "path: why".
"""

from __future__ import annotations

import ast
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 600


def functions(tree: ast.Module) -> list[int]:
    """Lines of each function in a module."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [n.end_lineno - n.lineno + 1 for n in ast.walk(tree) if isinstance(n, kinds)]


def share(values: list[int], q: float) -> int:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0


def main() -> int:
    allowed = {
        line.split(":")[0].strip()
        for line in (ROOT / "tools/size_allow.txt").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    }
    files: dict[str, int] = {}
    lengths: list[int] = []
    for path in sorted((ROOT / "quire").rglob("*.py")):
        text = path.read_text()
        files[str(path.relative_to(ROOT))] = text.count("\n")
        lengths += functions(ast.parse(text))
    sizes = list(files.values())
    print(
        f"{len(files)} files, {sum(sizes)} lines; file p50 {share(sizes, 0.5)} p90 {share(sizes, 0.9)} "
        f"max {max(sizes)}; {len(lengths)} functions, p50 {share(lengths, 0.5)} p90 {share(lengths, 0.9)} "
        f"p99 {share(lengths, 0.99)} max {max(lengths)}"
    )
    bad = [f"{name}: {n} lines" for name, n in files.items() if n > LIMIT and name not in allowed]
    for line in bad:
        print(f"over {LIMIT} lines without a reason in tools/size_allow.txt: {line}")
    return 1 if bad and "--check" in sys.argv else 0


if __name__ == "__main__":
    raise SystemExit(main())
