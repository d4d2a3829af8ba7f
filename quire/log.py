"""Logging: sets up the loggers of a process, when called, never at import.

Also traces function calls, to find what hangs: trace_functions().
"""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Literal, TextIO

FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
DATE_FORMAT = "%m-%d %H:%M:%S"
LOGGERS = ("quire", "uvicorn")
"""Loggers whose records are shown. The root logger is the application's."""
_PLAIN = frozenset([*vars(logging.makeLogRecord({})), "message", "asctime", "color_message"])
"""Attributes that every record has; others came with `extra=`."""

Style = Literal["text", "json"]


class BestEffortStream:
    """A stream that drops text it cannot write, without an error.

    A log may be on a full disk, or a pipe without a reader.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def open_missing_streams() -> None:
    """Open /dev/null where stdin, stdout or stderr is closed.

    Otherwise the next file or socket gets the descriptor, and the log is written into it.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free one, which is this
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def setup(
    level: str = "INFO",
    *,
    style: Style = "text",
    prefix: str = "",
    stream: Literal["stderr", "stdout"] = "stderr",
) -> None:
    """Show records from `level` on. A later call replaces the settings of an earlier one.

    The root logger and a user's own set-up are left alone.
    """
    logging.getLogger("quire").setLevel(level)
    format = prefix.replace("%", "%%") + FORMAT
    formatter = (
        JsonLinesFormatter() if style == "json" else logging.Formatter(format, datefmt=DATE_FORMAT)
    )
    for name in LOGGERS:
        logger = logging.getLogger(name)
        ours = [one for one in logger.handlers if isinstance(one, QuireLogHandler)]
        if not ours and (logger.handlers or logging.getLogger().handlers):
            continue  # the user has configured logging
        for one in ours:
            logger.removeHandler(one)
        handler = QuireLogHandler(sys.stdout if stream == "stdout" else sys.stderr)
        handler.setFormatter(formatter)
        logger.addHandler(handler)


def setup_from_file(path: Path) -> None:
    """Set up logging from a JSON file for `logging.config.dictConfig`. Raises ValueError."""
    try:
        logging.config.dictConfig(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(f"cannot set up logging from {path}: {error}") from None


class QuireLogHandler(logging.StreamHandler):
    """A handler that setup() made, so that setup() may change it."""


class JsonLinesFormatter(logging.Formatter):
    """One JSON object per line, with the attributes of `extra=`."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        line |= {name: v for name, v in vars(record).items() if name not in _PLAIN}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def trace_functions() -> Path:
    """Write each call of a function of quire, and each return, to a file. Returns its path.

    To find what hangs or crashes: it is the last call without a return. Very slow.
    """
    descriptor, path = tempfile.mkstemp(prefix=f"quire-calls-{os.getpid()}-", suffix=".log")
    # It stays open as long as the process runs; a crash loses no line.
    lines = open(descriptor, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    tracer = CallTracer(lines.write, str(Path(__file__).parent) + os.sep)
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    return Path(path)


def is_tracing() -> bool:
    """Whether trace_functions() was called in this process."""
    return isinstance(sys.getprofile(), CallTracer)


class CallTracer:
    """Writes a line for each call and return of Python code in the files below `root`."""

    def __init__(self, write: Callable[[str], object], root: str) -> None:
        self._write = write
        self._root = root

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self._root):
            return
        at = f"{time.time():.6f} {threading.current_thread().name}"
        where = f"{code.co_name} in {code.co_filename}:{frame.f_lineno}"
        if event == "return":
            self._write(f"{at} Return from {where}\n")
            return
        caller = frame.f_back
        by = f" from {caller.f_code.co_filename}:{caller.f_lineno}" if caller is not None else ""
        self._write(f"{at} Call to {where}{by}\n")
