"""Writes a checkpoint as compressed-tensors: a safetensors file per decoder layer, config.json with
quantization_config, and the tokenizer and other small files of the source."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import WeightError
from quire.kernels.quantizers.floats import nvfp4_global_scale
from quire.quantize.calibrated import Calibrated
from quire.quantize.codec import Quantized, from_tensors, quantize, to_tensors
from quire.quantize.errors import output_error, weight_error
from quire.quantize.out_folder import OutFolder
from quire.quantize.schemes import Scheme
from quire.quantize.source import DTYPES, Checkpoint, SourceTensor
from quire.weights.file_listing import METADATA_PATTERNS
from quire.weights.headers import BITS

INDEX = "model.safetensors.index.json"
"""Names each tensor's file."""


class CompressedOut:
    """The files of a model in one scheme."""

    def __init__(
        self, checkpoint: Checkpoint, scheme: Scheme, plain: Mapping[str, str], out: OutFolder
    ) -> None:
        """plain: the matrices that are copied, with the reason."""
        self.checkpoint, self.scheme, self.plain, self.out = checkpoint, scheme, plain, out
        self.units = checkpoint.units

    def is_quantized(self, one: SourceTensor) -> bool:
        """Whether a tensor is quantized."""
        return one.is_matrix and one.name not in self.plain

    def sizes(self) -> dict[str, tuple[str, int]]:
        """Tensor of the source -> (what it becomes, bytes)."""
        return {
            one.name: (self.scheme.name, self._bytes(one))
            if self.is_quantized(one)
            else (one.dtype, one.nbytes)
            for one in self.checkpoint.tensors
        }

    def _bytes(self, one: SourceTensor) -> int:
        layout = self.scheme.layout(one.shape, one.dtype)
        return sum(BITS[dtype] * _product(shape) // 8 for dtype, shape in layout.values())

    def file_name(self, unit: int) -> str:
        """The file of a unit."""
        return f"model-{unit + 1:05}-of-{len(self.units):05}.safetensors"

    def has(self, unit: int) -> bool:
        """Whether the file of a unit is finished."""
        return not self.units[unit] or self.out.has(self.file_name(unit))

    def write_unit(self, unit: int, calibrated: Calibrated, device: torch.device) -> None:
        """Quantize what calibration has not, and write the unit."""
        tensors: dict[str, Tensor] = {}
        measured: dict[str, Any] = {}
        for one in self.units[unit]:
            tensor = calibrated.changed.get(one.name)
            tensor = self.checkpoint.tensor(one.name) if tensor is None else tensor
            if not self.is_quantized(one):
                tensors[one.name] = tensor
                continue
            codes: Quantized | None = calibrated.made.get(one.name)
            own = calibrated.errors.get(one.name)
            if codes is None or own is None:
                codes, own = self._round(one, tensor.to(device), calibrated)
            found = {"type": self.scheme.name, "layer": one.number}
            if not all(math.isfinite(value) for value in own.values()):
                raise WeightError(f"{one.name} holds NaN or infinities: it cannot be quantized")
            measured[one.name] = found | own | {"bytes": self._bytes(one)}
            for suffix, value in to_tensors(self.scheme, codes).items():
                tensors[f"{one.module}.{suffix}"] = value.cpu()
        whole = {name: value.detach().contiguous() for name, value in tensors.items()}
        name = self.file_name(unit)
        self.out.write(name, lambda path: save_file(whole, path, {"format": "pt"}), measured)

    def _round(
        self, one: SourceTensor, weight: Tensor, calibrated: Calibrated
    ) -> tuple[Quantized, dict[str, float]]:
        """Round a matrix to nearest; its errors."""
        scale = None
        if self.scheme.strategy == "tensor_group":
            scale = nvfp4_global_scale(self._largest(one))
        made = quantize(self.scheme, weight, DTYPES[one.dtype], global_scale=scale)
        errors = {"weight_error": weight_error(weight, made)}
        if (gram := calibrated.grams.get(one.scale_group)) is not None:
            errors["output_error"] = output_error(weight, made.dequantize(), gram)
        return made, errors

    def _largest(self, one: SourceTensor) -> float:
        """The largest magnitude of the matrices that are multiplied as one."""
        return max(
            float(self.checkpoint.tensor(other.name).abs().amax())
            for other in self.checkpoint.tensors
            if other.is_matrix and other.scale_group == one.scale_group
        )

    def values_of(self, unit: int) -> dict[str, Tensor]:
        """The tensors of a finished unit under the source's names, as the next layer sees them."""
        found = load_file(self.out.folder / self.file_name(unit))
        return {
            one.name: self._decode(one, found) if self.is_quantized(one) else found[one.name]
            for one in self.units[unit]
        }

    def _decode(self, one: SourceTensor, found: Mapping[str, Tensor]) -> Tensor:
        layout = self.scheme.layout(one.shape, one.dtype)
        own = {suffix: found[f"{one.module}.{suffix}"] for suffix in layout}
        return from_tensors(self.scheme, own).dequantize()

    def extra_bytes(self) -> int:
        """Bytes of the files beside the weights."""
        return sum(path.stat().st_size for path in self._others())

    def finish(self) -> None:
        """Write the index, config.json and the other files."""
        files = {
            name: self.file_name(unit)
            for unit, tensors in enumerate(self.units)
            for one in tensors
            for name in self._names(one)
        }
        total = sum(size for _, size in self.sizes().values())
        self.out.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": files})
        for path in self._others():
            self.out.copy(path)
        config = json.loads((self.checkpoint.folder / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"] = self.scheme.config(self._ignored())
        self.out.write_json("config.json", config)

    def _names(self, one: SourceTensor) -> list[str]:
        if not self.is_quantized(one):
            return [one.name]
        return [f"{one.module}.{name}" for name in self.scheme.layout(one.shape, one.dtype)]

    def _ignored(self) -> set[str]:
        """Modules with a matrix that stays plain: every linear layer that other engines find."""
        return {
            one.module
            for one in self.checkpoint.tensors
            if len(one.shape) == 2
            and one.name.endswith(".weight")
            and one.role != "embedding"
            and not self.is_quantized(one)
        }

    def _others(self) -> list[Path]:
        """Small files of the source that the result needs too."""
        folder = self.checkpoint.folder
        found = {path for pattern in METADATA_PATTERNS for path in folder.glob(pattern)}
        own = {"config.json", INDEX}
        return sorted(
            path for path in found if path.is_file() and path.name not in own
            and not path.name.startswith((".", "quantize_"))
            and not path.name.endswith(".index.json")
        )  # fmt: skip


def _product(shape: tuple[int, ...]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out
