"""Tensors of a GGUF file as a checkpoint of transformers has them.

    X.weight   numbers of a usual dtype: as they are
    X.ggml     uint8 [O, B, bytes]: the blocks of a quantized matrix (quire.quant.gguf)
    X.ggml_scale   float32 [1]: what NVFP4 blocks are multiplied by; 1 where the file has none

What the file's writer has changed is undone: the order of rotated rows (whole rows move, so also
in blocks), norms that are stored plus one, transposed matrices, banks of experts, and kv_b of
latent attention in two halves. Layers that cannot be quantized are widened.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import WeightError
from quire.weights.gguf.container import GgufModel, GgufTensor, shortest_float
from quire.weights.gguf.names import NAMES, ROPE_TENSORS, TensorNames
from quire.weights.headers import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS = "ggml"
"""Name of the parameter that has a matrix in blocks."""
SCALE = "ggml_scale"
"""Name of the parameter that multiplies blocks of the type SCALED."""
SCALED = "NVFP4"

Widen = Callable[[str, "Tensor"], "Tensor"]
"""(type, blocks uint8 [..., B, bytes]) -> float32 [..., I]."""

_HEADER_DTYPES = {name: name for name in ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")}
_PLAIN_PARTS = ("position_embd", "ffn_gate_inp", "attn_k_b", "attn_v_b")
"""Matrices of layers that have no quantized form here."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What of the configuration is needed to undo changes."""

    model_type: str
    heads: int
    kv_heads: int

    @property
    def names(self) -> TensorNames:
        """The names of the model's tensors."""
        return NAMES[self.model_type]


def sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    """Return what the conversion of tensors needs of a config.json that is made here."""
    heads = config.get("num_attention_heads", 1)
    kind = config["model_type"]
    if kind not in NAMES:
        raise WeightError(
            f"config.json beside the GGUF file is of model type {kind!r:.60}; give the file itself "
            "as the model"
        )
    return ModelSizes(kind, heads, config.get("num_key_value_heads", heads))


class HfTensor(NamedTuple):
    """One tensor of the checkpoint. read: makes it, as a view of the file where it can."""

    header: TensorHeader
    read: Callable[[_Files], Tensor]


def model_tensors(model: GgufModel, sizes: ModelSizes) -> dict[str, HfTensor]:
    """Return the tensors of a file by the names that transformers gives them.

    Raises: WeightError (two tensors have one name; half of a pair is missing).
    """
    found: dict[str, HfTensor] = {}
    _scales_of(model)
    for name, tensor in model.tensors.items():
        if name in ROPE_TENSORS or _weight_of(name, model) is not None:
            continue
        for theirs, one in _converted(name, tensor, model, sizes):
            if theirs in found:
                raise WeightError(f"{model.path}: {name} is {theirs} a second time")
            found[theirs] = one
    return found


def quantized_types(model: GgufModel, sizes: ModelSizes) -> dict[str, str]:
    """Return the type of each quantized layer, by its name: a bank's projection is one layer."""
    found: dict[str, str] = {}
    for name, tensor in model.tensors.items():
        at, part, _ = sizes.names.split(name)
        if not _has_blocks(sizes.names, part, tensor):
            continue
        projection = sizes.names.projection_of(part)
        if projection is None:
            layer = sizes.names.module_of(at, part)
        else:
            layer = f"{at}.{sizes.names.bank}.{_projection_name(sizes.names, projection)}"
        kind = tensor.type.name
        if layer is not None and found.setdefault(layer, kind) != kind:
            raise WeightError(
                f"{model.path}: {layer} has parts of types {found[layer]} and {kind}, which share "
                "one tensor in this model"
            )
    return found


