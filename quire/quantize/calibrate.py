"""Runs the model layer by layer over texts, and quantizes each layer for what reaches it.

The states of all sequences between two layers are in memory, and one layer. Each layer runs twice:
as it is, to collect x.T @ x of the inputs x of its matrices, and quantized, for the next layer.

Axes: T tokens of a sequence, E hidden, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from quire.attention import mla, paged
from quire.attention.base import AttentionMetadata, AttentionStep
from quire.distributed.mesh import Mesh
from quire.errors import ConfigError
from quire.kernels.formats.weight_codes import WeightCodes
from quire.kernels.framework import lazy_fusion
from quire.kernels.quantizers.integers import quantize_integers
from quire.layers import Attention, Experts, Linear, ParamModule, WeightModule
from quire.models._decoder import Decoder
from quire.models.base import StepInputs
from quire.quantize import awq
from quire.quantize.calibrated import Calibrated, GramKey
from quire.quantize.errors import output_error, weight_error
from quire.quantize.gptq import MIN_IMPORTANCE, gptq
from quire.quantize.options import QuantizeOptions
from quire.quantize.schemes import Scheme
from quire.quantize.source import DTYPES, Checkpoint, SourceTensor
from quire.weights.weight_loader import WeightLoader

BLOCK = 16
"""Tokens of a block of the cache."""


class Calibrator:
    """States of the sequences, at the input of the next layer."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: QuantizeOptions,
        scheme: Scheme | None,
        sequences: list[list[int]],
        device: torch.device,
    ) -> None:
        """scheme: of integers, for GPTQ and AWQ. Raises ConfigError for other models than plain
        decoders."""
        require_decoder(checkpoint)
        self.checkpoint, self.options, self.scheme = checkpoint, options, scheme
        self.device = device
        self.dtype = torch.float32
        if device.type == "cuda":
            self.dtype = DTYPES[next(t.dtype for t in checkpoint.tensors if t.is_matrix)]
        self.model = cast(Decoder, checkpoint.model)
        self.model.prepare(self.dtype, device)
        self.leaves = {
            name: one for name, one in self.model.named_modules() if isinstance(one, ParamModule)
        }
        self._grams: dict[GramKey, Tensor] = {}
        self._ids = [torch.tensor(one, dtype=torch.int32, device=device) for one in sequences]
        self._states: list[tuple[Tensor, Tensor | None]] = []

    @torch.inference_mode()
    def embed(self) -> None:
        """Begin: look the tokens up."""
        with self._loaded("embed_tokens"):
            for ids in self._ids:
                step = StepInputs(ids, _positions(ids), cast(AttentionStep, None))
                x = self.model.embed(step)
                lazy_fusion.flush()
                self._states.append((x, None))

    @torch.inference_mode()
    def calibrate(
        self, number: int | None, is_quantized: Callable[[SourceTensor], bool]
    ) -> Calibrated:
        """Run one layer and quantize it. None: what follows the last one."""
        self._grams = {}
        if number is None:
            self._run_head()
            tensors = self._source_tensors(None)
        else:
            tensors = self._source_tensors(number)
            states = self._run(number, tensors)
        found = self._quantize(number, tensors, is_quantized)
        if number is None:
            return found
        if found.made:
            made = {name: self._stored_values(found, name) for name in tensors}
            states = self._run(number, made, collect=False)
        self._states = states
        return found

    @torch.inference_mode()
    def advance(self, number: int, tensors: Mapping[str, Tensor] | None) -> None:
        """Run a layer that is quantized already. tensors: its values; None: those of the source."""
        found = self._source_tensors(number) if tensors is None else tensors
        self._states = self._run(number, found, collect=False)

    def _stored_values(self, found: Calibrated, name: str) -> Tensor:
        if (codes := found.made.get(name)) is not None:
            return codes.dequantize()
        changed = found.changed.get(name)
        return self.checkpoint.tensor(name) if changed is None else changed

    # --- running ---

    def _source_tensors(self, number: int | None) -> dict[str, Tensor]:
        return {
            one.name: self.checkpoint.tensor(one.name)
            for one in self.checkpoint.tensors
            if one.number == number and one.target is not None and one.role != "embedding"
        }

    def _run(
        self, number: int, tensors: Mapping[str, Tensor], *, collect: bool = True
    ) -> list[tuple[Tensor, Tensor | None]]:
        """The states behind a layer with these tensors."""
        layer, out = self.model.layers[number], []
        with self._loaded(f"layers.{number}.", tensors), _GramHooks(self, number, collect):
            backend = self._backend(number)
            for ids, (x, res) in zip(self._ids, self._states):
                step = StepInputs(ids, _positions(ids), backend.plan(_metadata(len(ids), x.device)))
                x, res = layer(x.clone(), None if res is None else res.clone(), step)
                lazy_fusion.flush()
                out.append((x, res))
        return out

    def _run_head(self) -> None:
        """Collect the inputs of the output head."""
        with self._loaded("norm"):
            for x, res in self._states:
                hidden = self.model.finish(x.clone(), None if res is None else res.clone())
                lazy_fusion.flush()
                self.add("lm_head", "weight", 0, hidden)

    def _backend(self, number: int) -> Any:
        """The cache of the layer's attention, for one sequence."""
        facts = self.checkpoint.config.attention_layers()[number]
        blocks = -(-max(map(len, self._ids)) // BLOCK)
        shape = (blocks, facts.planes, facts.kv_heads, BLOCK, facts.head_dim)
        for module in self.model.layers[number].modules():
            if isinstance(module, Attention):
                module.group = module.place = 0
        cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return (mla if facts.latent else paged).Backend([cache])

    def _loaded(self, prefix: str, tensors: Mapping[str, Tensor] | None = None) -> Any:
        return _LoadedModules(self, prefix, tensors)

    def add(self, layer: str, param: str, expert: int, x: Tensor) -> None:
        """Add inputs [T, I] of a matrix to its gram."""
        wide = x.float()
        key = (layer, param, expert)
        gram = wide.t() @ wide
        self._grams[key] = self._grams[key] + gram if key in self._grams else gram

    # --- quantizing ---

    def _quantize(
        self,
        number: int | None,
        tensors: Mapping[str, Tensor],
        is_quantized: Callable[[SourceTensor], bool],
    ) -> Calibrated:
        algorithm = self.options.chosen_algorithm
        if algorithm == "rtn" or self.scheme is None:
            return Calibrated(grams=self._grams)
        unit = [one for one in self.checkpoint.tensors if one.name in tensors]
        scales = awq.LayerScales()
        if algorithm == "awq" and number is not None:
            folds = awq.folds_of(unit, self.checkpoint.config)
            there = {name: one.to(self.device) for name, one in tensors.items()}
            offset = awq.MODEL_TYPES[self.checkpoint.model_type]
            scales = awq.find_scales(
                folds,
                there,
                self._grams,
                is_quantized,
                partial(self._rounding(unit), clip=False),
                offset,
            )
        made: dict[str, WeightCodes] = {}
        changed: dict[str, Tensor] = dict(scales.norms)
        errors: dict[str, dict[str, float]] = {}
        for one in unit:
            weight = tensors[one.name].to(self.device)
            if is_quantized(one):
                made[one.name], errors[one.name] = self._choose(one, weight, scales)
            elif one.name in scales.rows:
                changed[one.name] = scales.scaled(one.name, weight).to(weight.dtype)
        return Calibrated(self._grams, made, changed, errors)

    def _rounding(self, unit: Iterable[SourceTensor]) -> Callable[..., WeightCodes]:
        scheme = cast(Scheme, self.scheme)
        dtype = DTYPES[next(one.dtype for one in unit if one.is_matrix)]

        def rounding(
            weight: Tensor, importance: Tensor | None = None, *, clip: bool = True
        ) -> WeightCodes:
            return quantize_integers(
                weight, bits=scheme.bits, group=scheme.group, symmetric=scheme.symmetric,
                scale_dtype=dtype, importance=importance, clip=clip,
            )  # fmt: skip

        return rounding

    def _choose(
        self, one: SourceTensor, weight: Tensor, scales: awq.LayerScales
    ) -> tuple[WeightCodes, dict[str, float]]:
        """The codes of a matrix with the least output error, and its errors."""
        scheme, options = cast(Scheme, self.scheme), self.options
        rounding = self._rounding([one])
        target = scales.scaled(one.name, weight)
        gram = self._grams.get(one.scale_group)
        candidates = [rounding(target)]
        if gram is None or not bool(gram.diagonal().any()):
            return candidates[0], {"weight_error": weight_error(weight, candidates[0])}
        columns = scales.columns.get(one.name)
        importance = gram.diagonal() / (1.0 if columns is None else columns.square())
        importance = importance / importance.mean() + MIN_IMPORTANCE
        candidates.append(rounding(target, importance))
        if options.chosen_algorithm == "gptq":
            candidates.append(
                gptq(
                    target, gram, scheme, DTYPES[one.dtype],
                    damp=options.damp, act_order=options.act_order,
                )
            )  # fmt: skip
        best, least, wide = candidates[0], float("inf"), weight.float()
        for codes in candidates:
            values = scales.unscaled(one.name, codes.dequantize())
            if (error := output_error(wide, values, gram)) < least:
                best, least = codes, error
        values = scales.unscaled(one.name, best.dequantize())
        difference = float((wide - values).square().sum() / wide.square().sum().clamp(min=1e-30))
        return best, {"weight_error": difference, "output_error": least}


class _LoadedModules:
    """While it is open, modules have their values; then they are empty again."""

    def __init__(self, to: Calibrator, prefix: str, tensors: Mapping[str, Tensor] | None) -> None:
        checkpoint = to.checkpoint
        self.owners = {
            name: one for name, one in to.leaves.items() if f"{name}.".startswith(prefix)
        }
        if not prefix.endswith("."):
            self.owners = {prefix: to.leaves[prefix]}
        self.targets = {
            one.name: one.target
            for one in checkpoint.tensors
            if one.target is not None and one.target.layer in self.owners
        }
        self.tensors = tensors
        self.to = to

    def __enter__(self) -> None:
        dtype = self.to.dtype

        def finish(leaf: ParamModule) -> None:
            if isinstance(leaf, WeightModule):
                leaf.method.process_after_load(leaf, dtype)
            leaf.after_load(dtype)

        loader = WeightLoader(self.owners, finish, dtype=dtype, device=self.to.device)
        found = self.tensors
        read = self.to.checkpoint.tensor
        loader.load(
            self.targets,
            ((name, read(name) if found is None else found[name]) for name in self.targets),
        )

    def __exit__(self, *_: object) -> None:
        for leaf in self.owners.values():
            leaf.shard(Mesh(), leaf.comm)


class _GramHooks:
    """While it is open, the inputs of a layer's matrices are added to their grams."""

    def __init__(self, to: Calibrator, number: int, collect: bool) -> None:
        self.to, self.number, self.collect = to, number, collect
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        if not self.collect:
            return
        for name, module in self.to.model.layers[self.number].named_modules():
            path = f"layers.{self.number}.{name}"
            if isinstance(module, Linear):
                self.handles.append(module.register_forward_pre_hook(self._linear(path)))
            elif isinstance(module, Experts):
                self.handles.append(module.register_forward_pre_hook(self._experts(path)))

    def __exit__(self, *_: object) -> None:
        for one in self.handles:
            one.remove()

    def _linear(self, path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            lazy_fusion.flush()
            self.to.add(path, "weight", 0, inputs[0])

        return add

    def _experts(self, path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            lazy_fusion.flush()
            bank = cast(Experts, module)
            x, ids, _ = inputs
            for expert in range(bank.experts):
                rows = x[(ids == expert).any(1)]
                if len(rows):
                    self.to.add(path, "gate_up_proj", expert, rows)
                    weight = cast(Tensor, bank.gate_up_proj)[expert]
                    self.to.add(path, "down_proj", expert, bank.gate(linear(rows, weight)))

        return add


def require_decoder(checkpoint: Checkpoint) -> None:
    """Raise ConfigError for a model that does not run as a chain of layers."""
    kind = type(checkpoint.model)
    plain = isinstance(checkpoint.model, Decoder) and all(
        getattr(kind, name) is getattr(Decoder, name)
        for name in ("forward", "run_layers", "embed", "finish")
    )
    layers = checkpoint.config.attention_layers()
    if not plain or len(layers) != checkpoint.layers:
        raise ConfigError(
            f"--data: models of type {checkpoint.model_type} are not run layer by layer; "
            "leave --data out"
        )


def _positions(ids: Tensor) -> Tensor:
    return torch.arange(len(ids), dtype=torch.int32, device=ids.device)


def _metadata(length: int, device: torch.device) -> AttentionMetadata:
    """One sequence from its first token on."""
    blocks = torch.arange(-(-length // BLOCK), dtype=torch.int32, device=device)
    return AttentionMetadata(
        q_starts=torch.tensor([0, length], dtype=torch.int32, device=device),
        contexts=torch.tensor([length], dtype=torch.int32, device=device),
        tables=(blocks[None],),
        slots=(torch.arange(length, device=device),),
        max_query=length,
        max_context=length,
        past=0,
    )
