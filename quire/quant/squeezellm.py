"""SqueezeLLM weights: codes into a table of each output, and a sparse matrix of outliers.

qweight  int32 [I * bits / 32, O]      lookup_table [O, 2 ** bits]
rows int32 [O + 1], cols int32 [n], vals [n]            outliers of all outputs, by output
full_rows [I, k], full_row_indices int32 [k]            outputs with outliers everywhere
startrows                                               how threads share them: not used

w[o, i] = lookup_table[o, q[i, o]] + outliers[o, i]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from quire.config.quant.squeezellm import SqueezeFormat
from quire.errors import WeightError
from quire.kernels.formats.weight import StoredWeight
from quire.kernels.formats.weight_codes import WeightCodes
from quire.kernels.grouped_linear import pack, pack_experts
from quire.quant._bit_fields import unpack_words
from quire.quant.base import ParamSpec, QuantizableLayer, inputs_of
from quire.weights.headers import TensorHeader
from quire.weights.mapping import RANDOM_BITS, InitSpec

_CSR, _FULL = ("rows", "cols", "vals"), ("full_rows", "full_row_indices")


@dataclass(frozen=True, slots=True, eq=False)
class SparseSumWeight(StoredWeight):
    """A weight [O, I] and a sparse matrix that is added to it, multiplied in float32."""

    kind: ClassVar[str] = "sparse_sum"
    base: StoredWeight
    at: Tensor  # int64 [2, n]: output and input of each number that is added
    values: Tensor  # float32 [n]
    shape: tuple[int, int]

    @property
    def added(self) -> Tensor:
        """The sparse matrix."""
        return torch.sparse_coo_tensor(
            self.at, self.values, self.shape, is_coalesced=True, check_invariants=False
        )

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        more = torch.sparse.mm(self.added, x.float().t()).t()
        return (self.base.product(x, bias).float() + more).to(x.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        whole = self.base.dequantize(torch.float32) + self.added.to_dense()
        return whole.to(dtype or torch.float32)


class Method:
    """Codes of 3 or 4 bits into tables of float32; outliers are sparse."""

    name = "squeezellm"
    is_stored = True
    merged: ClassVar[Mapping[str, tuple[str, ...]]] = {"outliers": (*_CSR, *_FULL, "startrows")}

    def __init__(self, form: SqueezeFormat, *, outliers: bool = False) -> None:
        self._form, self._bits, self._has_outliers = form, form.bits, outliers

    def adapted(
        self, layer: QuantizableLayer, stored: Mapping[str, Sequence[TensorHeader]]
    ) -> Method:
        """Return the method for a layer with or without outliers."""
        parts = self.merged["outliers"]
        return Method(self._form, outliers=any(one in stored for one in parts))

    def accepts(self, layer: QuantizableLayer) -> bool:
        """Linear layers and experts."""
        return layer.role in ("linear", "experts")

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        size = 1 << self._bits
        found = {
            "qweight": ParamSpec(
                dtype=torch.int32,
                inputs_per=Fraction(32, self._bits),
                transposed=True,
                init=RANDOM_BITS,
            ),
            "lookup_table": ParamSpec(
                dtype=torch.float32,
                inputs_per=None,
                trailing=(size,),
                init=InitSpec(0.0, inputs_of(layer, matrix) ** -0.5),
            ),
        }
        if self._has_outliers:
            found["outliers"] = ParamSpec(dtype=torch.float32)
        return found

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        for matrix in layer.matrices:
            inputs = len(layer.stored_layout(matrix)[0].ranges[1])
            values = layer.take_params(matrix)
            q = unpack_words(values["qweight"], self._bits, inputs)
            codes = WeightCodes(q=q, bits=self._bits, group=inputs, table=values["lookup_table"])
            if layer.role == "experts":  # never published with outliers
                layer.set_param(matrix, pack_experts(codes, dtype))
                continue
            weight = pack(codes, dtype)
            if (outliers := values.get("outliers")) is not None and not outliers.is_meta:
                at = outliers.nonzero(as_tuple=True)
                shape = (outliers.shape[0], inputs)
                weight = SparseSumWeight(weight, torch.stack(at), outliers[at], shape)
            layer.set_param(matrix, weight)

    def merge(self, name: str, found: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """Return the outliers of one checkpoint layer, [O, I] float32. Raises WeightError."""
        outputs, inputs = shape
        dense = torch.zeros(shape)
        given = found.keys() - {"startrows"}
        if not given or not all(given >= set(one) for one in (_CSR, _FULL) if given & set(one)):
            raise WeightError(
                f"{name}: the layer has {', '.join(sorted(found))}; outliers are "
                f"{', '.join(_CSR)}, or {', '.join(_FULL)}, or both"
            )
        for one in sorted(given):
            wanted = "floats" if one in ("vals", "full_rows") else "integers"
            if found[one].dtype.is_floating_point != (wanted == "floats"):
                raise WeightError(f"{name}: {one} is {found[one].dtype}; it must have {wanted}")
        if "rows" in given:
            rows, cols, vals = (found[one].flatten() for one in _CSR)
            counts = rows.long().diff()
            if len(rows) != outputs + 1 or int(rows[0]) or int(rows[-1]) != len(cols):
                last = int(rows[-1]) if len(rows) else None
                raise WeightError(
                    f"{name}: rows has {len(rows)} numbers, the last {last}; a matrix of "
                    f"{outputs} outputs and {len(cols)} outliers needs {outputs + 1} from 0 to "
                    f"{len(cols)}"
                )
            if bool((counts < 0).any()) or len(vals) != len(cols):
                raise WeightError(f"{name}: rows decreases, or vals has not the length of cols")
            _require_below(name, "cols", cols, inputs)
            at = torch.arange(outputs).repeat_interleave(counts)
            dense.index_put_((at, cols.long()), vals.float(), accumulate=True)
        if "full_rows" in given:
            full, at = found["full_rows"], found["full_row_indices"].flatten()
            if full.shape != (inputs, len(at)):
                raise WeightError(
                    f"{name}: full_rows is {list(full.shape)}; it must be {[inputs, len(at)]}"
                )
            _require_below(name, "full_row_indices", at, outputs)
            dense.index_add_(0, at.long(), full.float().t())
        return dense


def _require_below(name: str, what: str, numbers: Tensor, limit: int) -> None:
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < limit:
        raise WeightError(
            f"{name}: {what} has numbers from {int(numbers.min())} to {int(numbers.max())}; they "
            f"must be below {limit}"
        )
