"""Makes the folder of a model from a GGUF file: links to its files, and the small files that
transformers would have, from its metadata.

So nothing that reads a model's folder needs a second way. A folder belongs to one state of the
files, by name, size and time; it is made once, in QUIRE_CACHE.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quire.config.gguf import read_config, read_generation
from quire.errors import ConfigError
from quire.text.tokenizing.gguf_tokenizer import tokenizer_of
from quire.weights.gguf.container import GgufModel, read_gguf
from quire.weights.gguf.tensors import quantized_types, rope_vectors, sizes_of

log = logging.getLogger(__name__)

GGUF_CACHE = "gguf"
"""Name of the folder in QUIRE_CACHE."""
LAYOUT = 1
"""Number of the layout of these folders: another one makes them anew."""
_DTYPES = {"F32": "float32", "F16": "float16"}


def folder_of(path: Path, cache: Path) -> Path:
    """Return the folder of the model in a GGUF file, or in the files that it is one of.

    cache: where folders are made. Raises: WeightError, ConfigError.
    """
    model = read_gguf(path.absolute())
    folder = cache / GGUF_CACHE / _digest(model)
    if (folder / "config.json").is_file():
        return folder
    files = _small_files(model)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        for name, content in files.items():
            (made / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        for file in model.files:
            (made / file.name).symlink_to(file)
        _publish(made, folder)
    except OSError as error:
        raise ConfigError(
            f"{folder.parent} cannot be written ({error.strerror}), where quire keeps the "
            f"configuration of {path.name}; set QUIRE_CACHE to another folder"
        ) from error
    return folder


def _publish(made: Path, folder: Path) -> None:
    """Rename a folder to its final name; another process may have been faster."""
    made.chmod(0o755)
    try:
        made.rename(folder)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not (folder / "config.json").is_file():
            raise


def _digest(model: GgufModel) -> str:
    stats = [(str(file), file.stat()) for file in model.files]
    state = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    text = repr((LAYOUT, version("quire-llm"), state))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _small_files(model: GgufModel) -> Mapping[str, Any]:
    shapes = {name: tensor.shape for name, tensor in model.tensors.items()}
    try:
        config = read_config(model.metadata, shapes, rope_vectors(model), _dtype(model))
    except ConfigError as error:
        raise ConfigError(f"{model.path}: {error}") from None
    if types := quantized_types(model, sizes_of(config)):
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    files = {"config.json": config, "generation_config.json": read_generation(model.metadata)}
    try:
        files["tokenizer.json"], files["tokenizer_config.json"] = tokenizer_of(model.metadata)
    except ConfigError as error:
        log.warning("%s has no tokenizer that quire reads: %s", model.path, error)
    return files


def _dtype(model: GgufModel) -> str:
    """The dtype of activations: that of the most bytes, where it is one; else bfloat16."""
    bytes_of: Counter[str] = Counter()
    for tensor in model.tensors.values():
        if len(tensor.shape) > 1:
            bytes_of[tensor.type.name] += tensor.nbytes
    most = max(bytes_of, key=bytes_of.__getitem__, default="BF16")
    return _DTYPES.get(most, "bfloat16")
