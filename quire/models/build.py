"""From a config and a checkpoint to a model that runs.

    describe on meta -> ranks (mesh) -> quantization method -> rotary tables, KV places
                     -> strict load, layer by layer, each packed at once -> eval

Model files know none of this; it is done to their modules from outside, by type and name.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from quire.config.facts import WeightFacts
from quire.config.json_file import reading
from quire.config.kv_layout import Group, group_layers
from quire.config.quantization import QuantFacts, agreed, read_quantization
from quire.distributed.collectives import Collectives, connect
from quire.distributed.mesh import Mesh
from quire.errors import ConfigError
from quire.layers import Attention, Experts, Leaf, Linear, Rope
from quire.models.base import Hf, LanguageModel, ModelConfig, field_of
from quire.quant import mxfp4
from quire.quant.base import Method, Weighted
from quire.quant.kv_scales import KvScales
from quire.quant.none import Method as Plain
from quire.registry import Registry
from quire.weights import files
from quire.weights.load import Filler
from quire.weights.mapping import Weights, assign, stored_shape
from quire.weights.stage import Stage

MODELS = Registry("quire.models")


def config_of(hf: Hf) -> tuple[str, ModelConfig]:
    """(model type, Config) of a parsed config.json. Raises ConfigError for what we cannot run."""
    model_type = field_of(hf, "model_type", str)
    if model_type not in (known := MODELS.names()):
        near = difflib.get_close_matches(model_type[:80], known, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise ConfigError(f"models of type {model_type!r:.80} are not built yet; {hint}")
    with reading("config.json"):
        quantized = read_quantization(hf)
        return model_type, replace(MODELS.load(model_type).Config.from_hf(hf), quantized=quantized)


def weight_facts(model_type: str, config: ModelConfig) -> WeightFacts:
    """Elements of the model's parameters, counted on a model without memory."""
    with torch.device("meta"):
        model = MODELS.load(model_type).Model(config)
    tied = cast(Weights, model.weights).tie if config.tied else {}
    matrices = vectors = linear = 0
    for name, leaf in model.named_modules():
        if not isinstance(leaf, Leaf) or name in tied:
            continue
        for param in leaf.params():
            shape = stored_shape(leaf.layout(param))
            size = math.prod(shape)
            vectors += size if len(shape) < 2 else 0
            matrices += size if len(shape) > 1 else 0
            smaller = isinstance(leaf, Experts) or (isinstance(leaf, Linear) and leaf.quantized)
            linear += size if len(shape) > 1 and smaller else 0
    return WeightFacts(matrices, vectors, linear)


def build(
    model_type: str,
    config: ModelConfig,
    *,
    folder: Path | None = None,
    load_format: str = "auto",
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    mesh: Mesh = Mesh(),  # noqa: B008 - an immutable value
    comm: Collectives | None = None,
    quant: str | None = None,
    groups: Sequence[Group] | None = None,
    progress: bool = True,
    seed: int = 0,
) -> LanguageModel:
    """Build a model and fill it.

    folder: where the checkpoint is; None only with load_format "dummy", which draws from `seed`.
    comm: how the ranks of the mesh talk, if not in the usual way.
    quant: how to quantize a plain checkpoint, e.g. "fp8"; the checkpoint's own way needs no word.
    groups: the KV layout, if the engine has decided on one.
    Raises WeightError if checkpoint and model differ in any tensor.
    """
    device = torch.device(device)
    with torch.device("meta"):
        model = MODELS.load(model_type).Model(config)
    if mesh.tp > 1:
        _cut(model, mesh, comm or connect(mesh))
    _equip(model, agreed(config.quantized, quant))
    place(model, groups or group_layers(config.attention_layers()))
    tables: dict[Any, Tensor] = {}
    for module in model.modules():
        if isinstance(module, Rope):
            module.fill(tables, device)
    fill(model, config, folder, load_format, dtype, device, progress=progress, seed=seed)
    return cast(LanguageModel, model.eval())