def iterate_model(
    model: GgufModel, sizes: ModelSizes, widen: Widen | None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a file, on the CPU. widen: makes numbers of blocks."""
    files = _Files(model, widen)
    for name, one in model_tensors(model, sizes).items():
        yield name, one.read(files)


class _Files:
    """Reads tensors from mapped files."""

    def __init__(self, model: GgufModel, widen: Widen | None) -> None:
        self._widen, self._scales = widen, _scales_of(model)
        self._maps: dict[Path, mmap.mmap] = {}
        for path in model.files:
            with path.open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, tensor: GgufTensor) -> Tensor:
        """Return a view: of the numbers, or of blocks [..., B, bytes]."""
        import torch

        kinds = {
            "F64": torch.float64,
            "F32": torch.float32,
            "F16": torch.float16,
            "BF16": torch.bfloat16,
            **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the memory is read-only, as is its use
            flat = torch.frombuffer(
                self._maps[tensor.file], dtype=torch.uint8, offset=tensor.start, count=tensor.nbytes
            )
        if tensor.type.is_quantized:
            return flat.view(_block_shape(tensor))
        dtype = kinds[tensor.type.name]
        if tensor.start % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(tensor.shape)

    def wide(self, tensor: GgufTensor) -> Tensor:
        """Return the numbers, of blocks in float32."""
        found = self.read(tensor)
        if not tensor.type.is_quantized:
            return found
        assert self._widen is not None, "the caller reads no values"
        wide = self._widen(tensor.type.name, found)
        return wide * self.scale(tensor) if tensor.type.name == SCALED else wide

    def scale(self, tensor: GgufTensor) -> Tensor:
        """Return what blocks of the type SCALED are multiplied by: float32 [1], or one per
        expert."""
        import torch

        if (one := self._scales.get(tensor)) is not None:
            return self.read(one)
        return torch.ones(tensor.shape[0] if len(tensor.shape) > 2 else 1)


def _weight_of(name: str, model: GgufModel) -> GgufTensor | None:
    """Return the blocks that a tensor's number is about. None: it is no such number."""
    stem, _, param = name.rpartition(".")
    weight = model.tensors.get(f"{stem}.weight")
    if param not in ("scale", "input_scale") or weight is None or weight.type.name != SCALED:
        return None
    return weight


def _scales_of(model: GgufModel) -> dict[GgufTensor, GgufTensor]:
    """Return the scale of each tensor of the type SCALED that has one. Raises WeightError."""
    found: dict[GgufTensor, GgufTensor] = {}
    for name, tensor in model.tensors.items():
        weight = _weight_of(name, model)
        if weight is None or not name.endswith(".scale"):
            continue
        experts = "_exps." in name
        shape = (weight.shape[0],) if experts else (1,)
        if (tensor.type.name, tensor.shape) != ("F32", shape):
            raise WeightError(
                f"{model.path}: {name} is {tensor.type.name} {list(tensor.shape)}; it must be F32 "
                f"{list(shape)}, {'a number per expert' if experts else 'one number'}"
            )
        found[weight] = tensor
    return found


def _block_shape(tensor: GgufTensor) -> tuple[int, ...]:
    *rows, inputs = tensor.shape
    return (*rows, inputs // tensor.type.values, tensor.type.nbytes)


def _has_blocks(names: TensorNames, part: str, tensor: GgufTensor) -> bool:
    """Whether a tensor stays in blocks."""
    return tensor.type.is_quantized and len(tensor.shape) > 1 and part not in _PLAIN_PARTS


def _projection_name(names: TensorNames, projection: int) -> str:
    if names.fused_bank:
        return "down_proj" if projection == 2 else "gate_up_proj"
    return names.experts[projection]


def _converted(
    name: str, tensor: GgufTensor, model: GgufModel, sizes: ModelSizes
) -> Iterator[tuple[str, HfTensor]]:
    names = sizes.names
    at, part, param = names.split(name)
    projection = names.projection_of(part)
    if projection is not None and names.fused_bank:
        yield from _fused_bank(at, projection, param, tensor, model, names)
    elif projection is not None and param == "weight":
        yield from _experts(f"{at}.{names.bank}", names.experts[projection], tensor)
    elif part in ("attn_k_b", "attn_v_b") and param == "weight":
        if part == "attn_k_b":
            yield f"{at}.self_attn.kv_b_proj.weight", _latent_up(name, tensor, model)
    else:
        yield from _single(name, at, part, param, tensor, sizes)


def _single(
    name: str, at: str, part: str, param: str, tensor: GgufTensor, sizes: ModelSizes
) -> Iterator[tuple[str, HfTensor]]:
    names = sizes.names
    module = names.module_of(at, part)
    if module is None or param not in ("weight", "bias"):
        theirs = name
    elif module.endswith(("sinks", "correction_bias")):
        theirs = module
    else:
        theirs = f"{module}.{BLOCKS if _has_blocks(names, part, tensor) else param}"
    blocks = theirs.endswith(f".{BLOCKS}")
    shape = _block_shape(tensor) if blocks else tensor.shape
    heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}.get(part, 0) * names.rotated_pairs
    lower = names.norm_offset if part.endswith("norm") and param == "weight" else 0.0
    transposed = part in names.transposed and param == "weight" and not blocks
    if part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
        shape = (1, *shape)
    if transposed:
        shape = shape[::-1]

    def read(files: _Files) -> Tensor:
        value = files.read(tensor) if blocks else files.wide(tensor)
        if heads:
            value = unpaired(name, value, heads)
        if lower:
            value = value.float() - lower
        return value.t() if transposed else value.reshape(shape)

    yield theirs, HfTensor(_header(tensor, blocks, shape), read)
    if blocks and tensor.type.name == SCALED:
        header = TensorHeader("F32", (1,), tensor.file)
        yield f"{module}.{SCALE}", HfTensor(header, lambda files: files.scale(tensor))


def _header(tensor: GgufTensor, blocks: bool, shape: tuple[int, ...]) -> TensorHeader:
    dtype = "U8" if blocks else _HEADER_DTYPES.get(tensor.type.name, "F32")
    return TensorHeader(dtype, shape, tensor.file)


def unpaired(name: str, value: Tensor, heads: int) -> Tensor:
    """[heads * D, ...]: rows (2i, 2i + 1) of each head become (i, i + D / 2)."""
    if value.shape[0] % (2 * heads):
        raise WeightError(f"{name} has {value.shape[0]} rows, which are not {heads} heads of pairs")
    pairs = value.reshape(heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def _experts(bank: str, leaf: str, tensor: GgufTensor) -> Iterator[tuple[str, HfTensor]]:
    """One tensor [X, O, I] as those of its experts, which are views."""
    blocks = tensor.type.is_quantized
    shape = _block_shape(tensor) if blocks else tensor.shape
    for expert in range(shape[0]):

        def read(files: _Files, expert: int = expert) -> Tensor:
            return files.read(tensor)[expert]

        def scale(files: _Files, expert: int = expert) -> Tensor:
            return files.scale(tensor)[expert : expert + 1]

        module = f"{bank}.{expert}.{leaf}"
        name = f"{module}.{BLOCKS if blocks else 'weight'}"
        yield name, HfTensor(_header(tensor, blocks, shape[1:]), read)
        if tensor.type.name == SCALED:
            yield f"{module}.{SCALE}", HfTensor(TensorHeader("F32", (1,), tensor.file), scale)


def _fused_bank(
    at: str, projection: int, param: str, tensor: GgufTensor, model: GgufModel, names: TensorNames
) -> Iterator[tuple[str, HfTensor]]:
    """gate and up [X, F, I] as one tensor [X, 2F, I] whose rows take turns; plain ones turned."""
    if projection == 1:
        return  # with the gate
    blocks = tensor.type.is_quantized
    shape = _block_shape(tensor) if blocks else tensor.shape
    both = [tensor]
    if projection == 0:
        block = at.rpartition(".")[2]
        both.append(_partner(model, f"blk.{block}.ffn_up_exps.{param}", tensor))
        shape = (shape[0], 2 * shape[1], *shape[2:])
    turned = not blocks and param == "weight"
    if turned:
        shape = (shape[0], shape[2], shape[1])

    def read(files: _Files) -> Tensor:
        import torch

        parts = [files.read(one) for one in both]
        value = torch.stack(parts, 2).flatten(1, 2) if len(parts) > 1 else parts[0]
        return value.transpose(1, 2) if turned else value

    stem = f"{at}.{names.bank}.{_projection_name(names, projection)}"
    end = "_bias" if param == "bias" else f"_{BLOCKS}" if blocks else ""
    yield f"{stem}{end}", HfTensor(_header(tensor, blocks, shape), read)
    if tensor.type.name == SCALED:

        def scales(files: _Files) -> Tensor:
            import torch

            ones = torch.stack([files.scale(one) for one in both], 1)  # [X, 1 or 2]
            return ones.repeat(1, shape[1] // len(both))

        yield f"{stem}_{SCALE}", HfTensor(TensorHeader("F32", shape[:2], tensor.file), scales)


def _partner(model: GgufModel, name: str, of: GgufTensor) -> GgufTensor:
    found = model.tensors.get(name)
    if found is None or (found.type, found.shape) != (of.type, of.shape):
        kind = "missing" if found is None else f"{found.type.name} {list(found.shape)}"
        raise WeightError(
            f"{model.path}: {name} is {kind}; it must be {of.type.name} {list(of.shape)}, as the "
            "other half of the same matrix"
        )
    return found


def _latent_up(name: str, keys: GgufTensor, model: GgufModel) -> HfTensor:
    """k_b [H, L, P], transposed, and v_b [H, V, L] as kv_b [H (P + V), L]."""
    other = name.replace("attn_k_b", "attn_v_b")
    values = model.tensors.get(other)
    if len(keys.shape) != 3 or values is None or len(values.shape) != 3:
        raise WeightError(f"{model.path}: {name} needs {other}, and both must have three axes")
    heads, latent, plain = keys.shape
    if (values.shape[0], values.shape[2]) != (heads, latent):
        raise WeightError(
            f"{model.path}: {other} is {list(values.shape)}; with {name} {list(keys.shape)} it "
            f"must be [{heads}, ., {latent}]"
        )
    shape = (heads * (plain + values.shape[1]), latent)

    def read(files: _Files) -> Tensor:
        import torch

        parts = (files.wide(keys).float().transpose(1, 2), files.wide(values).float())
        return torch.cat(parts, 1).flatten(0, 1)

    return HfTensor(TensorHeader("F32", shape, keys.file), read)


def rope_vectors(model: GgufModel) -> Mapping[str, tuple[float, ...]]:
    """Return the divisors of rotary frequencies that a file has. Raises WeightError."""
    found = {}
    for name in ROPE_TENSORS:
        tensor = model.tensors.get(name)
        if tensor is None:
            continue
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.nbytes > 1 << 16:
            raise WeightError(
                f"{model.path}: {name} is {tensor.type.name} {list(tensor.shape)}; it must be a "
                "vector of F32"
            )
        with tensor.file.open("rb") as file:
            file.seek(tensor.start)
            data = file.read(tensor.nbytes)
        found[name] = tuple(map(shortest_float, memoryview(data).cast("f")))
    return found
