"""Recording file: the contents of the flight recorder when an engine died or hung.

Gzipped JSON lines. The first is a header: format, reason, time, package versions, the engine's
config, its last heartbeat and its stacks. The others are records of
quire.engine.recording.flight_recorder, with numbers for digests of block keys, salts and tenants.
There are no paths and no texts. The parent of the engine's process writes it; `quire replay` reads
it.
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

FORMAT = 3
MAX_FILES = 10
"""Files in a folder; the oldest is deleted."""
SUFFIX = ".jsonl.gz"
MAX_UNPACKED_BYTES = 1 << 30
"""Bytes of an unpacked file that are read."""
PACKAGES = ("quire-llm", "torch", "triton", "numpy", "llguidance")
_LEVEL = 1  # another engine starts meanwhile
_PATH = re.compile(r"(?<![\w/:.])/(?:[\w.~+-]+/)+[\w.~+-]*")


@dataclass(frozen=True, slots=True)
class Recording:
    """The contents of a file."""

    header: dict[str, Any]
    config: EngineConfig
    records: list[list[Any]]


def write_recording(
    folder: Path,
    contents: flight_recorder.RingContents,
    config: EngineConfig,
    *,
    why: str,
    beat: Heartbeat,
    stacks: str,
) -> Path:
    """Write a new file. Returns its path. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    header = _header(contents, config, why, beat, stacks)
    path = _unused_path(folder, time.strftime("flight-%Y%m%d-%H%M%S"))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    encode = msgspec.json.Encoder().encode
    with os.fdopen(descriptor, "wb") as raw, gzip.GzipFile("", "wb", _LEVEL, raw, 0) as file:
        file.write(encode(header) + b"\n")
        for record in _anonymize(contents.records):
            file.write(encode(record) + b"\n")
    _delete_oldest(folder)
    return path


def read_recording(path: Path) -> Recording:
    """Read a file of write_recording(). Raises ConfigError if it is not one of this format."""
    try:
        with gzip.open(path, "rb") as file:
            data = file.read(MAX_UNPACKED_BYTES)
        lines = data.splitlines()
        header = msgspec.json.decode(lines[0])
        if header["quire_flight"] != FORMAT:
            raise ConfigError(
                f"{path.name} has recording format {header['quire_flight']}, this version of quire "
                f"reads format {FORMAT} only: replay it with the version that wrote it "
                f"({header.get('versions', {}).get('quire-llm', 'unknown')})"
            )
        config = msgspec.convert(header["config"], EngineConfig)
        records = [msgspec.json.decode(line, type=list[Any]) for line in lines[1:]]
    except FileNotFoundError:
        raise ConfigError(f"file not found: {path}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path.name}: {error}") from None
    except (LookupError, TypeError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path.name} is not a recording: {error}") from None
    return Recording(header, config, records)


def _header(
    contents: flight_recorder.RingContents,
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
        "submitted": contents.submitted_step,
        "submitted_at": contents.submitted_at,
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
    """The config without private values: paths, names of adapters, tokens, templates, the owner of
    the model."""
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
    adapters = None if config.adapters is None else replace(config.adapters, modules=())
    return replace(
        config, model=model, load=load, observe=observe, adapters=adapters, health=HealthSection()
    )


def _anonymize(records: list[list[Any]]) -> Iterator[list[Any]]:
    """Replace digests by numbers: the same number for the same digest."""
    numbers: dict[bytes, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            size = flight_recorder.KEY_BYTES
            digests = [value[i : i + size] for i in range(0, len(value), size)]
            return [numbers.setdefault(one, len(numbers) + 1) for one in digests]
        if isinstance(value, list):
            return [plain(one) for one in value]
        if isinstance(value, dict):
            return {name: plain(one) for name, one in value.items()}
        return value

    return map(plain, records)


def _unused_path(folder: Path, name: str) -> Path:
    """A path that does not exist yet."""
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
