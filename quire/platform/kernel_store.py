"""Kernel store: lays out the folder of compiled GPU kernels, and packs it to travel. No Triton.

    <folder>/kernels/triton-<version>-sm<capability>/<kernel's own key>/...    Triton's own layout
                                                    /manifests/<engine's key>.json
                                                    /manifests/<engine's key>.memory.json

A manifest lists the kernels of one engine (quire.engine.startup.kernel_builder); the other file has
what its largest step needed (memory_record), which holds on this machine's kind of GPU only.
Triton's key of a kernel holds its source, its constants and the compiler, so kernels compiled on
one machine can be added to the folder of any other: one that does not fit is never found.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError

MANIFESTS = "manifests"
"""Folder of the lists of kernels."""
GROUP_PREFIX = "__grp__"
"""Prefix of Triton's list of a kernel's files: it has full paths, so it must be rewritten."""


def kernel_folder(cache_dir: Path, version: str, capability: tuple[int, int]) -> Path:
    """The folder of kernels of one compiler version and one compute capability."""
    major, minor = capability
    return cache_dir / "kernels" / f"triton-{version}-sm{major}{minor}"


@dataclass(frozen=True, slots=True)
class KernelStoreInfo:
    """Number and bytes of kernels of one compiler and GPU in a cache folder."""

    name: str
    kernels: int
    bytes: int


def store_info(cache_dir: Path) -> list[KernelStoreInfo]:
    """One line per compiler and kind of GPU."""
    return [
        KernelStoreInfo(
            place.name, len(_kernel_folders(place)), sum(f.stat().st_size for f in _files(place))
        )
        for place in sorted((cache_dir / "kernels").glob("triton-*"))
    ]


def pack(cache_dir: Path, target: Path) -> int:
    """Put every kept kernel into one archive. Returns how many."""
    root = cache_dir / "kernels"
    places = sorted(root.glob("triton-*"))
    count = sum(len(_kernel_folders(place)) for place in places)
    if not count:
        raise ConfigError(f"{root} holds no compiled kernels; `quire cache build` compiles some")
    with tarfile.open(target, "w:gz", compresslevel=6) as archive:
        for place in places:
            for file in _files(place):
                archive.add(file, arcname=str(file.relative_to(root)))
    return count


def unpack(source: Path, cache_dir: Path) -> int:
    """Add the kernels of an archive to the cache. Returns how many the archive holds."""
    try:
        with tarfile.open(source, "r:gz") as archive:
            folders = {_extract_member(archive, member, source, cache_dir) for member in archive}
            return sum(folder.name != MANIFESTS for folder in folders)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise ConfigError(f"{source} is not an archive of `quire cache pack`: {error}") from error


def _extract_member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, source: Path, cache_dir: Path
) -> Path:
    """Write one file of an archive; the folder of its kernel."""
    path = cache_dir / "kernels" / _checked_path(member, source)
    data = archive.extractfile(member)
    assert data is not None, member.name
    _write(path, _rebase_paths(data.read(), path))
    return path.parent


def clear(cache_dir: Path) -> int:
    """Remove every kept kernel. Returns how many there were."""
    found = [
        kernel
        for place in (cache_dir / "kernels").glob("triton-*")
        for kernel in _kernel_folders(place)
    ]
    for kernel in found:
        shutil.rmtree(kernel)
    for manifests in (cache_dir / "kernels").glob(f"triton-*/{MANIFESTS}"):
        shutil.rmtree(manifests)
    return len(found)


def _checked_path(member: tarfile.TarInfo, source: Path) -> Path:
    """The path of a plain file three levels deep; an archive is untrusted input."""
    path = Path(member.name)
    fits = len(path.parts) == 3 and ".." not in path.parts and not path.is_absolute()
    if not member.isfile() or not fits or not path.parts[0].startswith("triton-"):
        raise ConfigError(f"{source} holds {member.name!r}, which `quire cache pack` never makes")
    return path


def _rebase_paths(data: bytes, path: Path) -> bytes:
    """A file list with the paths of this folder; other files as they are."""
    if not path.name.startswith(GROUP_PREFIX):
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


def _kernel_folders(place: Path) -> list[Path]:
    return sorted({file.parent for file in place.glob(f"*/{GROUP_PREFIX}*")})


def _files(place: Path) -> list[Path]:
    """Files of whole kernels, and the manifests: no locks, no half-written ones."""
    found = [f for k in _kernel_folders(place) for f in sorted(k.iterdir()) if f.is_file()]
    return found + sorted((place / MANIFESTS).glob("*.json"))
