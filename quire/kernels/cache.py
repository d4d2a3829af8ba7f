"""Compiled GPU kernels: where they are kept, how they travel, and how a start makes many at once.

Not here: kernels, nor when to compile (quire.engine.warm). The one idea: Triton asks a hook before
it compiles, and a hook may say no; so a step *rehearsed* with such a hook tells all the kernels
it needs without waiting for any, and they are then compiled side by side.

    <folder>/<triton version>-sm<capability>/<kernel's own key>/...     as Triton lays it out

Triton's key of a kernel holds its source, its constants and the compiler, so a folder can be
merged, shipped or thrown away at will: what does not fit is compiled again.
"""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

GROUP = "__grp__"
"""Triton's list of the files of one kernel, with full paths: the one thing that cannot travel."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A kernel that a rehearsal would have compiled."""

    name: str
    function: Any  # triton.runtime.JITFunction
    specialization: str

    def make(self) -> None:
        """Compile it (or read it from the folder) for the current device."""
        self.function.preload(self.specialization)


def folder_of(cache_dir: Path, version: str, capability: tuple[int, int]) -> Path:
    """Where the kernels of one compiler and one kind of GPU are kept."""
    major, minor = capability
    return cache_dir / "kernels" / f"triton-{version}-sm{major}{minor}"


def keep_in(folder: Path) -> None:
    """Make Triton keep what it compiles in the folder. Before the first kernel."""
    from triton import knobs

    folder.mkdir(parents=True, exist_ok=True)
    knobs.cache.dir = str(folder)


def know_compiler() -> None:
    """Let Triton make the part of its keys that names the compiler: it reads 400 MB for that."""
    from triton.runtime import cache

    key = getattr(cache, "triton_key", None)
    if key is not None:
        key()


@contextmanager
def rehearsal(note: Callable[[Wanted], None]) -> Iterator[None]:
    """Within, kernels not compiled yet are noted, once each, and their launches are skipped."""
    from triton import knobs

    seen: set[tuple[str, str]] = set()

    def skip(*, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **_: Any) -> bool:
        if is_manual_warmup:
            return False  # the compilation itself, in another thread
        name = f"{fn.module}.{fn.name}"
        data = str(compile["specialization_data"])
        if (name, data) not in seen:
            seen.add((name, data))
            note(Wanted(name, fn.jit_function, data))
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = skip
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


@dataclass(frozen=True, slots=True)
class Info:
    """What a cache folder holds, per compiler and GPU."""

    name: str
    kernels: int
    bytes: int


def info(cache_dir: Path) -> list[Info]:
    """One line per compiler and kind of GPU."""
    return [
        Info(place.name, len(_kernels(place)), sum(f.stat().st_size for f in _files(place)))
        for place in sorted((cache_dir / "kernels").glob("triton-*"))
    ]


def pack(cache_dir: Path, target: Path) -> int:
    """Put every kept kernel into one archive. Returns how many."""
    root = cache_dir / "kernels"
    places = sorted(root.glob("triton-*"))
    count = sum(len(_kernels(place)) for place in places)
    if not count:
        raise ConfigError(f"{root} holds no compiled kernels; run the engine once on a GPU first")
    with tarfile.open(target, "w:gz", compresslevel=6) as archive:
        for place in places:
            for file in _files(place):
                archive.add(file, arcname=str(file.relative_to(root)))
    return count


def unpack(source: Path, cache_dir: Path) -> int:
    """Add the kernels of an archive to the cache. Returns how many the archive holds."""
    root = cache_dir / "kernels"
    try:
        archive = tarfile.open(source, "r:gz")  # noqa: SIM115 - closed below
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"{source} is not an archive of `quire cache pack`: {error}") from error
    made: set[Path] = set()
    with archive:
        for member in archive:
            path = _checked(member, source)
            data = archive.extractfile(member)
            assert data is not None, member.name
            _write(root / path, _rebased(data.read(), root / path))
            made.add((root / path).parent)
    return len(made)


def _checked(member: tarfile.TarInfo, source: Path) -> Path:
    """The path of a plain file three levels deep; an archive is untrusted input."""
    path = Path(member.name)
    fits = len(path.parts) == 3 and ".." not in path.parts and not path.is_absolute()
    if not member.isfile() or not fits or not path.parts[0].startswith("triton-"):
        raise ConfigError(f"{source} holds {member.name!r}, which `quire cache pack` never makes")
    return path


def _rebased(data: bytes, path: Path) -> bytes:
    """A file list with the paths of this folder; other files as they are."""
    if not path.name.startswith(GROUP):
        return data
    try:
        names = json.loads(data)["child_paths"]
        moved = {name: str(path.parent / Path(old).name) for name, old in names.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"the archive's {path.name} is not one of Triton's lists") from error
    return json.dumps({"child_paths": moved}).encode()


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: another process may be reading."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(temporary, path)


def _kernels(place: Path) -> list[Path]:
    return sorted({file.parent for file in place.glob(f"*/{GROUP}*")})


def _files(place: Path) -> list[Path]:
    """Files of whole kernels: no locks, no half-written ones."""
    return [f for k in _kernels(place) for f in sorted(k.iterdir()) if f.is_file()]
