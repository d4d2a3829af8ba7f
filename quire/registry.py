"""Plug-ins found by file name. `quire/models/qwen3.py` is the model "qwen3"; nothing lists it."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from importlib.metadata import entry_points
from types import ModuleType

from quire.errors import ConfigError

FRAME = frozenset({"base", "build", "choose", "machine", "select"})
"""Modules of a plug-in folder that are no plug-ins: contract, and what chooses or assembles."""


class Registry:
    """One kind of plug-in: the modules of a package, plus entry points of a group.

    group: of the entry points; the package's name if not given.
    """

    def __init__(self, package: str, group: str | None = None) -> None:
        self.package = package
        self.group = group or package

    def names(self) -> list[str]:
        """Names of all plug-ins, sorted. FRAME and files that start with _ are not plug-ins."""
        path = importlib.import_module(self.package).__path__
        own = {m.name for m in pkgutil.iter_modules(path)}
        own = {name for name in own if name not in FRAME and not name.startswith("_")}
        return sorted(own | {e.name for e in entry_points(group=self.group)})

    def load(self, name: str) -> ModuleType:
        """Import one plug-in, and only that one. Unknown names get the nearest suggestions."""
        names = self.names()
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
            raise ConfigError(f"no {name!r} in {self.package}; {hint}")
        for found in entry_points(group=self.group, name=name):
            module = found.load()
            assert isinstance(module, ModuleType), f"{found.value} is not a module"
            return module
        return importlib.import_module(f"{self.package}.{name}")
