"""Replaces modules of a skeleton by quire's layers, and gives every other parameter an owner.

A linear layer or an embedding becomes quire's, so that loading, quantization and sharding are
those of native models. A module whose weight is read by other code keeps its class.

Axes: T tokens, I inputs, O outputs, V vocabulary, E hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import Embedding, Linear, LMHead, ParamModule
from quire.models.fallback.checkpoint import ModuleTarget
from quire.models.fallback.experts import replace_experts
from quire.models.fallback.fuse import (
    LinearPart,
    MergedLinear,
    proven_mlp,
    proven_norm,
    use_rotary_kernel,
)
from quire.models.fallback.probe import Probe
from quire.models.fallback.router_matrix import router_matrix
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout

SKELETON = "skeleton"
"""Name of the skeleton in Model."""


class AnyAxesLinear(Linear):
    """Linear layer over the last of any number of axes."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        y = super().forward(x.reshape(-1, self.inputs))
        lazy_fusion.flush()  # code of transformers reads it
        return y.view(*x.shape[:-1], y.shape[-1])


class AnyAxesLMHead(LMHead):
    """Output head over the last of any number of axes."""

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        """x [..., E] -> [..., V]."""
        y = super().forward(x.reshape(-1, self.inputs), whole)
        lazy_fusion.flush()
        return y.view(*x.shape[:-1], y.shape[-1])


class AnyAxesEmbedding(Embedding):
    """Embedding of ids in any number of axes."""

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., E]."""
        rows = super().forward(ids.reshape(-1).int())
        lazy_fusion.flush()
        return rows.view(*ids.shape, rows.shape[-1])


class HeldParams(ParamModule):
    """Owner of the parameters that a module of transformers has itself, and of its stored buffers.

    The values are set on that module, whose code reads them. Every rank has them whole.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...], float32: bool) -> None:
        super().__init__()
        self._held = (module,)  # no submodule: it is in the skeleton
        self._shapes = {name: tuple(getattr(module, name).shape) for name in names}
        self._buffers_held = {name for name in names if name in module._buffers}
        self._float32 = float32
        self._param_names.extend(names)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        if shape := self._shapes[param]:
            return unsharded_layout(shape)
        return (WeightShard((1,), (range(1),), broadcastable=True),)  # a number

    def init_spec(self, param: str) -> InitSpec:
        shape = self._shapes[param]
        if len(shape) < 2:
            return InitSpec(1.0 if param == "weight" else 0.0, 0.02)
        return InitSpec(0.0, shape[-1] ** -0.5)

    def dtype(self, param: str) -> torch.dtype | None:
        """Float32 where transformers keeps it; a buffer has the dtype it was made with."""
        if self._float32:
            return torch.float32
        if param in self._buffers_held:
            made: Tensor = getattr(self._held[0], param)
            return made.dtype
        return None

    def set_param(self, param: str, value: object) -> None:
        module = self._held[0]
        assert isinstance(value, Tensor), "a held parameter is a tensor"
        value = value.detach().view(self._shapes[param])
        if param in self._buffers_held:
            module._buffers[param] = value
        else:
            held = nn.Parameter(router_matrix(value), requires_grad=False)
            module._parameters[param] = held


def replace_modules(
    skeleton: Any, probe: Probe, keep_float32: frozenset[str]
) -> dict[str, ModuleTarget]:
    """Replace what quire has a layer for. Return path of a replaced module -> owner of its params.

    keep_float32: parts of paths of modules that transformers keeps in float32.
    """
    kept = {
        path
        for path, _ in skeleton.named_modules()
        if path in probe.direct or in_float32(path, keep_float32)
    }
    owners = _merge_mlps(skeleton, kept)
    owners |= _merge_linears(skeleton, probe, kept)
    quiet = probe.quiet if not _has_plain_linears(skeleton, kept) else frozenset()
    head, inputs = skeleton.get_output_embeddings(), skeleton.get_input_embeddings()
    for path, module in list(skeleton.named_modules()):
        if path in kept:
            continue
        new: nn.Module | None = None
        if type(module) is nn.Linear:
            new = _linear(module, is_head=module is head)
        elif module is inputs:
            new = _embedding(module)
        elif hasattr(module, "_apply_gate"):
            new = replace_experts(module)
        elif (norm := proven_norm(module)) is not None:
            norm.flushed = path not in quiet
            new = norm
        if new is not None:
            set_module(skeleton, path, new)
            owners[path] = ModuleTarget(f"{SKELETON}.{path}")
    use_rotary_kernel(skeleton, [call.module for call in probe.calls])
    return owners


