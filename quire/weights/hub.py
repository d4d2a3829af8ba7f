"""Where a model's files are: a local folder, the Hugging Face hub (cache first), or ModelScope.
"embedded" is the model that ships with quire.

Returns a folder on this disk that holds everything that was requested, or raises an error with what
to do. No torch.
Whatever Hugging Face's own variables say (HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN,
HF_ENDPOINT) holds, because huggingface_hub itself reads them.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from quire import embedded
from quire import env as environment
from quire.config.mistral_format import PARAMS_FILE
from quire.config.sentence_transformers import MODULES_FILE
from quire.errors import ConfigError
from quire.weights.file_listing import (
    METADATA_PATTERNS,
    describe_folder,
    missing_files,
    module_weights,
    weight_patterns,
)
from quire.weights.gguf.folder import GGUF_CACHE, folder_of
from quire.weights.gguf.hub_files import GgufRepoFile, choose_files, fetch, parse_name

log = logging.getLogger(__name__)

Contents = Literal["model", "config", "tokenizer"]
"""model: everything. config: all but weights. tokenizer: config.json may be absent as well."""

TIMEOUT_S = 10.0
"""Seconds that the hub may take to list the files of a model."""

CONFIG_FILES = ("config.json", PARAMS_FILE)
COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_model_folder(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: bool | str | None = None,
    download_dir: str | os.PathLike[str] | None = None,
    env: environment.Env | None = None,
    want: Contents = "model",
    load_format: str = "auto",
    ignore: Sequence[str] = ("original/**/*",),
) -> Path:
    """Find the folder of a model, and download missing files.

    `download_dir` takes the place of the hub's cache folder. `ignore`: globs not downloaded.
    load_format: which of its weights, as for weight_files.
    Raises: ConfigError (not found, gated, offline and not cached, not a model's folder).
    """
    text = os.fspath(name).strip()
    if not text:
        raise ConfigError("the model's name is empty; give a folder or a name like org/model")
    if text == "embedded":
        return embedded.path()
    if address := re.match(r"https?://[^/]+/([^/]+/[^/?#]+)", text):
        raise ConfigError(f"{text!r} is an address; give the model's name, {address[1]!r}")
    env = env or environment.read()
    local = Path(text).expanduser()
    where = None if download_dir is None else Path(download_dir).expanduser()
    if not local.exists() and (gguf := parse_name(text)):
        if env.use_modelscope:
            return folder_of(_gguf_from_modelscope(gguf, revision, where), env.cache_dir)
        return folder_of(_gguf_from_hub(gguf, revision, token, where), env.cache_dir)
    if local.exists() or looks_like_path(text):
        return _resolve_local(local, text, want, env.cache_dir)
    if env.use_modelscope:
        return _from_modelscope(text, revision, where, want, load_format, ignore)
    return _from_hub(text, revision, token, where, want, load_format, ignore)


def looks_like_path(text: str) -> bool:
    """Whether a name that is no folder must have been meant as one."""
    starts = ("/", "./", "../", "~", ".\\", "..\\")
    return text.startswith(starts) or text.endswith("/") or text.count("/") > 1 or "\\" in text


def _resolve_local(path: Path, given: str, want: Contents, cache: Path) -> Path:
    if not path.exists():
        raise ConfigError(f"there is no folder {given!r}; give a folder that exists, or org/model")
    if path.is_file():
        if path.suffix == ".gguf":
            return folder_of(path, cache)
        raise ConfigError(
            f"{given!r} is a file; give a GGUF file, or the folder that holds config.json"
        )
    if path.parent != cache / GGUF_CACHE and _has_only_gguf(path, want):
        names = [one.name for one in path.iterdir()]
        return folder_of(path / choose_files(names, "", given)[0], cache)
    if want != "tokenizer" and not _has_config(path):
        raise ConfigError(
            f"{given!r} exists but has no config.json, so it is not a model's folder; it holds "
            f"{describe_folder(path)}"
        )
    return path


def _has_only_gguf(folder: Path, want: Contents) -> bool:
    """Whether a folder's model is in GGUF files, and nothing that is wanted is elsewhere."""
    if want == "tokenizer" and (folder / "tokenizer.json").is_file():
        return False
    patterns = weight_patterns(one.name for one in folder.iterdir())
    return bool(patterns) and patterns[0].endswith(".gguf")


# --- Hugging Face ---


def _gguf_from_hub(
    name: GgufRepoFile, revision: str | None, token: bool | str | None, cache: Path | None
) -> Path:
    """Return the first file of a model in GGUF files, downloaded if it must be."""
    from huggingface_hub import HfApi, constants, snapshot_download

    def cached(files: Sequence[str]) -> Path:
        try:
            got = snapshot_download(
                name.repo, revision=revision, cache_dir=cache, allow_patterns=list(files),
                local_files_only=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{name.repo!r} is not in {cache or constants.HF_HUB_CACHE}; connect once to "
                "download it"
            ) from error
        return Path(got)

    def downloaded(files: Sequence[str]) -> Path:
        got = snapshot_download(
            name.repo, revision=revision, token=token, cache_dir=cache, allow_patterns=list(files)
        )
        return Path(got)

    if constants.HF_HUB_OFFLINE:
        return fetch(name, cached, None)
    try:
        with hub_errors(name.repo, revision):
            info = HfApi(token=token).model_info(name.repo, revision=revision, timeout=TIMEOUT_S)
            return fetch(name, downloaded, [one.rfilename for one in info.siblings or []])
    except HubUnreachable as error:
        log.warning("the hub cannot be reached (%s); using the cached %s", error, name.repo)
        return fetch(name, cached, None)


def _from_hub(
    name: str,
    revision: str | None,
    token: bool | str | None,
    cache: Path | None,
    want: Contents,
    load_format: str,
    ignore: Sequence[str],
) -> Path:
    from huggingface_hub import constants

    cached, lacks = _cached(name, revision, cache, want, load_format)
    pinned = revision is not None and COMMIT.fullmatch(revision) is not None
    if cached is not None and not lacks and (pinned or constants.HF_HUB_OFFLINE):
        return cached
    at = cache or constants.HF_HUB_CACHE
    if constants.HF_HUB_OFFLINE:
        what = (
            f"{name!r} is in {at} but lacks {_abbreviate(lacks)}"
            if lacks
            else f"{name!r} is not a folder here, and not in {at}"
        )
        raise ConfigError(f"{what}, and HF_HUB_OFFLINE is set; unset it once to download the model")
    try:
        return _download(name, revision, token, cache, want, load_format, ignore)
    except HubUnreachable as error:
        if cached is None or lacks:
            raise ConfigError(
                f"{name!r} is not a folder, it is not complete in {at}, and the hub cannot be "
                f"reached: {error}"
            ) from error
        log.warning("the hub cannot be reached (%s); using the cached %s", error, cached)
        return cached


class HubUnreachable(Exception):
    """The hub did not answer; the cached files may still be complete."""


def _cached(
    name: str, revision: str | None, cache: Path | None, want: Contents, load_format: str
) -> tuple[Path | None, list[str]]:
    """The cached snapshot, if there is one, and the names of files it lacks. No network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    known = (
        () if want != "tokenizer" else ("tokenizer_config.json", "tokenizer.json", "tekken.json")
    )
    for file in (*known, *CONFIG_FILES):
        try:
            found = try_to_load_from_cache(name, file, cache_dir=cache, revision=revision)
        except HFValidationError as error:
            raise ConfigError(
                f"{name!r} is not a folder or a name like org/model: {error}"
            ) from error
        if isinstance(found, str):
            folder = Path(found).parent
            return folder, missing_files(folder, load_format) if want == "model" else []
    return None, []


def _download(
    name: str,
    revision: str | None,
    token: bool | str | None,
    cache: Path | None,
    want: Contents,
    load_format: str,
    ignore: Sequence[str],
) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    with hub_errors(name, revision):
        patterns = [*METADATA_PATTERNS]
        if want == "model":
            info = HfApi(token=token).model_info(name, revision=revision, timeout=TIMEOUT_S)
            names = [file.rfilename for file in info.siblings or []]
            found = weight_patterns(names, load_format)
            if found and found[0].endswith(".gguf"):
                raise ConfigError(
                    f"{name!r} has its weights in GGUF files ({', '.join(found[:4])}); give "
                    f"one, as {name}/{found[0]}, or its quantization, as {name}:Q4_K_M"
                )
            patterns += found
            if MODULES_FILE in names:
                modules = hf_hub_download(
                    name, MODULES_FILE, revision=revision, token=token, cache_dir=cache
                )
                patterns += module_weights(Path(modules).parent, names)
        got = snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=cache,
            allow_patterns=patterns,
            ignore_patterns=list(ignore),
        )
    return _validate_folder(Path(got), name, want, load_format)


@contextmanager
def hub_errors(
    name: str, revision: str | None, missing: type[ConfigError] = ConfigError
) -> Iterator[None]:
    """Turn the hub's refusals into ConfigErrors, and a hub that does not answer into
    HubUnreachable. missing: the class for a repository that there is not."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{name!r} is gated: accept its terms on its page, then give hf_token=... or HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise missing(f"{name!r} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise missing(
            f"there is no folder and no hub model {name!r} (a private one needs hf_token=...)"
        ) from error
    except (OSError, errors.HTTPError) as error:
        raise HubUnreachable(str(error).strip().splitlines()[0] or type(error).__name__) from error


def _has_config(folder: Path) -> bool:
    return any((folder / name).is_file() for name in CONFIG_FILES)


def _validate_folder(folder: Path, name: str, want: Contents, load_format: str) -> Path:
    if want != "tokenizer" and not _has_config(folder):
        raise ConfigError(f"{name!r} has no config.json, so it is not a model this engine can read")
    lacks = missing_files(folder, load_format) if want == "model" else []
    if lacks:
        raise ConfigError(f"{name!r} lacks {_abbreviate(lacks)}")
    return folder


def _abbreviate(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more


# --- ModelScope ---


def _from_modelscope(
    name: str,
    revision: str | None,
    cache: Path | None,
    want: Contents,
    load_format: str,
    ignore: Sequence[str],
) -> Path:
    weights = [] if want == "model" else ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf"]
    with _modelscope_errors(name):
        got = _modelscope_snapshot(name, revision, cache, ignore_file_pattern=[*ignore, *weights])
    return _validate_folder(got, name, want, load_format)


def _gguf_from_modelscope(name: GgufRepoFile, revision: str | None, cache: Path | None) -> Path:
    """Return the first file of a model in GGUF files, downloaded if it must be."""
    from huggingface_hub import constants

    def download(files: Sequence[str]) -> Path:
        return _modelscope_snapshot(name.repo, revision, cache, allow_file_pattern=list(files))

    with _modelscope_errors(name.repo):
        listed = None
        if not constants.HF_HUB_OFFLINE:
            api = importlib.import_module("modelscope.hub.api").HubApi()
            at = {} if revision is None else {"revision": revision}
            found = api.get_model_files(model_id=name.repo, recursive=True, **at)
            listed = [one["Path"] for one in found if one.get("Type") != "tree"]
        return fetch(name, download, listed)


def _modelscope_snapshot(
    name: str, revision: str | None, cache: Path | None, **patterns: list[str]
) -> Path:
    from huggingface_hub import constants

    hub: Any = importlib.import_module("modelscope.hub.snapshot_download")
    got = hub.snapshot_download(
        model_id=name,
        revision=revision,
        cache_dir=None if cache is None else str(cache),
        local_files_only=constants.HF_HUB_OFFLINE,
        **patterns,
    )
    return Path(got)


@contextmanager
def _modelscope_errors(name: str) -> Iterator[None]:
    """Raise what the package raises as ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"{name!r} is to come from ModelScope (QUIRE_USE_MODELSCOPE is set), but the package "
            "is missing: pip install modelscope"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        # NOTE: modelscope has no narrower common class; its HTTP errors are OSErrors.
        raise ConfigError(f"ModelScope did not give {name!r}: {error}") from error
