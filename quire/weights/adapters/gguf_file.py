"""LoRA adapters in GGUF files, as the tensors and the configuration of a PEFT folder.

    blk.3.attn_q.weight.lora_a [r, I], .lora_b [O, r]     banks: [X, r, I] and [X, O, r]
    token_embd.weight.lora_a [V, r], .lora_b [E, r]

The scale is adapter.lora.alpha / r, or 1 without alpha. B of rotated q and k has rows in pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from quire.config.gguf import ARCHITECTURES, architecture_of
from quire.errors import ConfigError, WeightError
from quire.weights.adapters.folder import require_regular
from quire.weights.adapters.lora_config import LoraConfig, PatternMap
from quire.weights.adapters.modules import AdapterModules
from quire.weights.adapters.tensor_files import (
    AdapterTensors,
    check_tensors,
    read_tensor,
)
from quire.weights.gguf.container import GgufModel, GgufTensor, read_gguf
from quire.weights.gguf.names import NAMES, TensorNames
from quire.weights.gguf.tensors import unpaired
from quire.weights.headers import TensorHeader

MAX_EXPERTS = 1 << 12


def open_gguf_adapter(
    path: Path, modules: AdapterModules, max_bytes: int
) -> tuple[LoraConfig, AdapterTensors]:
    """Read the headers of a file. Raises: ConfigError, WeightError."""
    require_regular(path)
    if (size := path.stat().st_size) > max_bytes:
        raise WeightError(f"{path} has {size} bytes; adapters may have {max_bytes}")
    model = read_gguf(path)
    alpha = _alpha_of(model)
    names = _names_of(model)
    headers: dict[str, TensorHeader] = {}
    readers: dict[str, Callable[[], Tensor]] = {}
    ranks: dict[str, float] = {}
    for name, tensor in model.tensors.items():
        stem, _, end = name.rpartition(".lora_")
        if end not in ("a", "b") or len(tensor.shape) not in (2, 3):
            headers[name] = TensorHeader("F32", tensor.shape, tensor.file)
            continue  # refused by its name
        for module, one, dims in _modules_of(stem, tensor, names):
            embedding = stem == "token_embd.weight"
            turned = embedding and end == "a"
            theirs = f"{module}.lora_{'embedding_' if embedding else ''}{end.upper()}"
            theirs += "" if embedding else ".weight"
            headers[theirs] = TensorHeader(one.type.name, dims[::-1] if turned else dims, path)
            paired = names.rotated_pairs and end == "b"
            width = _head_dim(module, modules) if paired and _is_rotated(stem) else 0
            readers[theirs] = _reader(name, one, dims, turned, width)
            if end == "b":
                ranks[module] = dims[1]
    config = LoraConfig(
        rank=int(max(ranks.values(), default=1)),
        alpha=alpha,
        ranks=PatternMap("lora_b", ranks),
        alphas=PatternMap("lora_b", {} if alpha else ranks),
    )
    source = AdapterTensors.one_by_one(headers, lambda name: readers[name]())
    check_tensors(path, source)
    return config, source


def _alpha_of(model: GgufModel) -> float:
    """Check that the file is a LoRA adapter. Return its alpha; 0: the scale is 1."""
    for key, want in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (found := model.metadata.get(key)) != want:
            raise ConfigError(f"{model.path}: {key} is {found!r:.40}; a LoRA adapter has {want!r}")
    if model.metadata.get("adapter.alora.invocation_tokens"):
        raise ConfigError(
            f"{model.path}: the adapter is to act from some token on, which quire does not serve"
        )
    alpha = model.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ConfigError(f"{model.path}: adapter.lora.alpha is {alpha!r:.40}; it must be a number")
    return float(alpha)


def _names_of(model: GgufModel) -> TensorNames:
    """The names of the architecture. Raises ConfigError."""
    kind = ARCHITECTURES[architecture_of(model.metadata)].model_type
    if kind == "llama" and any("_exps." in name for name in model.tensors):
        kind = "mixtral"  # which has the same architecture in this format
    return NAMES[kind]


def _is_rotated(stem: str) -> bool:
    return stem.endswith((".attn_q.weight", ".attn_k.weight"))


def _head_dim(module: str, modules: AdapterModules) -> int:
    place = modules.find(module)
    return 0 if place is None else place.shape.head_dim


def _modules_of(
    stem: str, tensor: GgufTensor, names: TensorNames
) -> list[tuple[str, GgufTensor, tuple[int, ...]]]:
    """Return (module, tensor, shape): of a bank one for each expert."""
    at, part, param = names.split(stem)
    projection = names.projection_of(part)
    module = names.module_of(at, part) if param == "weight" else None
    if projection is None or len(tensor.shape) == 2 or names.fused_bank:
        return [(module or stem, tensor, tensor.shape)]
    count, *dims = tensor.shape
    if count > MAX_EXPERTS:
        raise WeightError(f"{stem} has {count} experts; the maximum is {MAX_EXPERTS}")
    each = tensor.nbytes // count
    return [
        (
            f"{at}.{names.bank}.{expert}.{names.experts[projection]}",
            tensor._replace(start=tensor.start + expert * each, nbytes=each),
            tuple(dims),
        )
        for expert in range(count)
    ]


def _reader(
    name: str, tensor: GgufTensor, shape: tuple[int, ...], turned: bool, head_dim: int
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        value = read_tensor(tensor.file, tensor.start, shape, tensor.type.name)
        if head_dim:
            value = unpaired(name, value, len(value) // head_dim)
        return value.t().contiguous() if turned else value.contiguous()

    return read
