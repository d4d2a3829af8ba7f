"""Unquantized weights in the model's dtype, packed once for the CPU's matrix kernels where
faster."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.kernels.linear import pack
from quire.quant.base import ParamSpec, QuantizableLayer


class Method:
    """No quantization."""

    name = "none"
    is_stored = False

    def accepts(self, layer: QuantizableLayer) -> bool:
        return True

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec()}

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        """Pack weights that are multiplied, where a packed kernel exists. Experts stay unpacked."""
        if layer.role != "experts" and layer.multiplied:
            layer.set_param("weight", pack(layer.take_params("weight")["weight"]))
