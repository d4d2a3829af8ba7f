"""Native build: compiles quire's C++ libraries with the machine's compiler, once, into a cache.

The file name carries a digest of the sources, the flags and the CPU, so a stale or foreign library
is never loaded. A library appears by rename, whole or not at all; a lock keeps two processes from
building at once. Standard library only, and no import of quire: setup.py loads this file by path
to build at install time, into `prebuilt` beside the sources.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
ISAS = {
    "native": ("native", ()),
    "avx512": ("skylake-avx512", ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")),
    "avx2": ("haswell", ("avx2", "fma", "bmi2")),
    "sse2": ("x86-64", ("sse2",)),
}
"""Instruction set -> its name in -march, the CPU features it needs. All but native are for x86."""
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300


class NativeBuildError(Exception):
    """There is no library; the message has the reason, and what to do."""


class NativeSource(NamedTuple):
    """The sources of one library: a folder with one .cpp file and its headers."""

    name: str
    folder: Path
    flags: tuple[str, ...] = ()
    """More compiler flags."""

    def find_or_build(self, cache: Path, isa: str = "native", extra: Sequence[str] = ()) -> Path:
        """Return the compiled library: installed, cached, or built now. Raises NativeBuildError.

        isa: one of ISAS, which this CPU must have. extra: more compiler flags, for tests.
        """
        flags = (*FLAGS, *self.flags, f"-march={_march(isa)}", *extra)
        name = self._file_name(flags)
        if (installed := self.folder / "prebuilt" / name).exists():
            return installed
        return self._build(cache / "native" / name, flags)

    def build_into(self, folder: Path) -> Path:
        """Build the library into a folder, unless it is there. Raises NativeBuildError."""
        flags = (*FLAGS, *self.flags, "-march=native")
        return self._build(folder / self._file_name(flags), flags)

    def _file_name(self, flags: Sequence[str]) -> str:
        digest = hashlib.sha256()
        for path in sorted([*self.folder.glob("*.cpp"), *self.folder.glob("*.h")]):
            digest.update(path.name.encode() + path.read_bytes())
        digest.update(repr((tuple(flags), _cpu_features())).encode())
        return f"{self.name}-{digest.hexdigest()[:20]}.so"

    def _build(self, target: Path, flags: Sequence[str]) -> Path:
        if os.name != "posix":
            raise NativeBuildError(f"native code is for POSIX systems, this is {os.name}")
        if target.exists():
            return target
        compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
        if compiler is None:
            names = ", ".join(COMPILERS)
            raise NativeBuildError(f"no C++ compiler ({names}) on the path: install g++ or clang++")
        (source,) = self.folder.glob("*.cpp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _lock(target.with_suffix(".lock")):
                if not target.exists():
                    _compile(compiler, flags, source, target)
        except OSError as e:
            message = f"cannot write to {target.parent}: {e}; set QUIRE_CACHE to a folder that can"
            raise NativeBuildError(f"{message} be written") from e
        return target


_PACKAGE = Path(__file__).parents[1]
KERNELS = NativeSource("kernels", _PACKAGE / "kernels" / "native")
RESIZE = NativeSource("resize", _PACKAGE / "media" / "native", ("-ffp-contract=off",))
LIBRARIES = (KERNELS, RESIZE)


def _march(isa: str) -> str:
    """Return -march of an instruction set. Raises NativeBuildError if this CPU lacks it."""
    if isa not in ISAS:
        raise NativeBuildError(f"unknown instruction set {isa!r}; known: {', '.join(ISAS)}")
    march, needed = ISAS[isa]
    has = {word for line in _cpu_features() if line.startswith("flags") for word in line.split()}
    if lacking := [flag for flag in needed if flag not in has]:
        message = f"this CPU cannot run {isa}: it has no {', '.join(lacking)}"
        raise NativeBuildError(f"{message}; unset QUIRE_CPU_ISA")
    return march


def _cpu_features() -> tuple[str, ...]:
    """Return the CPU features that -march=native depends on."""
    wanted = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return (platform.system(), platform.machine(), platform.processor())
    return (platform.machine(), *(line for line in lines if line.startswith(wanted)))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    import fcntl  # POSIX only, as this whole module

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, flags: Sequence[str], source: Path, target: Path) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
    os.close(handle)
    try:
        command = [compiler, *flags, "-o", name, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            newer = "a newer g++ or clang++ may build it"
            raise NativeBuildError(f"{compiler} failed ({newer}): {done.stderr.strip()[-2000:]}")
        os.chmod(name, 0o755)
        os.replace(name, target)
    except subprocess.TimeoutExpired as e:
        message = f"{compiler} took over {TIMEOUT_S} s: the next start tries again"
        raise NativeBuildError(message) from e
    finally:
        Path(name).unlink(missing_ok=True)
