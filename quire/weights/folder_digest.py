"""Folder digest: tells whether two machines have the same model, without reading its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
CONFIGS = ("config.json", "params.json", "quantize_config.json", "hf_quant_config.json")
_HEAD_BYTES = 1 << 16  # names, types and shapes of most tensors of a file


def folder_digest(folder: Path) -> dict[str, str]:
    """Return a digest of each file that a model's weights depend on: of its beginning and size."""
    if folder.is_file():
        return {folder.name: _file_digest(folder)}
    found = sorted(
        one
        for one in folder.iterdir()
        if one.suffix in WEIGHTS or one.name in CONFIGS or one.name.endswith(".index.json")
    )
    return {one.name: _file_digest(one) for one in found}


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        digest = hashlib.sha256(opened.read(_HEAD_BYTES))
    digest.update(str(file.stat().st_size).encode())
    return digest.hexdigest()[:32]
