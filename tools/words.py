"""Check names and prose: a class name once, no import circle, no word of tools/words.txt.

usage: python tools/words.py

Words are looked for in docstrings, comments, messages (strings with a space) and the pages of
docs/, not in code: a line of tools/words.txt is a regular expression, a tab, and what to write in
its place.
"""

from __future__ import annotations

import ast
import collections
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

import grimp

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONTRACT = {
    "models": {"Config", "Model", "Layer", "SelfAttention", "MLP", "SparseMLP", "Encoder", "Head"},
    "media": {"Processor"},
    "attention": {"Backend"},
    "quant": {"Method"},
    "executors": {"Executor"},
}
"""Folder of plug-ins -> the class names that its contract gives to each of its files."""
PAGES = ["README.md", "CONTRIBUTING.md", "docs/*.md"]
HISTORY = {"LOG.md"}  # what was written on a day stays as it was


def repeated_classes() -> Iterator[str]:
    """Class names that two places define."""
    places: dict[str, list[str]] = collections.defaultdict(list)
    for path in sorted((ROOT / "quire").rglob("*.py")):
        folder = path.relative_to(ROOT / "quire").parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in CONTRACT.get(folder, ()):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"class {name} is defined {len(found)} times: {', '.join(found)}"


def circles() -> Iterator[str]:
    """Modules that import each other, whichever way round."""
    graph = grimp.build_graph("quire")  # imports under TYPE_CHECKING count
    packages = {name for name in graph.modules if graph.find_children(name)}
    modules = sorted(graph.modules - packages)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def imports_of(module: str) -> Iterator[str]:
        return iter(sorted(graph.find_modules_directly_imported_by(module) - {"quire"}))

    def visit(root: str) -> None:  # Tarjan's, without recursion
        work = [(root, imports_of(root))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, rest = work[-1]
            for child in rest:
                if child not in index:
                    index[child] = low[child] = len(index)
                    stack.append(child)
                    work.append((child, imports_of(child)))
                    break
                if child in stack:
                    low[node] = min(low[node], index[child])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    if len(stack) - at > 1:
                        found.append(sorted(stack[at:]))
                    del stack[at:]

    for module in modules:
        if module not in index:
            visit(module)
    for ring in found:
        yield f"import circle: {', '.join(ring)}"


def prose(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Lines of prose in a file: all of a page; docstrings, messages and comments of a module."""
    text = path.read_text()
    if path.suffix == ".md":
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            fenced ^= line.startswith("```")
            if not fenced:
                yield number, re.sub(r"`[^`]*`", "", line)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for number, line in enumerate(node.value.splitlines(), node.lineno):
                yield number, re.sub(r"`[^`]*`", "", line)


def listed_words() -> Iterator[str]:
    """Places of words that are on the list."""
    rules = []
    for line in (ROOT / "tools/words.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern, _, instead = line.partition("\t")
            rules.append((re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), instead.strip()))
    paths = sorted((ROOT / "quire").rglob("*.py"))
    paths += [p for page in PAGES for p in sorted(ROOT.glob(page)) if p.name not in HISTORY]
    for path in paths:
        for number, line in prose(path):
            for rule, instead in rules:
                if found := rule.search(line):
                    place = f"{path.relative_to(ROOT)}:{number}"
                    yield f"{place}: {found[0]!r}: write {instead}: {line.strip()[:80]}"


def main() -> int:
    faults = [*repeated_classes(), *circles(), *listed_words()]
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
