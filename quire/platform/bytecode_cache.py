"""Bytecode cache: keeps compiled Python modules in quire's folder, where Python keeps none itself.

Packages may be installed without bytecode (by uv, in many images) and be read-only, or
PYTHONDONTWRITEBYTECODE may be set. Then each process compiles 2,000 files of torch again, which
takes one to three seconds. sys.pycache_prefix names another folder for all bytecode. A process of
quire sets it for good and passes it on to its children; in a user's process it is set only while
quire imports. Where torch has bytecode, nothing changes.

    <cache folder>/bytecode/<Python's tag>-<key of the installed packages>/<path of the module>
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from quire import env

KEPT_FOLDERS = 4
"""Folders of other packages or Pythons that are kept: the ones used last."""

_lock = threading.Lock()
_imports = 0  # threads within importing()
_before: tuple[str | None, bool] = None, False  # what importing() restores


def enable() -> None:
    """Use the folder, if there is one, until this process ends. For processes of quire."""
    folder = find_folder()[0]
    if folder is not None:
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False


@contextmanager
def importing() -> Iterator[None]:
    """Use the folder, if there is one, within. For imports in processes of users."""
    global _imports, _before
    folder = find_folder()[0]
    if folder is None:
        yield
        return
    with _lock:
        if not _imports:
            _before = sys.pycache_prefix, sys.dont_write_bytecode
            sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
        _imports += 1
    try:
        yield
    finally:
        with _lock:
            _imports -= 1
            if not _imports:
                sys.pycache_prefix, sys.dont_write_bytecode = _before


def child_variables() -> dict[str, str]:
    """Environment variables with which a child process of quire uses the folder."""
    folder = find_folder()[0]
    if folder is None:
        return {}  # a child of a process that has the folder by its environment inherits it
    return {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}


@functools.cache
def find_folder() -> tuple[Path | None, str]:
    """The folder for bytecode, or None if Python's own places are used; and the reason."""
    environment = env.read()
    if not environment.bytecode_cache:
        return None, "switched off by QUIRE_BYTECODE_CACHE"
    if sys.pycache_prefix is not None:
        return None, f"in {sys.pycache_prefix}, by Python's own setting"
    source = torch_source()
    if source is None:
        return None, "there is no torch"
    if os.path.exists(cache_from_source(source)):
        return None, "beside the packages"
    packages = Path(source).parent.parent
    if not sys.dont_write_bytecode and os.access(packages / "torch", os.W_OK):
        return None, "beside the packages, once they are imported"
    folder = environment.cache_dir / "bytecode" / _folder_name(packages)
    try:
        _make_private(environment.cache_dir, folder)
    except OSError as error:
        return None, f"nowhere: {error}"
    _remove_old(folder.parent)
    return folder, f"in {folder}: the packages have none"


def torch_source() -> str | None:
    """The file that `import torch` would run first; None if it is unknown. Imports nothing."""
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):  # another torch, which is no package on disk
        return None
    return None if spec is None or not spec.has_location else spec.origin


def _folder_name(packages: Path) -> str:
    """A name for this Python and the installed packages.

    Python compares time and size of a source only, and images may give all files the same time.
    """
    installed = sorted(name for name in os.listdir(packages) if name.endswith("-info"))
    key = "\0".join([sys.version, str(packages), *installed])
    return f"{sys.implementation.cache_tag}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _make_private(cache_dir: Path, folder: Path) -> None:
    """Make the folder, mode 0700.

    Raises: OSError (it cannot be made, or another user could write to it: bytecode is executed).
    """
    cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    for one in (cache_dir, folder.parent, folder):
        found = one.stat()
        if found.st_uid not in (0, os.getuid()):
            raise PermissionError(f"{one} belongs to another user")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"other users may write to {one}; chmod go-w makes it usable")
    os.utime(folder)


def _remove_old(parent: Path) -> None:
    """Remove all but the folders used last. A process that uses one of those compiles again."""
    with suppress(OSError):  # another process does the same
        used = sorted(parent.iterdir(), key=lambda one: -one.stat().st_mtime)
        for old in used[KEPT_FOLDERS:]:
            shutil.rmtree(old)
