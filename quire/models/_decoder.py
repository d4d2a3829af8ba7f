"""Decoder skeleton: embeds the tokens, runs the layers and norms the result.

A model file gives the layer class and the names in the checkpoint; everything around the layers
is here: pipeline stages, vectors in place of token embeddings, taps of hidden states, heads. What
pooling needs is the result of `forward`: hidden states of every token, after the last norm.

Axes: T tokens in the step, R rows that are sampled, E hidden, F mlp width, V vocab
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.embedding import embedding
from quire.kernels.framework import lazy_fusion
from quire.layers import (
    Activation,
    AddRMSNorm,
    Attention,
    ColumnLinear,
    Embedding,
    Experts,
    GatedActivation,
    LMHead,
    Rope,
    RowLinear,
    SinusoidalEmbedding,
    UnitRMSNorm,
    add,
    scale,
    softcap,
)
from quire.layers.recurrent import SplitLinear
from quire.models._converted import LabelRows, replace_head
from quire.models.base import CarriedStates, ModelConfig, StepInputs, Weights

EMBEDDING_MODULES = ("media_encoder", "embed_tokens", "embed_positions", "embed_norm", "project_in")
"""What models have before their layers."""
HEAD_MODULES = ("norm", "final_layer_norm", "project_out", "lm_head")
"""What models have after their layers."""


WITH_CONSTANTS = (Attention, Experts, SinusoidalEmbedding, SplitLinear, UnitRMSNorm)
"""Layers with tensors that are neither in the checkpoint nor made at random."""


def place_constants(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Make what comes from no checkpoint: rotary tables, slopes of positions, unit weights,
    factors, where experts are."""
    tables: dict[Any, Tensor] = {}
    for module in model.modules():
        if isinstance(module, Rope):
            module.set_table(tables, device)
        elif isinstance(module, WITH_CONSTANTS):
            module.place_constants(dtype, device)


class MissingLayer(nn.Module):
    """Placeholder for a layer of another pipeline stage, so that names and numbers stay."""

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        return x, res


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up as one matrix."""

    def __init__(self, hidden: int, mlp: int, act: str, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = ColumnLinear(hidden, (mlp, mlp), bias)
        self.act = GatedActivation(act)
        self.down_proj = RowLinear(mlp, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))  # [T, 2F] -> [T, F] -> [T, E]


class PlainMLP(nn.Module):
    """c_proj(act(c_fc(x))), without a gate."""

    def __init__(self, hidden: int, mlp: int, act: str, bias: bool = True) -> None:
        super().__init__()
        self.c_fc = ColumnLinear(hidden, mlp, bias)
        self.act = Activation(act)
        self.c_proj = RowLinear(mlp, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))  # [T, E] -> [T, F] -> [T, E]


class PreNormLayer(nn.Module):
    """A layer with one norm before attention and one before the MLP.

    Subclasses set input_layernorm, self_attn, post_attention_layernorm and mlp.
    """

    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module

    def forward(
        self, x: Tensor, res: Tensor | None, step: StepInputs, needed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [T, E] is what the layer before adds to the residual; so is the first result. needed:
        [R] tokens whose results are read; None: all. Others have keys and values alone."""
        x, res = self.input_layernorm(x, res)
        x = self.self_attn(x, step)
        if needed is not None:
            assert res is not None
            x, res = select_rows(x, res, needed)
        x, res = self.post_attention_layernorm(x, res)
        return self.mlp(x), res


def select_rows(x: Tensor, res: Tensor, needed: Tensor) -> tuple[Tensor, Tensor]:
    """Return those of tokens `needed` [R] int32. x, res: [T, E]."""
    return embedding(needed, x), embedding(needed, res)


def spare_names(layers: int, spare: int) -> tuple[str, ...]:
    """Return the prefixes of checkpoint layers after the last one."""
    return tuple(f"layers.{layers + i}." for i in range(spare))


