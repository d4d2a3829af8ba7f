"""The checkpoint that is quantized: its tensors, the layers of the model they belong to, its files.

Axes: O outputs, I inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from quire.config.facts import read_hf_config
from quire.config.quant.facts import MIN_OUTPUTS, LayerRule
from quire.errors import ConfigError, WeightError
from quire.layers import ParamModule, WeightModule
from quire.models.base import ModelConfig
from quire.models.build import MODELS, read_model_config
from quire.weights.files import read_headers
from quire.weights.headers import BITS, TensorHeader
from quire.weights.mapping import ParamTarget, Weights, assign_tensors

Role = Literal["linear", "experts", "head", "embedding", "router", "other"]
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Refusal(Protocol):
    """Why a matrix [outputs, inputs] cannot be stored; None: it can."""

    def __call__(self, outputs: int, inputs: int, *, fused: bool) -> str | None: ...


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of the checkpoint."""

    name: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    layer: str  # the model's path of its module; "": the model does not use it
    role: Role
    target: ParamTarget | None
    number: int | None  # of the decoder layer that it is part of

    @property
    def module(self) -> str:
        """The checkpoint's path of its module."""
        return self.name.rpartition(".")[0]

    @property
    def is_matrix(self) -> bool:
        """Whether it is the weight of a matrix that is multiplied."""
        weights = self.role in ("linear", "experts", "head")
        return weights and len(self.shape) == 2 and self.name.endswith(".weight")

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        bits = BITS[self.dtype]
        for size in self.shape:
            bits *= size
        return bits // 8

    @property
    def scale_group(self) -> tuple[str, str, int]:
        """Tensors with equal ones are one matrix when multiplied: q, k and v, or gate and up."""
        assert self.target is not None
        part = self.target.shard or 0
        expert = part // 2 if self.target.param.startswith("gate_up") else part
        return self.layer, self.target.param, expert if self.role == "experts" else 0


