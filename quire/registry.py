"""Plug-in registry: finds plug-ins by file name. `quire/models/qwen3.py` is the model "qwen3"."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import pkgutil
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from quire.errors import ConfigError

FRAMEWORK_MODULES = frozenset(
    {"base", "build", "drafters", "fallback", "multimodal", "parser", "select"}
)
"""Modules of a plug-in folder that are not plug-ins: its contract, selection, assembly, what serves
names that have no plug-in, and folders of other kinds."""


@functools.cache
def _read_entry_points() -> Any:
    """All entry points. Read once: it reads a file of each package, and they do not change."""
    return entry_points()


def find_entry_points(group: str) -> EntryPoints:
    """The entry points of a group, of all installed packages."""
    found: EntryPoints = _read_entry_points().select(group=group)
    return found


@functools.cache
def _find_modules(package: str) -> frozenset[str]:
    """Names of the plug-ins in a package's folder, which is listed once."""
    path = importlib.import_module(package).__path__
    found = {m.name for m in pkgutil.iter_modules(path)}
    return frozenset(n for n in found if n not in FRAMEWORK_MODULES and not n.startswith("_"))


class PluginRegistry:
    """One kind of plug-in: the modules of a package, plus entry points of a group.

    group: of the entry points; default: the name of the package. kind: what users call one of them.
    """

    def __init__(self, package: str, group: str | None = None, kind: str = "plug-in") -> None:
        self.package = package
        self.kind = kind
        self.group = group or package

    @functools.cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        """Entry points by name."""
        return {entry.name: entry for entry in find_entry_points(self.group)}

    def names(self) -> list[str]:
        """Names of all plug-ins, sorted, without FRAMEWORK_MODULES and files that start with _."""
        return sorted(_find_modules(self.package) | self._entry_points.keys())

    def read_literal(self, name: str, constant: str) -> Any:
        """Read a literal constant of a plug-in's file without importing it. None: absent."""
        entry = self._entry_points.get(name)
        spec = find_spec(entry.module if entry else f"{self.package}.{name}")
        source = Path(spec.origin).read_text() if spec is not None and spec.origin else ""
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == constant:
                return ast.literal_eval(node.value)
        return None

    def load(self, name: str) -> ModuleType:
        """Import one plug-in. Raises ConfigError for an unknown name, with similar names."""
        names = self.names()
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
            raise ConfigError(f"there is no {self.kind} {name!r}; {hint}")
        entry = self._entry_points.get(name)
        if entry is None:
            return importlib.import_module(f"{self.package}.{name}")
        module = entry.load()
        assert isinstance(module, ModuleType), f"{entry.value} is not a module"
        return module
