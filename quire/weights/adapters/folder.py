"""Where an adapter is: a folder or a GGUF file here, or a repository of the Hugging Face hub.

A server that loads adapters by request gives the folders that they may lie in: a path, and every
file of an adapter, must then end in one of them, links followed. No torch.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from quire import env as environment
from quire.errors import ConfigError, UnknownAdapter
from quire.weights.hub import (
    TIMEOUT_S,
    HubUnreachable,
    hub_errors,
    looks_like_path,
)

CONFIG_FILE = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Files with tensors: the first of these is read."""
MAX_PATH = 4096
_REPOSITORY = re.compile(r"(?=.{1,96}$)[\w.\-]+(/[\w.\-]+)?", re.ASCII)


def resolve_adapter_folder(
    name: str | os.PathLike[str],
    *,
    allowed: Sequence[Path] | None = None,
    remote: bool = True,
    max_bytes: int = 1 << 40,
    subfolder: str = "",
    revision: str | None = None,
    token: bool | str | None = None,
    download_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """Return the folder (or GGUF file) of an adapter, downloaded if it must be.

    allowed: folders that local paths must lie in; None: any. remote: whether names of the hub are
    followed. max_bytes: of the file with tensors, before it is downloaded. subfolder: where the
    adapter is in a repository.
    Raises: UnknownAdapter (there is none), ConfigError (not allowed, offline, refused by the hub).
    """
    text = os.fspath(name).strip()
    if not text:
        raise ConfigError("the adapter's path is empty; give a folder or a name like org/adapter")
    if len(text) > MAX_PATH or "\0" in text:
        raise ConfigError(f"the adapter's path {text[:80]!r}... is too long or has a zero in it")
    if re.match(r"[A-Za-z][\w+.\-]*://", text):
        raise ConfigError(f"{text!r:.200} is an address; give a folder or a name like org/adapter")
    try:
        local = Path(text).expanduser()
    except RuntimeError as error:
        raise UnknownAdapter(f"there is no adapter {text!r:.200}: {error}") from error
    is_path = looks_like_path(text) or local.is_absolute()
    if allowed is not None and not _is_inside(local, allowed):
        if is_path:  # whether it exists is not for everyone to learn
            raise _not_allowed(text, allowed)
    elif _exists(local):
        return _local(local, text, allowed)
    if is_path or not _REPOSITORY.fullmatch(text):
        raise UnknownAdapter(f"there is no adapter {text!r:.200}; give a folder that exists")
    if not remote:
        raise UnknownAdapter(
            f"there is no folder {text!r:.200}, and adapters are not downloaded here"
        )
    if environment.read().use_modelscope:
        raise ConfigError(
            f"{text!r:.200} is not a folder here; download it from ModelScope and give its folder"
        )
    cache = None if download_dir is None else Path(download_dir).expanduser()
    return _from_hub(text, subfolder, revision, token, cache, max_bytes)


def require_regular(path: Path) -> None:
    """Raise ConfigError for a pipe, which may never end, a device or a folder."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ConfigError(f"{path} is not a regular file")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a part is too long
        return False


def _local(path: Path, given: str, allowed: Sequence[Path] | None) -> Path:
    if path.is_file() and path.suffix != ".gguf":
        raise ConfigError(f"{given!r:.200} is a file; give the folder with {CONFIG_FILE}")
    found = path.resolve()
    if allowed is not None and found.is_dir():
        for name in (CONFIG_FILE, *FILES):
            if not _is_inside(found / name, allowed):
                raise _not_allowed(given, allowed)
    return found


def _is_inside(path: Path, folders: Sequence[Path]) -> bool:
    try:
        found = path.resolve()
        return any(found.is_relative_to(one.expanduser().resolve()) for one in folders)
    except (OSError, RuntimeError):  # a part is too long; links in a circle
        return False


def _not_allowed(given: str, allowed: Sequence[Path]) -> ConfigError:
    places = ", ".join(map(str, allowed)) or "none"
    return ConfigError(
        f"{given!r:.200} is not in a folder that adapters may be loaded from: {places}"
    )


def _from_hub(
    name: str,
    subfolder: str,
    revision: str | None,
    token: bool | str | None,
    cache: Path | None,
    max_bytes: int,
) -> Path:
    from huggingface_hub import constants

    cached = _cached(name, subfolder, revision, cache)
    at = cache or constants.HF_HUB_CACHE
    if constants.HF_HUB_OFFLINE:
        if cached is None:
            raise UnknownAdapter(
                f"{name!r} is not a folder here, and not in {at}, and HF_HUB_OFFLINE is set; "
                "unset it once to download the adapter"
            )
        return cached
    try:
        return _download(name, subfolder, revision, token, cache, max_bytes)
    except HubUnreachable as error:
        if cached is None:
            raise ConfigError(
                f"{name!r} is not a folder, it is not in {at}, and the hub cannot be reached: "
                f"{error}"
            ) from error
        return cached


def _cached(name: str, subfolder: str, revision: str | None, cache: Path | None) -> Path | None:
    """The cached snapshot, if it has all files. No network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = _within(subfolder, CONFIG_FILE)
        found = try_to_load_from_cache(name, config, cache_dir=cache, revision=revision)
    except HFValidationError as error:
        raise UnknownAdapter(f"{name!r} is not a folder or a name of the hub: {error}") from error
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    return folder if any((folder / one).is_file() for one in FILES) else None


def _within(subfolder: str, file: str) -> str:
    return f"{subfolder}/{file}" if subfolder else file


def _download(
    name: str,
    subfolder: str,
    revision: str | None,
    token: bool | str | None,
    cache: Path | None,
    max_bytes: int,
) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    with hub_errors(name, revision, UnknownAdapter):
        info = HfApi(token=token).model_info(
            name, revision=revision, timeout=TIMEOUT_S, files_metadata=True
        )
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or []}
        files = [_within(subfolder, one) for one in FILES]
        file = next((one for one in files if one in sizes), None)
        config = _within(subfolder, CONFIG_FILE)
        if subfolder and not any(one.startswith(f"{subfolder}/") for one in sizes):
            raise UnknownAdapter(f"{name!r} has no folder {subfolder!r}")
        if file is None or config not in sizes:
            raise ConfigError(f"{name!r} has no {config if file else files[0]}: it is not a LoRA "
                              "adapter")  # fmt: skip
        if sizes[file] > max_bytes:
            raise ConfigError(
                f"{file} of {name!r} has {sizes[file]} bytes; adapters may have {max_bytes}"
            )
        got = snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=cache,
            allow_patterns=[config, file],
        )
    return Path(got) / subfolder
