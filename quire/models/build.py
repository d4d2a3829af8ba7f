"""Builds a runnable model from a config and a checkpoint.

    describe on meta -> ranks (mesh) -> quantization method -> rotary tables, KV places
                     -> strict load, layer by layer, each packed at once -> eval

Model files contain none of this; it is done to their modules from outside, by type and name.
"""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from quire.config.architectures import ENCODED_HALVES
from quire.config.conventions import fill_defaults
from quire.config.engine_config import ExpertPlacement
from quire.config.json_file import raise_as_config_error
from quire.config.memory.kv_layout import KVCacheGroup, group_layers
from quire.config.model_identity import media_family
from quire.config.quant.fp4 import GPT_OSS
from quire.config.quant.read import read_quantization, reconcile_quantization
from quire.config.recurrent_layers import stage_shares
from quire.distributed.collectives import (
    Collectives,
    ProcessGroupCollectives,
    SingleProcessCollectives,
    connect,
)
from quire.distributed.expert_placement import balance_experts, place_experts
from quire.distributed.mesh import Mesh
from quire.errors import ConfigError, WeightError
from quire.layers import Attention, Experts, Linear, ParamModule, RowLinear, WeightModule
from quire.layers.recurrent import RecurrentLayer
from quire.layers.weight_module import PLAIN
from quire.models._adapter_modules import adapter_modules
from quire.models._adapter_targets import refuse_adapters
from quire.models._converted import LabelRows
from quire.models._quant_methods import set_quant_methods
from quire.models._weight_report import describe_weights
from quire.models.base import (
    HeadKind,
    Hf,
    LabelTokens,
    LanguageModel,
    MediaEncoderConfig,
    ModelConfig,
    field_of,
)
from quire.models.multimodal._base import MediaEncoder
from quire.quant import mxfp4
from quire.quant.extra_tensors import ExtraTensors
from quire.quant.ggml_blocks import widen
from quire.quant.kv_scales import KvScaleLoader
from quire.registry import PluginRegistry
from quire.weights import files
from quire.weights.adapters.modules import AdapterModules
from quire.weights.gpu_loader import GpuLoader
from quire.weights.mapping import Weights, assign_tensors
from quire.weights.weight_loader import WeightLoader

log = logging.getLogger(__name__)

MODELS = PluginRegistry("quire.models", kind="model type")
MEDIA_ENCODERS = PluginRegistry("quire.models.multimodal")


FALLBACK = "transformers"
"""The model type of models that run through transformers."""