def fill(
    model: nn.Module,
    config: ModelConfig,
    folder: Path | None,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    progress: bool,
    seed: int,
) -> None:
    """Load or draw every parameter, packing as it goes. Also reloads a model already built."""
    weights = cast(Weights, model.weights)
    leaves = {name: m for name, m in model.named_modules() if isinstance(m, Leaf)}
    tie = weights.tie if config.tied else {}
    own = {name: leaf for name, leaf in leaves.items() if name not in tie}
    packed = {id(leaf) for leaf in own.values() if isinstance(leaf, Linear)}
    packed |= {id(leaves[source]) for source in tie.values()}
    method = Plain()

    def finish(leaf: Leaf) -> None:
        if id(leaf) in packed:
            owner = leaf.method if isinstance(leaf, Linear) else method
            owner.finish(cast(Weighted, leaf))
        elif isinstance(leaf, Experts):
            leaf.method.finish_bank(leaf)
        leaf.settle(dtype)

    if load_format == "dummy":
        Filler(own, finish, dtype=dtype, device=device).draw(seed)
    else:
        if folder is None:
            raise ConfigError(f"load_format {load_format!r} needs a folder with weights")
        layers = {name: m for name, m in model.named_modules() if isinstance(m, Attention)}
        scales = KvScales(layers, weights.strip)
        shapes = mxfp4.made_plain(scales.others(_shapes(folder, load_format)))
        targets = assign(leaves, weights, shapes, tied=config.tied)
        tensors = files.iterate(folder, progress, load_format=load_format)
        with Stage(device) if device.type == "cuda" else nullcontext() as stage:
            filler = Filler(own, finish, dtype=dtype, device=device, stage=stage)
            filler.fill(targets, mxfp4.unpacked(scales.taken(tensors), targets))
    for name, source in tie.items():
        leaves[name].put("weight", leaves[source].weight)


def place(model: nn.Module, groups: Sequence[Group]) -> None:
    """Tell every attention layer whose block tables it uses and which tensor of the cache."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    for g, group in enumerate(groups):
        for i, layer in enumerate(group.layers):
            layers[layer].group, layers[layer].place = g, i


def state_of(model: nn.Module, name: str) -> Tensor:
    """One parameter as a plain tensor, whatever form it is held in. Raises KeyError."""
    path, _, param = name.rpartition(".")
    module = dict(model.named_modules()).get(path)
    if not isinstance(module, Leaf) or param not in module.params():
        raise KeyError(f"no parameter {name!r}")
    value = getattr(module, param)
    return value.detach() if isinstance(value, Tensor) else value.unpack()


def _shapes(folder: Path, load_format: str) -> list[tuple[str, Sequence[int]]]:
    """(name, shape) of every tensor, so that a wrong checkpoint is refused before it is read."""
    if files.weight_files(folder, load_format)[0].suffix == ".safetensors":
        return [(name, header.shape) for name, header in files.headers(folder).items()]
    tensors = files.iterate(folder, False, load_format=load_format)  # mapped, so not read either
    return [(name, tensor.shape) for name, tensor in tensors]


def _cut(model: nn.Module, mesh: Mesh, comm: Collectives) -> None:
    for module in model.modules():
        if isinstance(module, Leaf):
            module.shard(mesh, comm)
        elif isinstance(module, Attention):
            module.shard(mesh)


def _equip(model: nn.Module, facts: QuantFacts | None) -> None:
    """Give linear layers and banks their method; what is fused is quantized whole or not."""
    if facts is None:
        return
    method = cast(Method, Registry("quire.quant").load(facts.method).Method(facts))
    for name, module in model.named_modules():
        if not isinstance(module, (Linear, Experts)) or not module.quantized:
            continue
        skipped = {facts.skips(names) for names in cast(Weights, model.weights).sources(name)}
        if len(skipped) > 1:
            raise ConfigError(f"config.json: some parts of {name} are quantized and some are not")
        if skipped == {False}:
            module.equip(method)