@dataclass(slots=True)
class Checkpoint:
    """A plain checkpoint of a model that quire has natively. Use it as a context manager."""

    folder: Path
    hf: dict[str, Any]
    model_type: str
    config: ModelConfig
    model: nn.Module  # on the meta device
    tensors: list[SourceTensor]
    _headers: dict[str, TensorHeader]
    _files: dict[Path, Any] = field(default_factory=dict)

    @property
    def weights(self) -> Weights:
        """The names of the model's checkpoints."""
        return cast(Weights, self.model.weights)

    @property
    def layers(self) -> int:
        """The decoder layers of the model."""
        return self.config.layers

    def tensor(self, name: str) -> Tensor:
        """One tensor, mapped from its file."""
        path = self._headers[name].file
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt").__enter__()
        return self._files[path].get_tensor(name)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in self._files.values():
            one.__exit__(None, None, None)
        self._files.clear()

    @property
    def units(self) -> list[list[SourceTensor]]:
        """What is read and written at once: the embedding, each decoder layer, the rest."""
        found: list[list[SourceTensor]] = [[] for _ in range(self.layers + 2)]
        for one in self.tensors:
            last = 0 if one.role == "embedding" else self.layers + 1
            found[last if one.number is None else one.number + 1].append(one)
        return found

    def files(self) -> list[Path]:
        """The weight files."""
        return sorted({header.file for header in self._headers.values()})


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers, and match them with the model. Raises ConfigError, WeightError."""
    hf = read_hf_config(folder)
    for key in ("quantization_config", "compression_config"):
        if hf.get(key):
            raise ConfigError(
                f"{folder} is quantized already ({key} in config.json); give the unquantized model"
            )
    try:
        headers = read_headers(folder, "safetensors")
    except WeightError as error:
        raise WeightError(f"{error}; quantize reads safetensors only") from error
    model_type, config = read_model_config(hf, "quire")
    with torch.device("meta"):
        model = MODELS.load(model_type).Model(config)
    if config.wrapper_type is not None:
        model.weights = cast(Weights, model.weights).in_wrapper()
    weights = cast(Weights, model.weights)
    shapes = [(name, header.shape) for name, header in headers.items()]
    if [name for name, _ in weights.converted_shapes(shapes)] != [name for name, _ in shapes]:
        raise ConfigError(
            f"checkpoints of {model_type} are converted while they load; quantize cannot write them"
        )
    leaves = {name: one for name, one in model.named_modules() if isinstance(one, ParamModule)}
    targets = assign_tensors(leaves, weights, shapes, tied=config.tied)
    tensors = [
        _source_tensor(name, header, leaves, targets.get(name), weights)
        for name, header in headers.items()
    ]
    for one in tensors:
        _check(one, model_type)
    return Checkpoint(folder, hf, model_type, config, model, tensors, headers)


def _source_tensor(
    name: str,
    header: TensorHeader,
    leaves: dict[str, ParamModule],
    target: ParamTarget | None,
    weights: Weights,
) -> SourceTensor:
    leaf = None if target is None else leaves[target.layer]
    role: Role = "other"
    if isinstance(leaf, WeightModule):
        role = cast(Role, leaf.role)
    path = weights.target(name).layer
    found = _LAYER.search(f"{path}.")
    number = None if found is None or target is None else int(found[1])
    layer = "" if target is None else target.layer
    return SourceTensor(name, header.dtype, header.shape, layer, role, target, number)


def _check(one: SourceTensor, model_type: str) -> None:
    """Raise ConfigError for a tensor that quantize cannot write."""
    if one.role == "experts" and len(one.shape) == 3:
        raise ConfigError(
            f"{one.name} holds the experts of a layer in one tensor ({model_type}); quantize "
            "reads checkpoints with a tensor for each expert"
        )
    if one.target is not None and one.target.transpose:
        raise ConfigError(
            f"{one.name} is stored [inputs, outputs] ({model_type}); quantize reads the reverse"
        )
    if one.target is not None and one.dtype not in DTYPES:
        raise ConfigError(f"{one.name} is {one.dtype}; quantize reads {', '.join(DTYPES)}")


def plain_reasons(
    checkpoint: Checkpoint,
    refusal: Refusal,
    ignore: Sequence[str],
    *,
    head: bool,
) -> dict[str, str]:
    """Return the matrices that stay unquantized, with the reason: tensor name -> reason.

    head: whether the output head is quantized. A layer fused of several matrices is quantized whole
    or not at all. Raises ConfigError for a pattern that no matrix matches, and if nothing is left.
    """
    rules = [_rule(pattern) for pattern in ignore]
    matrices = [one for one in checkpoint.tensors if one.is_matrix]
    for rule in rules:
        if not any(rule.matches(one.module) for one in matrices):
            names = ", ".join(sorted({one.module.rpartition(".")[2] for one in matrices}))
            raise ConfigError(
                f"--ignore {rule.pattern!r} matches no matrix; give a run of whole name components "
                f"({names}), or re: and a pattern"
            )
    reasons: dict[str, str] = {}
    for parts in _by_layer(matrices).values():
        why = _reason(parts, rules, refusal, head)
        if why is not None:
            reasons |= dict.fromkeys((one.name for one in parts), why)
    if len(reasons) == len(matrices):
        why = ", ".join(sorted(set(reasons.values()))[:3])
        raise ConfigError(f"nothing would be quantized: {why}")
    return reasons


def _rule(pattern: str) -> LayerRule:
    try:
        re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise ConfigError(f"--ignore {pattern!r} is not a pattern: {error}") from None
    return LayerRule(pattern, None)


def _by_layer(tensors: Iterable[SourceTensor]) -> dict[str, list[SourceTensor]]:
    found: dict[str, list[SourceTensor]] = {}
    for one in tensors:
        found.setdefault(one.layer, []).append(one)
    return found


def _reason(
    parts: Sequence[SourceTensor], rules: Sequence[LayerRule], refusal: Refusal, head: bool
) -> str | None:
    for one in parts:
        if any(rule.matches(one.module) for rule in rules):
            return f"ignored ({one.module})"
        if why := refusal(*one.shape, fused=len(parts) > 1):
            return why
    if parts[0].role == "head" and not head:
        return "output head"
    if sum(one.shape[0] for one in parts) < MIN_OUTPUTS:
        return f"fewer than {MIN_OUTPUTS} outputs"
    return None
