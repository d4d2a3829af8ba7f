"""Which GGUF files of a repository or a folder are the model that a user names. No torch.

org/name:Q4_K_M        the files of that name's part, in any folder of the repository
org/name/file.gguf     one file, with the others that it is a part of
org/name               the only model that is there
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from quire.errors import ConfigError
from quire.weights.file_listing import gguf_models
from quire.weights.gguf.container import part_names

_FILE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>.+\.gguf)")
_QUANT = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<quant>[\w.-]+)")


class GgufRepoFile(NamedTuple):
    """A model in GGUF files of a repository. wanted: a file, or a part of its name; "": any."""

    repo: str
    wanted: str


def parse_name(text: str) -> GgufRepoFile | None:
    """Return what a name means, if it names GGUF files of a repository."""
    if found := _FILE.fullmatch(text):
        return GgufRepoFile(found["repo"], found["file"])
    if found := _QUANT.fullmatch(text):
        return GgufRepoFile(found["repo"], found["quant"])
    return None


def choose_files(names: Iterable[str], wanted: str, where: str) -> list[str]:
    """Return the files of the model that is wanted, the first part first. Raises ConfigError."""
    models = gguf_models(names)
    if wanted.endswith(".gguf"):
        chosen = [name for name in models if name == wanted]
    elif wanted:
        part = re.compile(rf"(^|[-._/]){re.escape(wanted)}([-./]|$)", re.IGNORECASE)
        chosen = [name for name in models if part.search(name.removesuffix(".gguf"))]
    else:
        chosen = models
    if len(chosen) == 1:
        folder, slash, name = chosen[0].rpartition("/")
        return [f"{folder}{slash}{part}" for part in part_names(name)]
    listed = ", ".join((chosen or models)[:8]) or "no GGUF files"
    more = f" and {len(chosen or models) - 8} more" if len(chosen or models) > 8 else ""
    which = f"several models {wanted!r}" if chosen and wanted else "several models"
    have = which if chosen else f"no model {wanted!r}" if models else "no model"
    raise ConfigError(
        f"{where} has {have}: {listed}{more}; name one file, as in ORG/NAME/FILE.gguf, or its "
        "quantization, as in ORG/NAME:Q4_K_M"
    )


def fetch(
    name: GgufRepoFile, download: Callable[[Sequence[str]], Path], listed: Iterable[str] | None
) -> Path:
    """Return the first file of a model of a repository.

    download: fetches the files of these names, and returns the folder of the snapshot. listed: all
    files of the repository; None: only what is there already can be used.
    """
    if listed is None:
        folder = download(["*.gguf"])
        listed = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
        files = choose_files(listed, name.wanted, f"the cached part of {name.repo}")
        lost = [file for file in files if not (folder / file).is_file()]
        if lost:
            raise ConfigError(f"{name.repo} is in the cache, but lacks {', '.join(lost[:3])}")
        return folder / files[0]
    files = choose_files(listed, name.wanted, name.repo)
    return download(files) / files[0]
