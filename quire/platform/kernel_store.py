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

import base64
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError

log = logging.getLogger(__name__)

PACKAGE_PREFIX = "quire_kernels_sm"
"""Prefix of the package that a wheel of kernels installs; the compute capability follows."""
ARCHIVE = "kernels.tar.gz"
MANIFESTS = "manifests"
"""Folder of the lists of kernels."""
GROUP_PREFIX = "__grp__"
"""Prefix of Triton's list of a kernel's files: it has full paths, so it must be rewritten."""


def kernel_folder(cache_dir: Path, version: str, capability: tuple[int, int]) -> Path:
    """The folder of kernels of one compiler version and one compute capability."""
    major, minor = capability
    return cache_dir / "kernels" / f"triton-{version}-sm{major}{minor}"


def make_folder(folder: Path) -> Path:
    """Make the folder of kernels. Returns: it, or a temporary folder where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning(
            "compiled kernels cannot be kept in %s (%s): every start compiles", folder, error
        )
        return Path(tempfile.mkdtemp(prefix="quire-kernels-"))
    return folder


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


def pack(cache_dir: Path, target: Path, pattern: str = "triton-*") -> int:
    """Put kept kernels into one archive. Returns how many. pattern: of the folders' names."""
    root = cache_dir / "kernels"
    places = sorted(root.glob(pattern))
    count = sum(len(_kernel_folders(place)) for place in places)
    if not count:
        raise ConfigError(f"{root} holds no compiled kernels; `quire cache build` compiles some")
    with tarfile.open(target, "w:gz", compresslevel=6) as archive:
        for place in places:
            for file in _files(place):
                archive.add(file, arcname=str(file.relative_to(root)))
    return count


def write_wheels(cache_dir: Path, folder: Path, version: str) -> list[Path]:
    """Write one wheel for each compute capability of the kept kernels. Returns the files.

    Engines add the kernels of an installed wheel to their cache (add_installed). version: of quire.
    """
    capabilities = sorted(
        {place.name.rpartition("-sm")[2] for place in (cache_dir / "kernels").glob("triton-*")}
    )
    if not capabilities:
        raise ConfigError(f"{cache_dir} holds no compiled kernels; `quire cache build` makes some")
    folder.mkdir(parents=True, exist_ok=True)
    return [_write_wheel(cache_dir, folder, version, one) for one in capabilities]


def _write_wheel(cache_dir: Path, folder: Path, version: str, capability: str) -> Path:
    package = f"{PACKAGE_PREFIX}{capability}"
    name, tag = f"quire_llm_kernels_sm{capability}", "py3-none-any"
    info = f"{name}-{version}.dist-info"
    with tempfile.TemporaryDirectory() as temporary:
        archive = Path(temporary) / ARCHIVE
        pack(cache_dir, archive, f"triton-*-sm{capability}")
        files = {
            f"{package}/__init__.py": b'"""Compiled GPU kernels of quire."""\n',
            f"{package}/{ARCHIVE}": archive.read_bytes(),
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\n"
            f"Version: {version}\nSummary: Compiled GPU kernels of quire\n".encode(),
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: quire\nRoot-Is-Purelib: true\n"
            f"Tag: {tag}\n".encode(),
        }
    record = f"{info}/RECORD"
    lines = [f"{path},sha256={_record_hash(data)},{len(data)}" for path, data in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    target = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
    return target


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def add_installed(cache_dir: Path, capability: tuple[int, int]) -> int:
    """Add the kernels of an installed wheel to the cache, once. Returns how many were added."""
    major, minor = capability
    spec = importlib.util.find_spec(f"{PACKAGE_PREFIX}{major}{minor}")
    if spec is None or not spec.submodule_search_locations:
        return 0
    archive = Path(spec.submodule_search_locations[0]) / ARCHIVE
    try:
        facts = archive.stat()
        mark = cache_dir / "kernels" / f".{spec.name}-{facts.st_size}-{facts.st_mtime_ns}"
        if mark.exists():
            return 0
        count = unpack(archive, cache_dir)
        mark.touch()
    except (OSError, ConfigError) as error:  # the kernels are compiled instead
        log.warning("the kernels of %s cannot be used: %s", archive, error)
        return 0
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
    write_whole(path, _rebase_paths(data.read(), path))
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


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: another process may be reading. Raises OSError."""
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