def read_model_config(
    hf: Hf,
    impl: str = "auto",
    code: Path | None = None,
    *,
    head: HeadKind = "lm",
    labels: int = 0,
    head_dtype: Literal["float32", "model"] = "float32",
    label_tokens: LabelTokens | None = None,
    language_model_only: bool = False,
) -> tuple[str, ModelConfig]:
    """(model type, Config) of a parsed config.json. Raises ConfigError for unsupported models.

    impl: "quire", "transformers", or "auto": quire's own model if there is one. code: the model's
    folder, if Python code in it may run. language_model_only: a multimodal model is served without
    its media encoder. head and the rest: see ModelConfig.
    """
    model_type = field_of(hf, "model_type", str)
    native = model_type in (known := MODELS.names())
    if impl == "quire" and not native:
        near = difflib.get_close_matches(model_type[:80], known, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else f"supported: {', '.join(known)}"
        raise ConfigError(
            f"models of type {model_type!r:.80} are not native to quire (model_impl=quire); {hint}"
        )
    with raise_as_config_error("config.json"):
        quantized = read_quantization(hf)
        if native and impl != FALLBACK:
            config = MODELS.load(model_type).Config.from_hf(fill_defaults(hf))
        else:
            config = _implementation(FALLBACK).Config.from_hf(hf, code)
        takes_rows = model_type in ENCODED_HALVES or (native and impl != FALLBACK)
        family = media_family(hf) if takes_rows and not language_model_only else None
        if family is not None:
            config = replace(config, media=_media_config(family, hf))
        model_type = model_type if native and impl != FALLBACK else FALLBACK
        return model_type, replace(
            _in_both_directions(config) if hf.get("is_causal") is False else config,
            quantized=quantized,
            wrapper_type=hf.get("wrapper_type"),
            head=head,
            labels=labels,
            head_dtype=head_dtype,
            label_tokens=label_tokens,
        )


def _media_config(family: str, hf: Hf) -> MediaEncoderConfig:
    text = {key: value for key, value in fill_defaults(hf).items() if key != "wrapper_config"}
    return MediaEncoderConfig(family, {**hf["wrapper_config"], "text_config": text})


def _in_both_directions(config: ModelConfig) -> ModelConfig:
    """Return the config of a decoder whose config.json has is_causal: false.

    A window w is then all tokens at a distance of at most w. Raises ConfigError.
    """
    if config.bidirectional:
        return config
    windows = tuple(w if w is None else w + 1 for w in config.windows)
    made = replace(config, bidirectional=True, windows=windows)
    if made.attention_layers():  # of their own
        raise ConfigError(
            "config.json: is_causal is false, but the attention of this model type runs in one "
            "direction only"
        )
    return made


def _implementation(model_type: str) -> Any:
    """Return the module with Config and Model of a type that read_model_config() returns."""
    if model_type == FALLBACK:
        return importlib.import_module("quire.models.fallback")
    return MODELS.load(model_type)


def build_model(
    model_type: str,
    config: ModelConfig,
    *,
    folder: Path | None = None,
    load_format: str = "auto",
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    mesh: Mesh = Mesh(),  # noqa: B008 - an immutable value
    comm: Collectives | None = None,
    experts: ExpertPlacement | None = None,
    redundant_experts: int | None = None,
    quant: str | None = None,
    stage: range | None = None,
    groups: Sequence[KVCacheGroup] | None = None,
    progress: bool = True,
    seed: int = 0,
) -> LanguageModel:
    """Build a model and fill it.

    folder: where the checkpoint is; None only with load_format "dummy", which draws from `seed`.
    comm: the collectives among the ranks of the mesh; None: the usual ones.
    experts: which experts each rank has, if mesh.ep > 1.
    redundant_experts: copies of experts in each layer whose experts move between ranks. None: they
    stay where they are.
    quant: how to quantize a plain checkpoint, e.g. "fp8"; a quantized checkpoint needs none.
    stage: numbers of the layers of this pipeline stage; None: all.
    groups: the KV layout, if the engine has decided on one.
    Raises WeightError if checkpoint and model differ in any tensor.
    """
    device = torch.device(device)
    model = _describe(model_type, config)
    headers: Mapping[str, files.TensorHeader] = {}
    if folder is not None and load_format != "dummy":
        headers = checkpoint_headers(folder, load_format)
    if config.head != "lm":
        model.set_head(config, list(headers))
    if stage is not None and any(layer.cross for layer in config.attention_layers()):
        raise ConfigError(f"{model_type} has an encoder: it cannot be cut into pipeline stages")
    if stage is not None:
        model.keep_stage(stage, tied=_is_tied(model, config, folder, load_format))
    if max(mesh.tp, mesh.ep) > 1:
        shard_model(model, mesh, comm or connect(mesh), experts, redundant_experts)
    quantized = reconcile_quantization(config.quantized, quant, len(config.attention_layers()))
    if _is_tied(model, config, folder, load_format):
        for source in cast(Weights, model.weights).tie.values():
            cast(WeightModule, model.get_submodule(source)).multiplied = True
    with torch.device("meta"):  # parameters have shapes only until they are filled
        set_quant_methods(model, quantized, headers)
        _set_stored_methods(model, headers)
    layers = config.attention_layers()
    if stage is not None:
        own, _ = stage_shares(config.kinds, stage)
        layers = layers[own.start : own.stop]
    assign_kv_tensors(model, groups or group_layers(layers))
    recurrent = [module for module in model.modules() if isinstance(module, RecurrentLayer)]
    for place, layer in enumerate(recurrent):
        layer.place = place
    model.prepare(dtype, device)
    config = replace(config, quantized=quantized)
    load_weights(model, config, folder, load_format, dtype, device, progress=progress, seed=seed)
    if quantized is not None:
        log.info("%s", describe_weights(model, quantized.quant_method))
    return cast(LanguageModel, model.eval())


def describe_media_encoder(config: ModelConfig) -> MediaEncoder | None:
    """Return a model's media encoder, whose parameters have shapes only; None: it has none."""
    if config.media is None:
        return None
    with torch.device("meta"):
        file = MEDIA_ENCODERS.load(config.media.family)
        return cast(MediaEncoder, file.Encoder.from_hf(config.media.hf))


def _describe(model_type: str, config: ModelConfig) -> Any:
    """Return a model whose parameters have shapes only."""
    with torch.device("meta"):
        model = _implementation(model_type).Model(config)
    model.media_encoder = describe_media_encoder(config)
    if config.media is not None:
        media = cast(Weights, model.media_encoder.weights)
        model.weights = cast(Weights, model.weights).in_wrapper(media)
    elif config.wrapper_type is not None:
        model.weights = cast(Weights, model.weights).in_wrapper()
    return model


def describe_adaptable(
    model_type: str,
    config: ModelConfig,
    folder: Path | None = None,
    load_format: str = "dummy",
    mesh: Mesh = Mesh(),  # noqa: B008 - an immutable value
    experts: ExpertPlacement | None = None,
) -> tuple[nn.Module, AdapterModules]:
    """Return a rank's model with shapes only, and what adapters can change in it.

    folder: of its checkpoint; None: the head is the usual one. Raises ConfigError if adapters can
    change nothing.
    """
    model = _describe(model_type, replace(config, media=None))
    if (kind := refuse_adapters(model)) is not None:
        raise ConfigError(f"LoRA adapters on {kind} are not supported yet: leave enable_lora out")
    if config.head != "lm":
        headers: Mapping[str, files.TensorHeader] = {}
        if folder is not None and load_format != "dummy":
            headers = checkpoint_headers(folder, load_format)
        model.set_head(config, list(headers))
    if mesh.size > 1:
        with torch.device("meta"):
            shard_model(model, mesh, SingleProcessCollectives(), experts)
    return model, adapter_modules(model, config.tied)


def load_weights(
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
    """Load or initialize every parameter, packing on the way. Also reloads a model already
    built."""
    weights = cast(Weights, model.weights)
    leaves = {name: m for name, m in model.named_modules() if isinstance(m, ParamModule)}
    tied = _is_tied(model, config, folder, load_format)
    tie = weights.tie if tied else {}
    own = {name: leaf for name, leaf in leaves.items() if name not in tie}
    names_of = {leaf: name for name, leaf in leaves.items()}

    def finish(leaf: ParamModule) -> None:
        if isinstance(leaf, WeightModule):
            try:
                leaf.method.process_after_load(leaf, dtype)
            except WeightError as error:
                raise WeightError(f"{names_of[leaf]}: {error}") from error
            leaf.crop()
        leaf.after_load(dtype)

    if load_format == "dummy" or device.type == "meta":
        WeightLoader(own, finish, dtype=dtype, device=device).fill_dummy(seed)
    else:
        if folder is None:
            raise ConfigError(f"load_format {load_format!r} needs a folder with weights")
        layers = {name: m for name, m in model.named_modules() if isinstance(m, Attention)}
        scales = KvScaleLoader(layers, weights, device)
        extra = ExtraTensors(own, weights)
        shapes = weights.converted_shapes(
            extra.shapes(
                scales.without_scales(
                    (name, header.shape)
                    for name, header in checkpoint_headers(folder, load_format).items()
                )
            )
        )
        made = config.quantized
        doing = "" if made is None or made.is_stored else f"quantizing to {made.quant_method}"
        read = files.iterate_tensors(
            folder, progress, load_format=load_format, doing=doing, widen=widen
        )
        tensors = weights.converted(extra.tensors(scales.extract_scales(read)))
        if (rows := cast("LabelRows | None", model.label_rows)) is not None:
            shapes, tensors = list(rows.shapes(shapes)), rows.tensors(tensors)
        targets = assign_tensors(leaves, weights, shapes, tied=tied)
        with GpuLoader(device) if device.type == "cuda" else nullcontext() as stage:
            filler = WeightLoader(own, finish, dtype=dtype, device=device, stage=stage)
            filler.load(targets, tensors)
        if config.quantized is not None and config.quantized.kv_cache == "int8":
            scales.require_all()
    for name, source in tie.items():
        leaves[name].set_param("weight", leaves[source].weight)


def _is_tied(model: nn.Module, config: ModelConfig, folder: Path | None, load_format: str) -> bool:
    """Whether layers share weights as `Weights.tie` states."""
    weights = cast(Weights, model.weights)
    if config.tied and weights.tie_if_missing and folder is not None and load_format != "dummy":
        names = checkpoint_headers(folder, load_format)
        return not {weights.target(name).layer for name in names} & weights.tie.keys()
    return config.tied


def assign_kv_tensors(model: nn.Module, groups: Sequence[KVCacheGroup], *, first: int = 0) -> None:
    """Set the block tables and the tensor of the cache that every attention layer uses.

    first: number of the model's first layer in the groups, which may have those of others too.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    for g, group in enumerate(groups):
        for i, layer in enumerate(group.layers):
            if first <= layer < first + len(layers):
                layers[layer - first].group, layers[layer - first].place = g, i


def checkpoint_headers(folder: Path, load_format: str) -> Mapping[str, files.TensorHeader]:
    """Dtype and shape of every tensor, so that a wrong checkpoint is refused before it is read."""
    if files.has_headers(files.weight_files(folder, load_format)[0]):
        return files.read_headers(folder, load_format)
    tensors = files.iterate_tensors(
        folder, False, load_format=load_format
    )  # mapped, so not read either
    return {
        name: files.TensorHeader(files.dtype_name(tensor.dtype), tuple(tensor.shape), folder)
        for name, tensor in tensors
    }


def shard_model(
    model: nn.Module,
    mesh: Mesh,
    comm: Collectives,
    experts: ExpertPlacement | None = None,
    redundant_experts: int | None = None,
) -> None:
    whole = getattr(model, "media_encoder", None)
    whole = set() if whole is None else set(whole.modules())
    for module in model.modules():
        if module in whole:
            continue
        _cut_rows_by_heads(module)
        if isinstance(module, Experts) and mesh.ep > 1:
            assert experts is not None, "whole experts on each rank need a placement"
            count, placement = module.experts, place_experts(module.experts, mesh.ep, experts)
            if redundant_experts:
                slots = (count + redundant_experts) // mesh.ep
                placement = balance_experts([1] * count, mesh.ep, slots)
            module.spread(placement, mesh.ep_rank, moves=redundant_experts is not None)
        if isinstance(module, ParamModule):
            module.shard(mesh, comm)
            if isinstance(module, Experts) and isinstance(comm, ProcessGroupCollectives):
                module.exchange = comm.dp_exchange or module.exchange
        elif isinstance(module, Attention):
            module.shard(mesh)


def _cut_rows_by_heads(parent: nn.Module) -> None:
    """Have the output layer beside a projection to query heads be cut as they are."""
    linears = [child for child in parent.children() if isinstance(child, Linear)]
    queries = [out for one in linears for out in one.outputs if out.kv_heads is not None]
    for one in linears:
        if queries and isinstance(one, RowLinear):
            one.heads = queries[0]


def _set_stored_methods(model: nn.Module, names: Iterable[str]) -> None:
    """Set the MXFP4 method on banks with GPT-OSS's tensors, before the method they have."""
    weights = cast(Weights, model.weights)
    stored = {weights.target(name)[:2] for name in names if name.endswith(f"_{GPT_OSS.codes}")}
    for name, module in model.named_modules():
        if not isinstance(module, Experts) or module.method.name == mxfp4.Method.name:
            continue
        if (name, f"{module.matrices[0]}_{GPT_OSS.codes}") in stored:
            then = None if module.method is PLAIN else module.method
            module.set_quant_method(mxfp4.Method(GPT_OSS, then))
