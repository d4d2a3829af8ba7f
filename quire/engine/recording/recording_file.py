"""A recording as a file: what an engine's flight recorder had when the engine died or hung.

JSON lines, gzipped. The first is an object: version, why and when, versions, the engine's config,
its last beat, its stacks. Each other is a record of quire.engine.recording.flight_recorder.
There are no paths, keys or texts in it: keys of blocks have become numbers that mean nothing
elsewhere, and so have salts and tenants. Whoever starts engines writes it; `quire replay` reads it.
"""

from __future__ import annotations

import gzip
import os
import platform
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from quire.config.engine_config import EngineConfig, HealthSection
from quire.engine.heartbeat_page import Heartbeat
from quire.engine.recording import flight_recorder
from quire.errors import ConfigError

FORMAT = 1
MAX_FILES = 10
"""Files in a folder; the oldest goes."""
SUFFIX = ".jsonl.gz"
MAX_UNPACKED_BYTES = 1 << 30
"""Of a file unpacked: more is no recording."""
PACKAGES = ("quire", "torch", "triton", "numpy", "xgrammar", "llguidance")
_LEVEL = 1  # another engine starts meanwhile
_PATH = re.compile(r"(?<![\w/:.])/(?:[\w.~+-]+/)+[\w.~+-]*")


@dataclass(frozen=True, slots=True)
class Recording:
    """What a file holds."""

    header: dict[str, Any]
    config: EngineConfig
    records: list[list[Any]]


def write_recording(
    folder: Path,
    taken: flight_recorder.RingContents,
    config: EngineConfig,
    *,
    why: str,
    beat: Heartbeat,
    stacks: str,
) -> Path:
    """Make the file; where it is. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    header = _header(taken, config, why, beat, stacks)
    path = _unused_path(folder, time.strftime("flight-%Y%m%d-%H%M%S"))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    encode = msgspec.json.Encoder().encode
    with os.fdopen(descriptor, "wb") as raw, gzip.GzipFile("", "wb", _LEVEL, raw, 0) as file:
        file.write(encode(header) + b"\n")
        for record in _anonymized(taken.records):
            file.write(encode(record) + b"\n")
    _delete_oldest(folder)
    return path


def read_recording(path: Path) -> Recording:
    """A file that write() made, here or elsewhere. Raises ConfigError if it is none."""
    try:
        with gzip.open(path, "rb") as file:
            data = file.read(MAX_UNPACKED_BYTES)
        lines = data.splitlines()
        header = msgspec.json.decode(lines[0])
        if header["quire_flight"] != FORMAT:
            message = f"{path.name} is a recording of format {header['quire_flight']}, not {FORMAT}"
            raise ConfigError(message)
        config = msgspec.convert(header["config"], EngineConfig)
        records = [msgspec.json.decode(line, type=list[Any]) for line in lines[1:]]
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path.name}: {error}") from None
    except (LookupError, TypeError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path.name} is no recording: {error}") from None
    return Recording(header, config, records)


def _header(
    taken: flight_recorder.RingContents,
    config: EngineConfig,
    why: str,
    beat: Heartbeat,
    stacks: str,
) -> dict[str, Any]:
    return {
        "quire_flight": FORMAT,
        "why": _PATH.sub("...", why),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "at": time.monotonic(),
        "submitted": taken.submitted_step,
        "submitted_at": taken.submitted_at,
        "versions": dict(_versions()),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "beat": beat._asdict(),
        "stacks": stacks,
        "config": msgspec.to_builtins(redact_config(config)),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def redact_config(config: EngineConfig) -> EngineConfig:
    """Without what is private: paths, tokens, templates, whose model it is."""
    model = replace(
        config.model,
        name=Path(config.model.name).name,
        tokenizer="",
        served_names=(),
        chat_template=None,
        logits_processors=(),
    )
    load = replace(config.load, download_dir=None, hf_token=None)
    observe = replace(config.observe, profile=None)
    return replace(config, model=model, load=load, observe=observe, health=HealthSection())


def _anonymized(records: list[list[Any]]) -> Iterator[list[Any]]:
    """With numbers in place of digests; the same number for the same digest."""
    numbers: dict[bytes, int] = {}

    def number(value: bytes) -> int:
        return numbers.setdefault(value, len(numbers) + 1)

    def numbered(keys: bytes) -> list[int]:
        size = flight_recorder.KEY_BYTES
        return [number(keys[i : i + size]) for i in range(0, len(keys), size)]

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return numbered(value)
        if isinstance(value, list):
            return [plain(one) for one in value]
        if isinstance(value, dict):
            return {name: plain(one) for name, one in value.items()}
        return value

    for record in records:
        yield record if record[0] == "p" else plain(record)


def _unused_path(folder: Path, name: str) -> Path:
    """A name that no file has."""
    found = folder / f"{name}{SUFFIX}"
    count = 1
    while found.exists():
        count += 1
        found = folder / f"{name}-{count}{SUFFIX}"
    return found


def _delete_oldest(folder: Path) -> None:
    found = sorted(folder.glob(f"flight-*{SUFFIX}"), key=lambda one: one.stat().st_mtime_ns)
    for path in found[:-MAX_FILES]:
        path.unlink(missing_ok=True)
