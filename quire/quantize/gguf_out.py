"""Writes a model as one GGUF file, which llama.cpp and quire read.

The file has its header and the places of all tensors first; then each decoder layer is appended as
it is quantized, so that an interrupted run continues behind the last whole layer.

Axes: O outputs, I inputs, H heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.config.quant.ggml_mixes import ggml_type, nbytes
from quire.errors import ConfigError, WeightError
from quire.kernels.quantizers.ggml import LAYOUTS, quantize_ggml
from quire.quantize import gguf_metadata
from quire.quantize.calibrated import Calibrated
from quire.quantize.errors import output_error, weight_error
from quire.quantize.gguf_blocks import plain_bytes, to_blocks
from quire.quantize.gguf_names import GgufName, architecture_of, gguf_name
from quire.quantize.gptq import MIN_IMPORTANCE
from quire.quantize.out_folder import OutFolder
from quire.quantize.source import Checkpoint, SourceTensor

ALIGNMENT = 32
UNFINISHED = ".unfinished"
"""Ending of a file that still grows."""


@dataclass(frozen=True, slots=True)
class OutTensor:
    """One tensor of the file, of one source tensor or of one per expert; none: of `values`."""

    name: str
    kind: str
    shape: tuple[int, ...]  # as torch has it
    sources: tuple[SourceTensor, ...] = ()
    values: tuple[float, ...] = ()
    offset: int = 0  # behind the beginning of the data

    @property
    def nbytes(self) -> int:
        """Bytes of its data, without padding."""
        return nbytes(self.kind, math.prod(self.shape))


class GgufOut:
    """The file of a model in one mix of types."""

    def __init__(
        self, checkpoint: Checkpoint, mix: str, ignore: Mapping[str, str], out: OutFolder, name: str
    ) -> None:
        """ignore: matrices that are kept in the source's dtype, with the reason. name: of the
        model, for metadata and the file."""
        self.checkpoint, self.mix, self.plain, self.out = checkpoint, mix, ignore, out
        self.architecture = architecture_of(checkpoint.model_type)
        self.name = name
        self.file = f"{name}-{mix}.gguf"
        self.units = self._place(self._build())

    def sizes(self) -> dict[str, tuple[str, int]]:
        """Tensor of the file -> (its type, bytes)."""
        return {one.name: (one.kind, one.nbytes) for unit in self.units for one in unit}

    def has(self, unit: int) -> bool:
        """Whether a unit is written."""
        if self.out.has(self.file):
            return True
        begin = len(self._header())
        return self.out.size_of(self.file + UNFINISHED) >= begin + self._end(unit)

    def write_unit(self, unit: int, calibrated: Calibrated, device: torch.device) -> None:
        """Quantize and append a unit."""
        header = self._header()
        growing = self.file + UNFINISHED
        begin = len(header) + (self._end(unit - 1) if unit else 0)
        if unit == 0:
            self.out.append(growing, 0, [header])
        errors: dict[str, Any] = {}
        pieces = self._pieces(self.units[unit], calibrated, device, errors)
        self.out.append(growing, begin, pieces, errors)

    def is_quantized(self, one: SourceTensor) -> bool:
        """Whether calibration is to quantize a matrix: here it only collects inputs."""
        return False

    def extra_bytes(self) -> int:
        """Bytes beside the tensors."""
        return len(self._header())

    def finish(self) -> None:
        """Give the file its name."""
        if not self.out.has(self.file):
            self.out.rename(self.file + UNFINISHED, self.file)

    # --- what the file has ---

    def _build(self) -> list[list[OutTensor]]:
        """The tensors of each unit, in the order of the file."""
        units = []
        tied = self.checkpoint.config.tied
        for number, unit in enumerate(self.checkpoint.units):
            found: dict[str, OutTensor] = {}
            if number == 0:
                factors = gguf_metadata.rope_tensors(self.checkpoint.hf, self.checkpoint.config)
                for name, values in factors.items():
                    found[name] = OutTensor(name, "F32", (len(values),), values=tuple(values))
            for one in sorted(unit, key=lambda one: _by_expert(one.name)):
                if one.target is not None:
                    self._add(found, one, tied)
            units.append(list(found.values()))
        return units

    def _add(self, found: dict[str, OutTensor], one: SourceTensor, tied: bool) -> None:
        place = self._place_of(one)
        before = found.get(place.tensor)
        if before is not None and place.expert is not None:
            shape = (before.shape[0] + 1, *before.shape[1:])
            found[place.tensor] = replace(before, shape=shape, sources=(*before.sources, one))
            return
        if before is not None:
            raise WeightError(f"{one.name} and {before.sources[0].name} are both {place.tensor}")
        kind = self._kind(one, place, tied)
        shape = one.shape if place.expert is None else (1, *one.shape)
        found[place.tensor] = OutTensor(place.tensor, kind, shape, (one,))

    def _place_of(self, one: SourceTensor) -> GgufName:
        path = self.checkpoint.weights.module_path(one.module)
        return gguf_name(self.architecture, path, one.name.rpartition(".")[2])

    def _kind(self, one: SourceTensor, place: GgufName, tied: bool) -> str:
        if len(one.shape) < 2 or not (one.is_matrix or one.role == "embedding"):
            return "F32"
        if one.name in self.plain:
            return {"BF16": "BF16", "F16": "F16"}.get(one.dtype, "F32")
        matrix = "output" if tied and one.role == "embedding" else place.matrix
        return ggml_type(self.mix, matrix, one.shape[-1], place.block or 0, self.checkpoint.layers)

    def _place(self, units: list[list[OutTensor]]) -> list[list[OutTensor]]:
        at, placed = 0, []
        for unit in units:
            own = []
            for one in unit:
                own.append(replace(one, offset=at))
                at += _padded(one.nbytes)
            placed.append(own)
        return placed

    def _end(self, unit: int) -> int:
        """Where the data of a unit ends."""
        for own in reversed(self.units[: unit + 1]):
            if own:
                return own[-1].offset + _padded(own[-1].nbytes)
        return 0

    def _header(self) -> bytes:
        """Everything before the data, whole."""
        if not hasattr(self, "_made_header"):
            self._made_header = self._write_header()
        return self._made_header

    def _write_header(self) -> bytes:
        import tempfile
        from pathlib import Path

        try:
            import gguf
            import numpy as np
        except ImportError as error:
            raise ConfigError(
                f"--to {self.mix} needs the package gguf: pip install 'quire-llm[gguf]'"
            ) from error
        checkpoint = self.checkpoint
        pairs = gguf_metadata.model_pairs(
            self.architecture, self.name, checkpoint.hf, checkpoint.config
        )
        pairs |= gguf_metadata.tokenizer_pairs(checkpoint.folder, checkpoint.config.vocab)
        writer = gguf.GGUFWriter(None, self.architecture)
        writer.add_file_type(gguf_metadata.FILE_TYPES[self.mix])
        writer.add_quantization_version(gguf_metadata.QUANTIZATION_VERSION)
        for key, value in pairs.items():
            _add_pair(writer, key, value)
        for unit in self.units:
            for one in unit:
                writer.add_tensor_info(
                    one.name, one.shape, np.dtype(np.float32), one.nbytes,
                    gguf.GGMLQuantizationType[one.kind],
                )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "header"
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            writer.close()
            data = path.read_bytes()
        return data + bytes(_padded(len(data)) - len(data))

    # --- its data ---

    def _pieces(
        self,
        unit: list[OutTensor],
        calibrated: Calibrated,
        device: torch.device,
        errors: dict[str, Any],
    ) -> Iterator[bytes]:
        for one in unit:
            if one.values:
                yield _bytes_of(plain_bytes("F32", torch.tensor(one.values)))
            for source in one.sources:
                yield _bytes_of(self._encode(one, source, calibrated, device, errors))
            yield bytes(_padded(one.nbytes) - one.nbytes)

    def _encode(
        self,
        one: OutTensor,
        source: SourceTensor,
        calibrated: Calibrated,
        device: torch.device,
        errors: dict[str, Any],
    ) -> Tensor:
        """The bytes of one source tensor."""
        weight = self._transformed(source, self.checkpoint.tensor(source.name).to(device))
        if one.kind not in LAYOUTS:
            return plain_bytes(one.kind, weight)
        gram = calibrated.grams.get(source.scale_group)
        importance = None
        if gram is not None and bool((inputs := gram.diagonal()).any()):
            importance = inputs / inputs.mean() + MIN_IMPORTANCE
        codes = quantize_ggml(one.kind, weight.float(), importance)
        found: dict[str, Any] = {"type": one.kind, "layer": source.number}
        found["weight_error"] = weight_error(weight, codes)
        if gram is not None:
            found["output_error"] = output_error(weight, codes.dequantize(), gram)
        if not math.isfinite(found["weight_error"]):
            raise WeightError(f"{source.name} holds NaN or infinities: it cannot be quantized")
        errors[source.name] = found | {"bytes": nbytes(one.kind, math.prod(source.shape))}
        return to_blocks(one.kind, codes)

    def _transformed(self, source: SourceTensor, weight: Tensor) -> Tensor:
        """A tensor as GGUF files have it."""
        place, config = self._place_of(source), self.checkpoint.config
        if self.architecture == "llama" and place.matrix in ("attn_q", "attn_k"):
            heads = config.heads if place.matrix == "attn_q" else config.kv_heads
            return interleave_heads(weight, heads)
        if self.architecture.startswith("gemma") and place.matrix.endswith("norm"):
            return weight.float() + 1.0
        return weight


def interleave_heads(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from two halves [x0.., y0..] to pairs [x0, y0, x1, y1, ..]."""
    halves = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(weight.shape)


def _by_expert(name: str) -> tuple[tuple[int, str], ...]:
    """Order by numbers in a name, so that expert 10 is behind expert 9."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in name.split("."))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().numpy().tobytes()


def _add_pair(writer: Any, key: str, value: Any) -> None:
    """Add a key with the type that readers expect of it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
