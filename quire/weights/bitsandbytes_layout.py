"""Tensors of bitsandbytes checkpoints, made into two per matrix: codes, and their scales.

    4 bits  X.weight                uint8 [n / 2, 1] or other dtypes of as many bytes: the flat
                                    matrix, two codes a byte, the first in the high bits
            X.weight.absmax         float32 [n / 64], or nested: uint8 codes of nested_quant_map
            X.weight.quant_map      float32 [16]: values of the codes
            X.weight.nested_absmax  float32 [n / 64 / 256], X.weight.nested_quant_map float32 [256]
            X.weight.quant_state.bitsandbytes__nf4    JSON: quant_type, blocksize, shape, ...
    8 bits  X.weight int8 [O, I], X.SCB float32 [O], X.weight_format uint8: 0

    ->      X.bnb_codes uint8 [O, I], X.bnb_scale float32 [O, I / g], or [O] of 8 bits

Blocks of 64 run over the flat matrix. Where I is no multiple of 64, a block crosses rows; then g is
their greatest common divisor, and the scale of a block is repeated, so the values are the same.
Everything here is untrusted: sizes are checked before anything is made.

Source: https://github.com/bitsandbytes-foundation/bitsandbytes
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.config.quant.bitsandbytes import BLOCK, TABLES
from quire.errors import WeightError
from quire.weights.headers import BITS, TensorHeader, read_tensor_bytes

if TYPE_CHECKING:
    from torch import Tensor

CODES, SCALE = "bnb_codes", "bnb_scale"
_STATE = re.compile(r"(.+)\.weight\.quant_state\.bitsandbytes__(nf4|fp4)")
_PART = re.compile(
    r"(.+)\.(?:weight(?:\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+))?"
    r"|(SCB|weight_format))"
)
MAX_STATE_BYTES = 1 << 16
NESTED_BLOCK = 256
INT8_MAX = 127


class QuantState(NamedTuple):
    """How a matrix is stored. type: nf4, fp4 or int8. nested_offset: None: scales are floats."""

    type: str
    shape: tuple[int, int]
    nested_offset: float | None = None

    @property
    def group(self) -> int:
        """Inputs that share a scale, whatever the row."""
        return self.shape[1] if self.type == "int8" else math.gcd(BLOCK, self.shape[1])

    @property
    def parts(self) -> frozenset[str]:
        """The tensors that the matrix has, by the ends of their names."""
        if self.type == "int8":
            return frozenset(("", "SCB"))
        nested = () if self.nested_offset is None else ("nested_absmax", "nested_quant_map")
        return frozenset(("", "absmax", "quant_map", *nested))


def read_states(headers: Mapping[str, TensorHeader]) -> dict[str, QuantState]:
    """Module -> how its weight is stored; {}: this is no such checkpoint. Raises WeightError."""
    found: dict[str, QuantState] = {}
    files: dict[Any, list[str]] = {}
    for name, header in headers.items():
        if _STATE.fullmatch(name):
            files.setdefault(header.file, []).append(name)
        path, _, end = name.rpartition(".")
        weight = headers.get(f"{path}.weight")
        if end == "SCB" and weight is not None and weight.dtype == "I8" and len(weight.shape) == 2:
            found[path] = QuantState("int8", (weight.shape[0], weight.shape[1]))
    for file, names in files.items():
        for name, text in read_tensor_bytes(file, names, MAX_STATE_BYTES).items():
            match = _STATE.fullmatch(name)
            assert match is not None
            found[match[1]] = _parse_state(name, match[2], text)
    for path, state in found.items():
        _check_sizes(path, state, headers)
    return found


def convert_headers(
    headers: Mapping[str, TensorHeader], states: Mapping[str, QuantState]
) -> dict[str, TensorHeader]:
    """The headers of the tensors that convert_tensors makes."""
    made = {}
    for name, header in headers.items():
        match = _PART.fullmatch(name)
        state = states.get(match[1]) if match else None
        if match is None or state is None:
            made[name] = header
        elif name.endswith(".weight"):
            outputs, inputs = state.shape
            scales = (outputs,) if state.type == "int8" else (outputs, inputs // state.group)
            made[f"{match[1]}.{CODES}"] = TensorHeader("U8", state.shape, header.file)
            made[f"{match[1]}.{SCALE}"] = TensorHeader("F32", scales, header.file)
    return made


def convert_tensors(
    tensors: Iterable[tuple[str, Tensor]], states: Mapping[str, QuantState]
) -> Iterator[tuple[str, Tensor]]:
    """Make codes and scales of each matrix when all of its tensors have come."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        match = _PART.fullmatch(name)
        state = states.get(match[1]) if match else None
        if match is None or state is None:
            yield name, tensor
            continue
        path, part = match[1], match[2] or match[3] or ""
        if part == "weight_format" and (stated := tensor.flatten()[:2].tolist()) != [0]:
            given = stated[0] if len(stated) == 1 else f"{tensor.numel()} numbers"
            raise WeightError(f"{name} is {given}; supported: 0, weights in rows")
        if part not in state.parts:
            continue
        own = waiting.setdefault(path, {})
        own[part] = tensor
        if own.keys() == state.parts:
            del waiting[path]
            codes, scale = (_int8 if state.type == "int8" else _four_bits)(path, own, state)
            yield f"{path}.{CODES}", codes
            yield f"{path}.{SCALE}", scale


