"""Model: a causal language model class of transformers, as the engine calls it.

The base model (layers and last norm) runs for every token of a step; the head, with whatever scale,
bias or cap its class has, for the sampled rows only. For that the class's own code runs twice on
different parts: once the base alone, once the whole with the base's result given.

Axes: T tokens in the step, R rows that are sampled, E hidden, V vocab
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import Attention, ParamModule, WeightModule
from quire.models._converted import LabelRows, replace_head
from quire.models._decoder import place_constants
from quire.models.base import ModelConfig, StepInputs
from quire.models.fallback import attention, hf_classes
from quire.models.fallback.attention import SharedAttention, StepCalls
from quire.models.fallback.checkpoint import Conversion, ModuleTarget, SkeletonWeights
from quire.models.fallback.config import Config
from quire.models.fallback.probe import Probe
from quire.models.fallback.registration import register
from quire.models.fallback.replace import SKELETON, held_params, replace_modules
from quire.models.fallback.rotary import fix_frequencies


class Model(nn.Module):
    """A skeleton with quire's layers in it."""

    is_recordable = False
    label_rows: LabelRows | None = None
    score_name = ""  # of the module that classifies

    def __init__(self, c: Config) -> None:
        super().__init__()
        register()
        self._config = c
        self._dtype = getattr(torch, c.dtype or "bfloat16")
        skeleton = self._build(self._dtype)
        tied = dict(getattr(skeleton, "all_tied_weights_keys", None) or {})
        float32 = _float32_names(skeleton, self._dtype)
        self.skeleton = skeleton
        ignored = skeleton._keys_to_ignore_on_load_unexpected or ()
        conversion = Conversion(skeleton)
        owners = replace_modules(skeleton, c.probe, float32)
        self._set_attention(c)
        self._held = nn.ModuleDict()
        for i, (path, held) in enumerate(held_params(skeleton, float32)):
            self._held[str(i)] = held
            owners[path] = ModuleTarget(f"_held.{i}")
        ties = self._ties(tied)
        conversion.set_copies(
            {name: source for name, source in tied.items() if _layer_of(name) not in ties}
        )
        self.weights = SkeletonWeights(
            ignore=tuple(ignored), tie=ties, owners=owners, conversion=conversion
        )
        self._base = skeleton.get_submodule(c.probe.base)
        self._without_keyword = tuple(
            {skeleton.get_submodule(call.module) for call in c.probe.calls if not call.keyword}
        )
        types = getattr(skeleton.config, "type_vocab_size", 0) or 0
        self._has_types = c.bidirectional and types > 1
        self._head: tuple[Any, ...] = (
            _head_of(skeleton, c.probe),
        )  # its modules are the skeleton's

    @property
    def embed_tokens(self) -> Callable[[Tensor], Tensor]:
        """Token ids [T] -> their embeddings, as the class takes `inputs_embeds`."""
        found: Callable[[Tensor], Tensor] = self.skeleton.get_input_embeddings()
        return found

    def forward(self, step: StepInputs) -> Tensor:
        """Hidden states of every token in the step: [T, E]."""
        calls = StepCalls(step.attention)
        given: dict[str, Any] = {"input_ids": step.token_ids[None]}
        if step.inputs_embeds is not None:
            given = {"inputs_embeds": step.inputs_embeds[None]}
            if getattr(self._base, "hidden_size_per_layer_input", 0):
                given["per_layer_inputs"] = self._base.get_per_layer_inputs(step.token_ids[None])
        positions = cast(Tensor, step.positions)
        positions = positions if positions.dim() == 2 else positions[None]
        lazy_fusion.flush()
        keyword: dict[str, Any] = {} if self._without_keyword else {attention.KEYWORD: calls}
        if not self._config.bidirectional:
            keyword["use_cache"] = False
        elif self._config.first_position:
            positions = positions + self._config.first_position
        if step.token_types is not None and self._has_types:
            keyword["token_type_ids"] = step.token_types[None].long()
        for module in self._without_keyword:
            module.__dict__[attention.KEYWORD] = calls
        try:
            found = self._base(**given, position_ids=positions, **keyword)
        finally:
            for module in self._without_keyword:  # it refers to the cache, and to the modules
                del module.__dict__[attention.KEYWORD]
        return found[0][0]

    def logits(self, hidden: Tensor, *, whole: bool = True) -> Tensor:
        """[R, E] -> [R, V] for the rows that are sampled."""
        assert whole, "the logits of one rank"
        lazy_fusion.flush()
        cache = {} if self._config.bidirectional else {"use_cache": False}
        found = self._head[0](inputs_embeds=hidden[None], **cache)
        return found[0][0]

    def classify(self, pooled: Tensor) -> Tensor:
        """Logits of labels: [n, E] float32 -> [n, labels] float32."""
        if self._config.bidirectional:  # the class's own head: of first tokens, or of each
            states = pooled.to(self._dtype)
            whole = self._config.head == "classify"
            found = self._head[0](inputs_embeds=states[:, None] if whole else states[None])[0]
            return (found if whole else found[0]).float()
        logits: Tensor = self.get_submodule(self.score_name)(pooled)
        lazy_fusion.flush()
        return logits

    def set_head(self, c: ModelConfig, names: Collection[str]) -> None:
        """Take the head of a config other than "lm": see Decoder.set_head."""
        if c.bidirectional and c.head != "none":
            if getattr(self._base, "pooler", None) is not None or c.label_tokens is not None:
                raise ConfigError(
                    f"the head that classifies of models of type {self._config.hf['model_type']!r} "
                    "is not served; their embeddings are"
                )
            return
        owners, conversion = self.weights.owners, self.weights.conversion
        assert conversion is not None, "made with the model"
        base, probe = f"{self._config.probe.base}.", self._config.probe
        outside = [
            path
            for path, _ in self.skeleton.named_modules()
            if path and not f"{path}.".startswith(base) and not base.startswith(f"{path}.")
        ]
        gone = {f"{SKELETON}.{path}" for path in outside}
        gone |= {owners[path].layer for path in outside if path in owners}
        output = self.skeleton.get_output_embeddings()
        head = next((path for path, one in self.skeleton.named_modules() if one is output), "")
        self._head = ()
        renamed = [conversion.rename(name)[0] for name in names]
        replace_head(
            self,
            c,
            renamed,
            head=f"{SKELETON}.{head}",
            inputs=probe.hidden,
            gone=[path for path in gone if path.rpartition(".")[0] not in gone],
        )

    def keep_stage(self, stage: range, *, tied: bool) -> None:
        raise ConfigError(
            "models that run through transformers cannot be cut into pipeline stages; use "
            "tensor_parallel_size"
        )

    def prepare(self, dtype: torch.dtype, device: torch.device) -> None:
        """Bring the buffers to the device, with the values that they have in this dtype."""
        owners = (one for one in self.modules() if isinstance(one, ParamModule))
        if any(one.mesh.size > 1 for one in owners):
            raise ConfigError(
                "models that run through transformers are not cut over several devices yet; use "
                "tensor_parallel_size=1, and leave enable_expert_parallel out"
            )
        if dtype != self._dtype:
            own = dict(self.skeleton.named_modules())
            for path, module in self._build(dtype).named_modules():
                kept = own[path]._buffers if path in own else {}
                kept.update({name: b for name, b in module._buffers.items() if name in kept})
            self._dtype = dtype
        for module in self.skeleton.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        if (encoder := getattr(self, "media_encoder", None)) is not None:
            place_constants(encoder, dtype, device)

    def _build(self, dtype: torch.dtype) -> Any:
        c = self._config
        config = hf_classes.read_config(c.hf, c.code)
        if c.bidirectional:
            config.num_labels = c.labels or 2
            kind = hf_classes.encoder_class(config, c.head)
        else:
            kind = hf_classes.model_class(config, c.hf, c.code)
        skeleton = hf_classes.build_skeleton(kind, config, dtype, attention.NAME)
        fix_frequencies(skeleton, c.max_len)
        return skeleton

    def _set_attention(self, c: Config) -> None:
        """Give each attention module its layers."""
        made: list[Attention | SharedAttention] = []
        of: dict[str, list[Attention | SharedAttention]] = {}
        for call in c.probe.calls:
            if call.source is None:
                layer: Attention | SharedAttention = Attention(
                    call.heads,
                    call.kv_heads,
                    call.head_dim,
                    scale=call.scale,
                    window=c.window_of(call),
                    softcap=call.softcap,
                )
            else:
                source = made[call.source]
                assert isinstance(source, Attention), "shared keys have an owner"
                layer = SharedAttention(source, scale=call.scale, softcap=call.softcap)
            made.append(layer)
            of.setdefault(call.module, []).append(layer)
        for path, layers in of.items():
            attention.set_layers(self.skeleton.get_submodule(path), layers)

    def _ties(self, tied: dict[str, str]) -> dict[str, str]:
        """Return layer <- layer, where a whole layer's weight is another's."""
        found = {}
        for name, source in tied.items():
            own, other = self._owner(name), self._owner(source)
            if own is not None and other is not None and own.param_names() == ("weight",):
                found[_layer_of(name)] = _layer_of(source)
        return found

    def _owner(self, name: str) -> WeightModule | None:
        """Return quire's layer that has a parameter named so in the skeleton."""
        path, _, param = name.rpartition(".")
        module = self.skeleton.get_submodule(path)
        return module if isinstance(module, WeightModule) and param == "weight" else None


