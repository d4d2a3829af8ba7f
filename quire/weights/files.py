"""Weight files of a model on disk, read one tensor after another.

Safetensors are mapped, not read, so a tensor costs memory only while it is used. Pickles are opened
weights-only, so they cannot run code.
torch is imported only where a tensor is made: headers are for tools without it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, TypeVar

from quire.config.json_file import missing_content
from quire.errors import WeightError
from quire.log import BestEffortStream
from quire.weights import bitsandbytes_layout, headers
from quire.weights.file_listing import index_name, load_json, read_weight_map, weight_files
from quire.weights.gguf.container import GgufModel, read_gguf
from quire.weights.gguf.tensors import ModelSizes, Widen, iterate_model, model_tensors, sizes_of
from quire.weights.headers import (
    DTYPE_NAMES,
    PLAIN_DTYPES,
    TensorHeader,
    check_index,
    read_file_headers,
)
from quire.weights.hub import resolve_model_folder
from quire.weights.mistral_layout import convert_tensors, is_mistral_file

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError),
    UnpicklingError,
)
"""What torch.load raises on files that are no pickles, or not of weights alone."""

__all__ = [
    "PLAIN_DTYPES",
    "TensorHeader",
    "dtype_name",
    "has_headers",
    "iterate_pickled",
    "iterate_tensors",
    "load_json",
    "read_headers",
    "resolve_model_folder",
    "weight_files",
]


def read_headers(folder: Path, load_format: str = "auto") -> dict[str, TensorHeader]:
    """The headers of the tensors that iterate_tensors yields, of safetensors or GGUF files.

    load_format: mistral reads consolidated*.safetensors; auto does if there are no others.
    Raises: WeightError.
    """
    files = weight_files(folder, load_format)
    if is_gguf(files[0]):
        made = model_tensors(*_gguf_model(folder, files[0]))
        return {name: one.header for name, one in made.items()}
    found = headers.read_headers(folder, load_format)
    states = bitsandbytes_layout.read_states(found)
    return bitsandbytes_layout.convert_headers(found, states) if states else found


def iterate_tensors(
    folder: Path,
    progress: bool = True,
    *,
    load_format: str = "auto",
    doing: str = "",
    widen: Widen | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder's weights, once, on the CPU.

    A tensor is a view of its mapped file: copy what is to outlive the files. load_format: auto
    (safetensors, else .bin), safetensors, pt, mistral, gguf. progress: show a progress bar. doing:
    what the caller does with each tensor that takes time: the bar names it and counts tensors.
    widen: makes numbers of ggml blocks; None: those that need it are refused.
    Raises: WeightError.
    """
    files = weight_files(folder, load_format)
    if is_gguf(files[0]):
        tensors = iterate_model(*_gguf_model(folder, files[0]), widen)
        doing = doing or "from GGUF"
    else:
        tensors = _iterate_files(folder, files, progress and not doing)
    if progress and doing:
        tensors = _with_tensor_progress(tensors, files, doing)
    if files[0].suffix == ".safetensors":
        states = bitsandbytes_layout.read_states(headers.read_headers(folder, load_format))
        tensors = bitsandbytes_layout.convert_tensors(tensors, states) if states else tensors
    yield from convert_tensors(folder, tensors) if is_mistral_file(files[0]) else tensors


def has_headers(path: Path) -> bool:
    """Whether the shapes in a weight file can be read before its tensors are."""
    return path.suffix in (".safetensors", ".gguf")


def is_gguf(path: Path) -> bool:
    """Whether a weight file is GGUF."""
    return path.suffix == ".gguf"


def _gguf_model(folder: Path, path: Path) -> tuple[GgufModel, ModelSizes]:
    return read_gguf(path), sizes_of(load_json(folder, "config.json"))


