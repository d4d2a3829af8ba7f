"""The folder that a quantized model is written to: what is finished in it, and what it may lose.

A file is written under another name and renamed when it is complete, and the state is written
after it, so that an interrupted run continues with the next file. A run with other settings starts
again. A folder with files of others is refused. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from quire.config.json_file import read_json_object
from quire.errors import ConfigError

log = logging.getLogger(__name__)

STATE = "quantize_state.json"
"""Of a run that is not finished: its settings, and the files that are."""
REPORT = "quantize_report.json"
"""Of a finished one: the same, and the errors."""
SPARE_BYTES = 64 << 20
"""Free space beyond the files: reports, and what a file system needs for itself."""
STATE_VERSION = 1
MAX_STATE_BYTES = 1 << 28


class OutFolder:
    """A folder with the files of one run."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self._state: dict[str, Any] = {
            "version": STATE_VERSION, "settings": settings, "files": {}, "errors": {},
        }  # fmt: skip

    @property
    def errors(self) -> dict[str, Any]:
        """What was measured of each matrix, by its name."""
        found: dict[str, Any] = self._state["errors"]
        return found

    def open(self) -> bool:
        """Make the folder, or find out what it has. Returns whether the run is finished already.

        Raises ConfigError for a folder that has files of others.
        """
        found, finished = self._read_state()
        if found is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(STATE, self._state)
            return False
        if _same(found, self._state):
            self._state = found
            if finished and all(self.has(name) for name in found["files"]):
                return True
            log.info("continuing %s: %d files are finished", self.folder, len(found["files"]))
        else:
            log.warning("%s was made with other settings: starting again", self.folder)
            for name in [*found["files"], REPORT]:
                (self.folder / name).unlink(missing_ok=True)
        for left in self.folder.glob(".*.part"):
            left.unlink()
        self._write(STATE, self._state)
        (self.folder / REPORT).unlink(missing_ok=True)
        return False

    def has(self, name: str) -> bool:
        """Whether a file is finished."""
        size = self._state["files"].get(name)
        path = self.folder / name
        return size is not None and path.is_file() and path.stat().st_size == size

    def write(
        self, name: str, write: Callable[[Path], object], errors: dict[str, Any] | None = None
    ) -> None:
        """Have `write(path)` make a file, and note that it is finished.

        errors: of the matrices in it.
        """
        part = self.folder / f".{name}.part"
        try:
            write(part)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(self.folder / name)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise ConfigError(
                f"{self.folder / name} cannot be written: {error.strerror}"
            ) from error
        self._note(name, (self.folder / name).stat().st_size, errors)

    def size_of(self, name: str) -> int:
        """The bytes of a growing file that are known to be whole."""
        size = int(self._state["files"].get(name, 0))
        path = self.folder / name
        return size if path.is_file() and path.stat().st_size >= size else 0

    def append(
        self, name: str, at: int, data: Iterable[Any], errors: dict[str, Any] | None = None
    ) -> None:
        """Cut a growing file at an offset, write pieces of bytes behind it, and note its size."""
        path = self.folder / name
        try:
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.truncate(at)
                file.seek(at)
                for piece in data:
                    file.write(piece)
                end = file.tell()
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        self._note(name, end, errors)

    def rename(self, name: str, final: str) -> None:
        """Give a growing file, now whole, its name."""
        (self.folder / name).replace(self.folder / final)
        del self._state["files"][name]
        self._note(final, (self.folder / final).stat().st_size, None)

    def _note(self, name: str, size: int, errors: dict[str, Any] | None) -> None:
        self._state["files"][name] = size
        self._state["errors"] |= errors or {}
        self._write(STATE, self._state)

    def write_json(self, name: str, value: object) -> None:
        """Write a file of JSON."""
        self.write(name, lambda path: path.write_text(json.dumps(value, indent=2) + "\n"))

    def copy(self, path: Path) -> None:
        """Copy a file."""
        self.write(path.name, lambda part: shutil.copyfile(path, part))

    def finish(self, report: dict[str, Any]) -> None:
        """Write the report; the run is over."""
        self._write(REPORT, self._state | report)
        (self.folder / STATE).unlink(missing_ok=True)

    def require_space(self, nbytes: int) -> None:
        """Raise ConfigError if so many bytes, less those that are written, do not fit."""
        have = sum(self._state["files"].values())
        need = max(nbytes - have, 0) + SPARE_BYTES
        free = shutil.disk_usage(self.folder).free
        if need > free:
            raise ConfigError(
                f"{self.folder} needs {need / 1e9:.2f} GB, and its disk has {free / 1e9:.2f} GB "
                "free; free some, or give another folder"
            )

    def _read_state(self) -> tuple[dict[str, Any] | None, bool]:
        """(state, whether it is that of a finished run); None: the folder is new or empty."""
        if not self.folder.exists():
            return None, False
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file; give a folder that is new or empty")
        for name in (STATE, REPORT):
            if (self.folder / name).is_file():
                found = read_json_object(self.folder / name, MAX_STATE_BYTES)
                if not _is_state(found):
                    raise ConfigError(
                        f"{self.folder / name} is not one that quire quantize has written; "
                        "remove the folder, or give another"
                    )
                return found, name == REPORT
        if names := sorted(path.name for path in self.folder.iterdir()):
            raise ConfigError(
                f"{self.folder} is not empty (it has {', '.join(names[:5])}), and quire quantize "
                "has not made it; give a folder that is new or empty"
            )
        return None, False

    def _write(self, name: str, value: object) -> None:
        part = self.folder / f".{name}.part"
        part.write_text(json.dumps(value, indent=1))
        part.replace(self.folder / name)


def _same(found: dict[str, Any], own: dict[str, Any]) -> bool:
    return all(found.get(key) == own[key] for key in ("version", "settings"))


def _is_state(found: dict[str, Any]) -> bool:
    files = found.get("files")
    if not isinstance(files, dict) or not isinstance(found.get("errors"), dict):
        return False
    return all(Path(name).name == name and type(size) is int for name, size in files.items())