def _has_plain_linears(skeleton: nn.Module, kept: set[str]) -> bool:
    """Whether a linear layer keeps its class, which does not wait for quire's kernels."""
    return any(type(m) is nn.Linear and path in kept for path, m in skeleton.named_modules())


def _merge_mlps(skeleton: nn.Module, kept: set[str]) -> dict[str, ModuleTarget]:
    owners = {}
    for path, module in list(skeleton.named_modules()):
        inner = {f"{path}.{name}" for name, _ in module.named_children()}
        found = None if inner & kept or path in kept else proven_mlp(module)
        if found is not None:
            merged, places = found
            set_module(skeleton, path, merged)
            for name, (layer, part) in places.items():
                owners[f"{path}.{name}"] = ModuleTarget(f"{SKELETON}.{path}.{layer}", part)
    return owners


def _merge_linears(skeleton: nn.Module, probe: Probe, kept: set[str]) -> dict[str, ModuleTarget]:
    owners = {}
    modules = dict(skeleton.named_modules())
    for paths in probe.together:
        linears: Any = [modules.get(path) for path in paths]
        if kept & set(paths) or any(type(one) is not nn.Linear for one in linears):
            continue
        if len({one.bias is None for one in linears}) > 1:
            continue
        parent, _, first = paths[0].rpartition(".")
        merged = MergedLinear(
            linears[0].in_features,
            [one.out_features for one in linears],
            linears[0].bias is not None,
        )
        name = f"quire_merged_{first}"
        skeleton.get_submodule(parent).add_module(name, merged)
        for i, path in enumerate(paths):
            set_module(skeleton, path, LinearPart(merged, i))
            owners[path] = ModuleTarget(f"{SKELETON}.{parent}.{name}", i)
    return owners


def in_float32(path: str, names: frozenset[str]) -> bool:
    """Whether transformers keeps the parameters of this path in float32."""
    return any(f".{name}." in f".{path}." for name in names)


def set_module(root: nn.Module, path: str, new: nn.Module) -> None:
    """Put a module at a path."""
    parent, _, name = path.rpartition(".")
    root.get_submodule(parent)._modules[name] = new


def _linear(module: nn.Linear, *, is_head: bool) -> Linear:
    bias = module.bias is not None
    new: Linear
    if is_head:
        new = AnyAxesLMHead(module.out_features, module.in_features, bias)
    else:
        new = AnyAxesLinear(module.in_features, module.out_features, bias)
    sizes = {"in_features": module.in_features, "out_features": module.out_features}
    new.__dict__.update(sizes)  # other code reads them
    return new


def _embedding(module: Any) -> nn.Module | None:
    """Return quire's embedding if a lookup is rows of the weight, times a number perhaps."""
    if not isinstance(module, nn.Embedding):
        return None
    rows = torch.randn(8, module.embedding_dim, device="cpu")
    trial = copy.copy(module)
    trial._parameters = {"weight": nn.Parameter(rows, requires_grad=False)}
    trial.padding_idx = None  # it changes gradients only
    with torch.inference_mode():
        found = trial(torch.arange(8, device="cpu")[None])[0]
    if found.shape != rows.shape:
        return None
    scale = float((found / rows).median())
    if not torch.allclose(found, rows * scale, rtol=1e-6, atol=1e-6):
        return None
    new = AnyAxesEmbedding(module.num_embeddings, module.embedding_dim, scale)
    sizes = {"num_embeddings": module.num_embeddings, "embedding_dim": module.embedding_dim}
    new.__dict__.update(sizes)  # other code reads them
    return new


def held_params(
    skeleton: nn.Module, keep_float32: frozenset[str]
) -> Iterator[tuple[str, HeldParams]]:
    """Yield (path, owner) of every module that has parameters or stored buffers of its own."""
    for path, module in skeleton.named_modules():
        if isinstance(module, ParamModule):
            continue
        names = [name for name, param in module._parameters.items() if param is not None]
        names += [
            name
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        if names:
            yield path, HeldParams(module, tuple(names), in_float32(path, keep_float32))
