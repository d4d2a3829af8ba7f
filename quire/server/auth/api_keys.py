"""API keys and their permissions: the keys of --api-key, and those of a file that may change.

The file holds no key, only SHA-256 digests (`quire key NAME` makes both). Keys with one name are
one tenant. A file that cannot be read or parsed changes nothing: the old keys stay valid, and the
log and the metrics report it. Running requests continue whatever happens to their key.

A key is looked up by a digest that is keyed anew in each process, so that the time of a look-up
reveals nothing of the file.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from quire.core.tenant_limits import UNRESTRICTED, TenantLimits
from quire.errors import ConfigError
from quire.sandbox.tenant_turns import TenantShare

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
"""How often the file is looked at."""
MAX_BYTES = 16 << 20
DEFAULT_ROUTES = (
    *("/v1/*", "/v2/*", "/generate", "/invocations", "/tokenize", "/detokenize"),
    *("/tokenizer_info", "/version", "/inference/*", "/quire/about"),
    *("/openapi.json", "/docs", "/redoc"),
    *("/pooling", "/classify", "/score", "/rerank", "/generative_scoring"),
)
"""Routes of a key without `routes`. All others show or affect other tenants."""

NAMED_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Routes that a key has only if its `routes` name them without a pattern: they read the machine's
files."""

KeyDigest = Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]
PositiveCount = Annotated[int, Meta(ge=1, le=2**53)]
EntryName = Annotated[str, Meta(min_length=1, max_length=128)]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of `keys` in the file."""

    name: EntryName
    sha256: KeyDigest | Annotated[list[KeyDigest], Meta(min_length=1)]
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    max_requests: PositiveCount | None = None
    tokens_per_minute: PositiveCount | None = None
    max_queued_tokens: PositiveCount | None = None
    kv_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    cache_group: EntryName | None = None
    max_adapters: PositiveCount = 1000
    adapter_folders: list[str] | None = None
    routes: list[str] | None = None
    operator: bool = False

    def key_digests(self) -> list[bytes]:
        """Digests of the owner's keys."""
        digests = [self.sha256] if isinstance(self.sha256, str) else self.sha256
        return [bytes.fromhex(one) for one in digests]


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of the file."""

    keys: list[KeyEntry]


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """The owner of a key. routes: patterns of paths; None: every path."""

    name: str = ""
    tenant: bytes = b""
    limits: TenantLimits = UNRESTRICTED
    cache_salt: bytes = (
        b""  # of what the prefix cache keeps for it; b"": shared with all that have none
    )
    uuid_scope: bytes = b""  # of the names that it gives to media; b"": the tenant's
    routes: tuple[str, ...] | None = None
    max_adapters: int | None = None  # names that it may load; None: any number
    adapter_folders: tuple[str, ...] | None = None  # that it loads from; None: those of the server

    @property
    def share(self) -> TenantShare:
        """Its share of worker processes."""
        return TenantShare(self.tenant, self.limits.weight)

    @property
    def is_operator(self) -> bool:
        """Whether it may do everything."""
        return self.routes is None

    def may_access(self, path: str) -> bool:
        """Whether it may ask for this path."""
        if self.routes is None:
            return True
        if path in NAMED_ROUTES:
            return path in self.routes
        return any(fnmatchcase(path, one) for one in self.routes)


OPERATOR_OWNER = KeyOwner()
"""Of the keys on the command line: everything."""


def owner_from_entry(entry: KeyEntry) -> KeyOwner:
    """Make a KeyOwner of an entry of the file."""
    group = "name", entry.name
    if entry.cache_group is not None:
        group = "group", entry.cache_group
    return KeyOwner(
        entry.name,
        tenant_of(entry.name),
        TenantLimits(
            entry.weight,
            entry.max_requests,
            entry.tokens_per_minute,
            entry.max_queued_tokens,
            entry.kv_share,
        ),
        _digest(*group),
        routes=None
        if entry.operator
        else tuple(DEFAULT_ROUTES if entry.routes is None else entry.routes),
        max_adapters=None if entry.operator else entry.max_adapters,
        adapter_folders=None if entry.adapter_folders is None else tuple(entry.adapter_folders),
    )


def tenant_of(name: str) -> bytes:
    """Return the tenant of a key's name."""
    return _digest("name", name)[:16]


def _digest(kind: str, name: str) -> bytes:
    return hashlib.sha256(f"quire {kind}\0{name}".encode()).digest()