def _int8(path: str, own: dict[str, Tensor], state: QuantState) -> tuple[Tensor, Tensor]:
    import torch

    return own[""].view(torch.uint8) ^ 128, own["SCB"].float() / INT8_MAX


def _four_bits(path: str, own: dict[str, Tensor], state: QuantState) -> tuple[Tensor, Tensor]:
    """Codes [O, I], and scales [O, I / g]."""
    import torch

    outputs, inputs = state.shape
    table = torch.tensor(TABLES[state.type])
    if not torch.equal(own["quant_map"].float(), table):
        raise WeightError(f"{path}.weight.quant_map is not the table of {state.type}")
    packed = own[""].contiguous().view(-1).view(torch.uint8)
    codes = torch.stack((packed >> 4, packed & 15), -1).view(-1)[: outputs * inputs]
    scale = own["absmax"]
    if state.nested_offset is not None:
        own_scales = own["nested_absmax"].repeat_interleave(NESTED_BLOCK)[: len(scale)]
        scale = own["nested_quant_map"][scale.int()] * own_scales + state.nested_offset
    count = outputs * inputs // state.group
    if state.group != BLOCK:
        scale = scale.repeat_interleave(BLOCK // state.group)[:count]
    return codes.view(outputs, inputs), scale.view(outputs, -1)


def _parse_state(name: str, kind: str, text: bytes) -> QuantState:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{name} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise WeightError(f"{name} is no JSON object")
    nested = "nested_blocksize" in found or "nested_offset" in found
    wanted: dict[str, object] = {"quant_type": kind, "blocksize": BLOCK}
    if nested:
        wanted |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
    for key, value in wanted.items():
        if found.get(key) != value:
            raise WeightError(f"{name}: {key} is {found.get(key)!r:.80}; supported: {value!r}")
    shape, offset = found.get("shape"), found.get("nested_offset")
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(type(size) is int and 0 < size < 1 << 31 for size in shape)
    ):
        raise WeightError(f"{name}: shape is {shape!r:.80}; supported: two sizes")
    if not nested:
        return QuantState(kind, (shape[0], shape[1]))
    if not isinstance(offset, (int, float)) or not math.isfinite(offset):
        raise WeightError(f"{name}: nested_offset is {offset!r:.80}; it must be a number")
    return QuantState(kind, (shape[0], shape[1]), float(offset))


def _check_sizes(path: str, state: QuantState, headers: Mapping[str, TensorHeader]) -> None:
    """Raise WeightError if a matrix lacks a tensor, or has one of another size or dtype."""
    outputs, inputs = state.shape
    elements = outputs * inputs
    blocks = -(-elements // BLOCK)
    nested = state.nested_offset is not None
    wanted = {
        f"{path}.weight": (-(-elements // 2) * 8, None),
        f"{path}.weight.absmax": (blocks * (8 if nested else 32), "U8" if nested else "F32"),
        f"{path}.weight.quant_map": (16 * 32, "F32"),
        f"{path}.weight.nested_absmax": (-(-blocks // NESTED_BLOCK) * 32, "F32"),
        f"{path}.weight.nested_quant_map": (256 * 32, "F32"),
    }
    if state.type == "int8":
        wanted = {f"{path}.weight": (elements * 8, "I8"), f"{path}.SCB": (outputs * 32, "F32")}
    elif not nested:
        wanted = dict(list(wanted.items())[:3])
    for name, (bits, dtype) in wanted.items():
        header = headers.get(name)
        if header is None:
            raise WeightError(f"{name} is missing: {path} is quantized by bitsandbytes")
        if math.prod(header.shape) * BITS[header.dtype] != bits or header.dtype != (
            dtype or header.dtype
        ):
            raise WeightError(
                f"{name} is {header.dtype} {list(header.shape)}; a matrix of {outputs} x {inputs} "
                f"in {state.type} needs {bits // 8} bytes" + (f" of {dtype}" if dtype else "")
            )
