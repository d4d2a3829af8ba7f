"""Which files of a model's folder (or hub listing) matter, and which of them are missing.

One format is read per model, safetensors before .bin. An index, if there is one, lists the files
that must be present. No torch, no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from quire.config.json_file import read_json_object
from quire.config.sentence_transformers import weight_folders
from quire.errors import ConfigError, WeightError

METADATA_PATTERNS = (
    *("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"),
    "artifact.metadata",  # of ColBERT models
    *("colbert_linear.pt", "sparse_linear.pt"),  # small heads of bge-m3
)
"""What every model brings beside its weights: config, tokenizer, templates, remote code."""

FORMATS = (
    ("*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
    ("*.bin", ""),
    ("*.pt", ""),
    ("*.gguf", ""),
)
"""(pattern of the files, name of their index), best first."""

MISTRAL_FORMAT = ("consolidated*.safetensors", "consolidated.safetensors.index.json")
"""Weights under the names of Mistral: often a copy of the others, sometimes the only ones."""

MODULE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Weights of a module of sentence-transformers in its own folder; the first of these is read."""

NOT_WEIGHTS = ("consolidated*", "training_args.bin", "optimizer*", "scheduler*", "rng_state*")
"""Copies in another layout and leftovers of training, in the same formats."""


MAX_SHARDS = 10_000
_SHARD = re.compile(r"(.+-)(\d+)-of-(\d+)(\.\w+)")
UNFINISHED = ("*.incomplete", "*.aria2", "*.part", "*.crdownload", "*.tmp")
_HUB_DOWNLOADS = ".cache/huggingface/download"
"""Where the hub's client keeps unfinished files of a download to a folder."""
OTHER_FILES = {
    "adapter_*.safetensors": "a LoRA adapter; give the model that it belongs to",
    "adapter_*.bin": "a LoRA adapter; give the model that it belongs to",
    "model_index.json": "a diffusion model; quire serves language models",
    "*.pth": "weights of torch.save, which quire reads as *.bin or *.safetensors only",
    "*.onnx": "ONNX weights, which quire does not read; give the model's folder with *.safetensors",
    "*.h5": "TensorFlow weights, which quire does not read; give *.safetensors",
    "*.msgpack": "Flax weights, which quire does not read; give *.safetensors",
}
"""Files of what is not a model's folder in these formats, and what they are."""


def gguf_models(names: Iterable[str]) -> list[str]:
    """Return the first file of each model in GGUF files. Projectors of images are no models."""
    found = [name for name in names if fnmatch(name, "*.gguf")]
    parts = [name for name in found if not name.rpartition("/")[2].startswith("mmproj")]
    return sorted(name for name in parts if not (one := _SHARD.fullmatch(name)) or int(one[2]) == 1)


def describe_folder(folder: Path) -> str:
    """Say what a folder without a model's files holds, for a message."""
    names = sorted(path.name for path in folder.iterdir())
    unfinished = [one for one in names if any(fnmatch(one, end) for end in UNFINISHED)]
    unfinished += sorted(path.name for path in folder.glob(f"{_HUB_DOWNLOADS}/*.incomplete"))
    if unfinished:
        return f"a download that is not finished ({unfinished[0]}); download the model again"
    for pattern, what in OTHER_FILES.items():
        if found := [name for name in names if fnmatch(name, pattern)]:
            return f"{what} ({found[0]})"
    return f"only {', '.join(names[:8])}" if names else "nothing"


def weight_patterns(names: Iterable[str], load_format: str = "auto") -> list[str]:
    """Patterns of the weight files to download, given a repository's file names."""
    top = [name for name in names if "/" not in name]
    for pattern, _ in _formats(load_format):
        found = sorted(name for name in top if _is_weight_file(name, pattern))
        if found:
            return found
    return []


def module_weights(folder: Path, names: Iterable[str]) -> list[str]:
    """Weight files of a folder's modules, given a repository's file names."""
    listed = set(names)
    found = []
    for one in weight_folders(folder):
        found += [f"{one}/{name}" for name in MODULE_WEIGHTS if f"{one}/{name}" in listed][:1]
    return found


