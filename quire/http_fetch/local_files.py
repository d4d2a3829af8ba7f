"""Opens files that a request names, below a folder that the operator opened to requests."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from quire.errors import RequestError


def open_beneath(folder: Path, name: str, *, max_bytes: int, param: str | None = None) -> BinaryIO:
    """Open a file at a path relative to the folder. Raises RequestError.

    Each component is opened relative to the one before, and no link is followed: a user with write
    access cannot lead out of the folder, not even by a change during the walk.
    """
    refused = RequestError(f"no file {name!r:.100} that requests may name", param=param)
    steps = name.split("/")
    if len(name) > 4096 or "\0" in name or any(step in ("", ".", "..") for step in steps):
        raise refused
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for i, step in enumerate(steps):
            last = i == len(steps) - 1
            kind = os.O_NONBLOCK if last else os.O_DIRECTORY  # open() of a pipe would wait
            how = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind
            at, before = os.open(step, how, dir_fd=at), at
            os.close(before)
        found = os.fstat(at)
        if not stat.S_ISREG(found.st_mode):
            raise refused
        if found.st_size > max_bytes:
            raise RequestError(f"{name!r:.100} has more than {max_bytes} bytes", param=param)
        file, at = os.fdopen(at, "rb"), -1
    except OSError:
        raise refused from None
    finally:
        if at >= 0:
            os.close(at)
    return file