def _iterate_files(folder: Path, files: list[Path], progress: bool) -> Iterator[tuple[str, Tensor]]:
    safe = files[0].suffix == ".safetensors"
    index = read_weight_map(folder, index_name(files[0]))
    seen: dict[str, str] = {}
    for path in _with_progress(files, safe, progress):
        for name, tensor in _iterate_safetensors(path) if safe else iterate_pickled(path):
            if index and index.get(name, path.name) != path.name:
                continue  # a copy: the index names the file that counts
            if name in seen:
                raise WeightError(f"{name} is in both {seen[name]} and {path.name}")
            seen[name] = path.name
            yield name, tensor
    check_index(folder, index, seen)


def _with_progress(files: list[Path], safe: bool, progress: bool) -> Iterator[Path]:
    kind = "safetensors" if safe else "pt"
    return _bar(files, len(files), f"Loading {kind} checkpoint shards") if progress else iter(files)


def _with_tensor_progress(
    tensors: Iterable[tuple[str, Tensor]], files: list[Path], doing: str
) -> Iterator[tuple[str, Tensor]]:
    """Of one file, whose shards would go from none to all, too."""
    safe = files[0].suffix == ".safetensors"
    total = sum(len(read_file_headers(path)) for path in files) if safe else None
    return _bar(tensors, total, f"Loading weights, {doing}", every=2.0)


def _bar(items: Iterable[T], total: int | None, what: str, every: float = 0.1) -> Iterator[T]:
    """The items, with a line of progress every so many seconds."""
    from tqdm import tqdm

    share = "{percentage:3.0f}% Completed | {n_fmt}/{total_fmt}" if total else "{n_fmt}"
    yield from tqdm(
        items,
        total=total,
        desc=what,
        mininterval=every,
        file=BestEffortStream(sys.stderr),
        bar_format="{desc}: " + share + " [{elapsed}<{remaining}, {rate_fmt}]\n",
    )


def _iterate_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    names = read_file_headers(
        path
    )  # our own check first: its messages name the file and the tensor
    try:
        with safe_open(path, framework="pt") as file:
            for name in names:
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise WeightError(f"{path} cannot be read: {error}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that safetensors has for a dtype."""
    name = str(dtype).removeprefix("torch.")
    return DTYPE_NAMES.get(name, name)


def iterate_pickled(path: Path, mapped: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of one pickle, opened weights-only. Raises: WeightError.

    mapped: tensors are views of the mapped file, if it is one that can be mapped.
    """
    import torch

    try:
        mmap = mapped and _is_zip(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except UNREADABLE as error:
        why = missing_content(path) or _refused_class(error)
        why = why or f"cannot be read as weights: {_first_line(error)}"
        raise WeightError(f"{path} {why}") from error
    if not isinstance(state, dict):
        raise WeightError(f"{path} holds a {type(state).__name__}, not a dict of tensors")
    if isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or not isinstance(name, str):
            raise WeightError(f"{path}: {name!r:.200} is a {type(tensor).__name__}, not a tensor")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            kind = type(tensor)
            raise WeightError(
                f"{path}: {name} is a {kind.__module__}.{kind.__qualname__}, not a plain tensor; "
                f"{_NEEDS_SAFETENSORS}"
            )
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise WeightError(f"{path}: {name!r:.200} is not a dense tensor")
        yield name, tensor


_NEEDS_SAFETENSORS = "use a checkpoint in safetensors, or the unquantized model"


def _refused_class(error: BaseException) -> str | None:
    """What to do about a pickle that holds objects of a class. None: it does not."""
    found = re.search(r"Unsupported (?:global|class)\W+(?:GLOBAL )?([\w.]{1,99})", str(error))
    if found is None:
        return None
    return (
        f"holds objects of {found[1]}: pickles are opened weights-only, as a class may run code; "
        f"{_NEEDS_SAFETENSORS}"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


def _is_zip(path: Path) -> bool:
    """torch's files since 1.6 are zip archives, which can be mapped; older ones cannot."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