def _layer_of(param: str) -> str:
    """Return the name in Model of the module that has a parameter of the skeleton."""
    return f"skeleton.{param.rpartition('.')[0]}"


class _GivenStates(nn.Module):
    """In place of the base model: its result is the `inputs_embeds` that it is called with."""

    def __init__(self, result: type[Any] | None) -> None:
        super().__init__()
        self._result = result

    def forward(self, *args: Any, inputs_embeds: Tensor, **unused: Any) -> Any:
        """Hidden states [1, R, E], as the base model returns them."""
        if self._result is None:
            return (inputs_embeds,)
        return self._result(last_hidden_state=inputs_embeds)


def _head_of(skeleton: Any, probe: Probe) -> Any:
    """Return the model with the same modules but for the base, whose result is given."""
    head = copy.copy(skeleton)
    module: Any = head
    *parents, name = probe.base.split(".")
    for parent in parents:
        module._modules = dict(module._modules)
        module._modules[parent] = copy.copy(module._modules[parent])
        module = module._modules[parent]
    module._modules = dict(module._modules)
    kind = None
    if probe.result is not None:
        source, _, class_name = probe.result.partition(":")
        kind = getattr(sys.modules[source], class_name)
    module._modules[name] = _GivenStates(kind)
    return head


def _float32_names(skeleton: Any, dtype: torch.dtype) -> frozenset[str]:
    """Return the parts of paths whose parameters transformers keeps in float32."""
    names = set(getattr(skeleton, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(skeleton, "_keep_in_fp32_modules", None) or ())
    return frozenset(names)