def read_key_file(path: Path) -> list[KeyEntry]:
    """The entries of a key file. Raises ConfigError, which never shows what may be a key."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"the key file {path} has more than {MAX_BYTES} bytes")
    try:
        entries = msgspec.convert(_parse_key_file(path, raw), KeyFile).keys
    except msgspec.ValidationError as error:
        raise ConfigError(f"the key file {path} cannot be used: {error}") from None
    _check_entries(path, entries)
    return entries


def _parse_key_file(path: Path, raw: bytes) -> Any:
    kind = path.suffix.lower()
    try:
        if kind == ".toml":
            return _parse_toml(raw.decode())
        if kind == ".json":
            return json.loads(raw)
        if kind in (".yaml", ".yml"):
            return yaml.safe_load(raw)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        message = f"the key file {path} is no {kind[1:].upper()}{_error_location(error)}"
        raise ConfigError(message) from None
    raise ConfigError(f"the key file must be .yaml, .toml or .json, got {str(path)!r}")


def _error_location(error: Exception) -> str:
    """The place of a fault, without its text, which may be a key."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f": line {error.problem_mark.line + 1}"
    return f": {error}" if isinstance(error, ValueError) else ""


def _parse_toml(text: str) -> Any:
    try:
        import tomllib  # Python 3.11 brings it
    except ImportError:
        raise ConfigError("a key file in TOML needs Python 3.11: write YAML or JSON") from None
    return tomllib.loads(text)


def _check_entries(path: Path, entries: Sequence[KeyEntry]) -> None:
    seen: dict[bytes, str] = {}
    terms: dict[str, KeyOwner] = {}
    for entry in entries:
        for digest in entry.key_digests():
            if digest in seen:
                both = f"{seen[digest]!r} and {entry.name!r}"
                raise ConfigError(f"the key file {path} has one key twice: {both}")
            seen[digest] = entry.name
        if (
            terms.setdefault(entry.name, owner_from_entry(entry)).limits
            != owner_from_entry(entry).limits
        ):
            message = f"the key file {path} gives {entry.name!r} different limits"
            raise ConfigError(f"{message}: keys of one name share them")
        for pattern in entry.routes or ():
            if not pattern.startswith("/"):
                message = f"the key file {path}: routes are paths, got {pattern!r:.60}"
                raise ConfigError(message)


class KeySet:
    """All keys of a server. Read by its event loop, which alone changes it."""

    def __init__(self, keys: Iterable[str] = (), file: str | Path | None = None) -> None:
        """Raises ConfigError if the file cannot be used."""
        self._secret = secrets.token_bytes(32)
        self._path = None if file is None else Path(file)
        self._static_digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._owners: Mapping[bytes, tuple[bytes, KeyOwner]] = {}
        self.names: dict[bytes, str] = {}
        """Of tenants, also of those that were in the file before."""
        self.reload_counts: Callable[[str], None] = lambda result: None
        """Called after each reading of a changed file, with ok or failed."""
        self._file_stamp = self._stat_file()
        self._replace_entries([] if self._path is None else read_key_file(self._path))

    def lookup(self, key: bytes) -> KeyOwner | None:
        """The owner of a key; None: the key is unknown."""
        digest = hashlib.sha256(key).digest()
        found = self._owners.get(self._lookup_digest(digest))
        if found is None or not hmac.compare_digest(found[0], digest):
            return None
        return found[1]

    async def watch(self) -> None:
        """Read the file again whenever it has changed, for ever."""
        while self._path is not None:
            await asyncio.sleep(POLL_INTERVAL_S)
            if await asyncio.to_thread(self._stat_file) != self._file_stamp:
                await self.reload()

    def schedule_reload(self) -> None:
        """Read the file as soon as may be. For a signal."""
        self._reading = asyncio.create_task(self.reload())

    async def reload(self) -> None:
        """Read the file now. What cannot be used changes nothing."""
        if self._path is None:
            return
        seen = await asyncio.to_thread(self._stat_file)
        self._file_stamp = seen
        try:
            entries = await asyncio.to_thread(read_key_file, self._path)
        except ConfigError as error:
            log.warning("%s: the old keys stay valid", error)
            self.reload_counts("failed")
            return
        self._replace_entries(entries)
        log.info("the key file was read again: %d keys of %d names", *self.key_and_name_counts)
        self.reload_counts("ok")

    @property
    def key_and_name_counts(self) -> tuple[int, int]:
        """Keys of the file, and their names."""
        holders = [holder for _, holder in self._owners.values() if holder.name]
        return len(holders), len({holder.name for holder in holders})

    def _replace_entries(self, entries: Sequence[KeyEntry]) -> None:
        found = {
            digest: owner_from_entry(entry) for entry in entries for digest in entry.key_digests()
        }
        found |= dict.fromkeys(self._static_digests, OPERATOR_OWNER)
        if len(self._static_digests) > 1:
            found |= {one: replace(OPERATOR_OWNER, uuid_scope=one) for one in self._static_digests}
        self._owners = {self._lookup_digest(one): (one, holder) for one, holder in found.items()}
        self.names |= {holder.tenant: holder.name for holder in found.values()}

    def _lookup_digest(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")

    def _stat_file(self) -> tuple[int, int, int] | None:
        """Numbers that change when the file is written or replaced; a link's target counts."""
        if self._path is None:
            return None
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size