class Decoder(nn.Module):
    """Base of every model: embed_tokens -> layers -> norm, and lm_head or another head."""

    is_recordable = True
    label_rows: LabelRows | None = None
    score_name = ""  # of the module that classifies
    is_last_stage = True
    span_window: int | None = None  # tokens of an image see each other within it alone
    weights: Weights
    layer_class: ClassVar[Any]
    """Called with (config, layer number)."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.logit_scale, self.logit_softcap = c.logit_scale, c.logit_softcap
        self.embed_tokens = Embedding(c.vocab, c.hidden, scale=c.embed_scale)
        self.layers = self.build_layers(c)
        self.norm: nn.Module | None = AddRMSNorm(c.hidden, c.norm_eps, offset=c.norm_offset)
        self.lm_head = LMHead(c.vocab, c.hidden)

    @property
    def selects_rows(self) -> bool:
        """Whether the last layer can leave out tokens whose states are not read."""
        own, last = type(self), type(self.layers[-1])
        plain = own.forward is Decoder.forward and own.run_layers is Decoder.run_layers
        return plain and last.forward is PreNormLayer.forward

    def build_layers(self, c: ModelConfig) -> nn.ModuleList:
        """All layers, in order."""
        return nn.ModuleList(self.layer_class(c, i) for i in range(c.layers))

    def forward(self, step: StepInputs) -> Tensor:
        """Hidden states of every token in the step: [T, E], or of `needed` ones. Those of a stage
        before the last are what the next one carries on: the residual is added to them."""
        x, res = self.run_layers(step)
        if self.is_last_stage:
            return self.finish(x, res)
        return x if res is None else add(x, res)

    def run_layers(self, step: StepInputs) -> CarriedStates:
        """Run the layers of this pipeline stage."""
        x, res = self.embed(step) if step.carried is None else step.carried, None
        if isinstance(step.positions, Tensor) and step.positions.dim() == 2:
            ropes = (module for module in self.layers.modules() if isinstance(module, Rope))
            if (rope := next(ropes, None)) is not None:  # None: of a stage without attention
                step = replace(step, positions=rope.gather(step.positions))
        taps = step.taps
        further = () if step.deepstack is None else step.deepstack.split(x.shape[1], dim=1)
        for i, layer in enumerate(self.layers):
            is_last = step.needed is not None and i + 1 == len(self.layers)
            x, res = layer(x, res, step, step.needed) if is_last else layer(x, res, step)
            if i < len(further) and not isinstance(layer, MissingLayer):
                x = add(x, further[i].contiguous())
            if taps is not None and i in taps.layers:
                taps.hidden[i] = x if res is None else add(x, res)
        return x, res

    def embed(self, step: StepInputs) -> Tensor:
        """Vectors that the first layer reads: [T, E]."""
        if step.inputs_embeds is not None:
            return step.inputs_embeds
        return self.embed_tokens(step.token_ids)

    def finish(self, x: Tensor, res: Tensor | None) -> Tensor:
        """Hidden states as the output head reads them: [T, E]."""
        assert self.norm is not None
        return self.norm(x, res)[0]

    def logits(self, hidden: Tensor, *, whole: bool = True) -> Tensor:
        """[R, E] -> [R, V] for the rows that are sampled. whole: False: this rank's strip."""
        if self.logit_scale != 1.0:
            hidden = scale(hidden, self.logit_scale)  # narrower than the logits
        logits = self.lm_head(hidden, whole)
        return logits if self.logit_softcap is None else softcap(logits, self.logit_softcap)

    def classify(self, pooled: Tensor) -> Tensor:
        """Logits of labels: [n, E] float32 -> [n, labels] float32."""
        logits: Tensor = self.get_submodule(self.score_name)(pooled)
        lazy_fusion.flush()
        return logits

    def set_head(self, c: ModelConfig, names: Collection[str]) -> None:
        """Take the head of a config other than "lm", before weights are loaded.

        names: the tensors of the checkpoint; none: of dummy weights.
        """
        head = "lm_head"
        replace_head(self, c, names, head=head, inputs=self.lm_head.inputs, gone=(head,))

    def prepare(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make what comes from no checkpoint."""
        place_constants(self, dtype, device)

    def keep_stage(self, stage: range, *, tied: bool) -> None:
        """Drop what other pipeline stages have, before weights are loaded.

        The first stage embeds the tokens, the last one norms and has the head. tied: the head's
        weight is the embedding's, so the last stage has that too.
        """
        depth = len(self.layers)
        if (encoder := getattr(self, "media_encoder", None)) is not None:
            levels = encoder.width // self.embed_tokens.size - 1
            if stage.start == 0 and stage.stop < levels:
                raise ConfigError(
                    f"the encoder's features are added after the first {levels} layers, and the "
                    f"first pipeline stage has {stage.stop}; use fewer stages"
                )
        self.is_last_stage = stage.stop == depth
        for i in range(depth):
            if i not in stage:
                self.layers[i] = MissingLayer()
        gone = [f"layers.{i}" for i in range(depth) if i not in stage]
        sources = self.weights.tie.values() if tied and self.is_last_stage else ()
        unused = [name for name in EMBEDDING_MODULES if stage.start and name not in sources]
        if not self.is_last_stage:
            unused += [*HEAD_MODULES, *filter(None, [self.score_name])]
        for name in unused:
            if self._modules.get(name) is not None:
                setattr(self, name, None)
                gone.append(name)
        tie = {to: of for to, of in self.weights.tie.items() if to not in gone}
        absent = (*self.weights.absent, *(f"{name}." for name in gone))
        self.weights = replace(self.weights, absent=absent, tie=tie)