def weight_files(folder: Path, load_format: str = "auto") -> list[Path]:
    """The files that hold the weights, sorted. load_format: auto, safetensors, pt, mistral.

    Raises: WeightError (none there; the index names files that are not).
    """
    for pattern, index in _formats(load_format):
        names = _indexed_files(folder, index) or _matching_files(folder, pattern)
        if names:
            _require_files(folder, names, index)
            return [folder / name for name in names]
    wanted = " or ".join(pattern for pattern, _ in _formats(load_format))
    raise WeightError(f"{folder} holds no weights ({wanted}); it holds {describe_folder(folder)}")


def index_name(path: Path) -> str:
    """Name of the index that lists a weight file, if there is one."""
    if path.suffix != ".safetensors":
        return "pytorch_model.bin.index.json"
    own = _is_weight_file(path.name, MISTRAL_FORMAT[0])
    return MISTRAL_FORMAT[1] if own else FORMATS[0][1]


def missing_files(folder: Path, load_format: str = "auto") -> list[str]:
    """Return the files of the folder's index that are missing, and those of its modules. [] if it
    is complete."""
    modules = [
        f"{one}/{MODULE_WEIGHTS[0]}"
        for one in weight_folders(folder)
        if not any((folder / one / name).is_file() for name in MODULE_WEIGHTS)
    ]
    for pattern, index in _formats(load_format):
        names = _indexed_files(folder, index) or _matching_files(folder, pattern)
        if names:
            return _absent(folder, names, index) + modules
    return ["weights (*.safetensors or *.bin)", *modules]


def load_json(folder: Path, name: str) -> dict[str, Any]:
    """Read one JSON object of a model's folder.

    Raises: ConfigError (absent, too big, not UTF-8, not JSON, not an object).
    """
    try:
        return read_json_object(folder / name)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} has no {name}") from error


def read_weight_map(folder: Path, index: str) -> dict[str, str]:
    """Tensor name -> file name, of an index file. {} if there is no such index."""
    if not index or not (folder / index).is_file():
        return {}
    found = load_json(folder, index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise WeightError(f"{folder / index} has no weight_map of tensor names to file names")
    for file in found.values():
        if Path(file).name != file:
            raise WeightError(f"{folder / index} names {file!r}, which is not a file beside it")
    return found


def _indexed_files(folder: Path, index: str) -> list[str]:
    return sorted(set(read_weight_map(folder, index).values()))


def _matching_files(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern) if _is_weight_file(path.name, pattern))


def _formats(load_format: str) -> tuple[tuple[str, str], ...]:
    """The formats that an option allows, best first."""
    chosen = {
        "safetensors": FORMATS[:1],
        "pt": FORMATS[1:-1],
        "mistral": (MISTRAL_FORMAT,),
        "gguf": FORMATS[-1:],
    }
    return chosen.get(load_format, (*FORMATS, MISTRAL_FORMAT))


def _is_weight_file(name: str, pattern: str) -> bool:
    others = () if pattern == MISTRAL_FORMAT[0] else NOT_WEIGHTS
    return fnmatch(name, pattern) and not any(fnmatch(name, other) for other in others)


def _require_files(folder: Path, names: list[str], index: str) -> None:
    if lost := _absent(folder, names, index):
        where = folder / (index if index and (folder / index).is_file() else names[0])
        raise WeightError(
            f"{where} names {len(lost)} file(s) that are not there: {', '.join(lost[:4])}; "
            "download the model again"
        )


def _absent(folder: Path, names: list[str], index: str) -> list[str]:
    """Those of these files that are missing; without an index also the shards that names count."""
    wanted = dict.fromkeys(names)
    for name in names if not (index and (folder / index).is_file()) else ():
        if shard := _SHARD.fullmatch(name):
            start, number, count, end = shard.groups()
            for i in range(1, min(int(count), MAX_SHARDS) + 1):
                wanted.setdefault(f"{start}{i:0{len(number)}}-of-{count}{end}")
    return [name for name in wanted if not (folder / name).is_file()]
