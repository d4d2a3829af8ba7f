"""Contract of a head: a small model that reads hidden states of another, its target.

A file holds `read_config` and `Head`. The embedding and the output head are the target's where the
head's checkpoint has none.

Axes: n tokens, E hidden of the head, V vocabulary
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from quire.config.conventions import fill_defaults
from quire.errors import ConfigError, WeightError
from quire.kernels.argmax import argmax
from quire.kernels.framework import lazy_fusion
from quire.layers import Embedding, LMHead, ParamModule
from quire.models import llama
from quire.models._decoder import Decoder
from quire.models._rope import rotary_sizes_of
from quire.models.base import ModelConfig, StepInputs, field_of
from quire.weights.mapping import InitSpec, Weights, WeightShard, unsharded_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Shape of a head. Its files add their own fields."""

    layer: ModelConfig  # of its decoder layers; one without KV has attention_layers() == ()
    target: ModelConfig


class DraftHead(nn.Module):
    """Base of heads that run once for each token and draft of a row."""

    label_rows = None  # as models have them
    media_encoder = None
    weights: Weights
    taps: tuple[int, ...] = ()
    """Layers of the target whose outputs begin() reads."""
    selects_rows = False
    """Whether forward() leaves out tokens that are not `needed`: quire.models.base.StepInputs."""
    prepare: ClassVar[Any] = Decoder.prepare

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.token_map: TokenMap | None = None
        self.embed_tokens: Embedding | None = None
        self.lm_head: LMHead | None = None
        self.__dict__["attached"] = None  # the target, which is no module of this one

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check a checkpoint before it is read. Raises: ConfigError if it is of another model.

        shapes: of its tensors, by name.
        """
        own, given = self.config.layer.hidden, self.config.target.hidden
        if own != given and (self.own_embedding is None or self.own_head is None):
            raise ConfigError(
                f"speculative_config: the head has {own} hidden numbers and its checkpoint lacks "
                f"an embedding or an output head; the model's have {given}: the head was made for "
                "another model"
            )

    @property
    def module(self) -> nn.Module:
        """What has its weights: those of the target are not its own."""
        return self

    def attach(self, target: nn.Module) -> None:
        """Take the target's embedding and output head, where the head has none of its own."""
        self.__dict__["attached"] = target

    @property
    def own_embedding(self) -> Embedding | None:
        """The embedding of the head's checkpoint; None: it is the target's."""
        return self.embed_tokens

    @property
    def own_head(self) -> LMHead | None:
        """The output head of the head's checkpoint; None: it is the target's."""
        return self.lm_head

    @property
    def target(self) -> nn.Module:
        """The model whose states the head reads."""
        return cast(nn.Module, self.__dict__["attached"])

    def begin(self, hidden: Tensor, taps: Mapping[int, Tensor], at: Tensor) -> Tensor:
        """Return what the first pass reads of the target's tokens `at` [n]: [n, E].

        hidden: [T, E] after the last norm. taps: layer -> [T, E] after it.
        """
        return hidden.index_select(0, at)

    def forward(self, step: StepInputs, states: Tensor) -> Tensor:
        """Return the state behind each token, which a later pass reads: [n, E].

        step: token t[i + 1] at the position i of the state. states: [n, E] of begin(), or of the
        pass before.
        """
        raise NotImplementedError

    def head_input(self, states: Tensor) -> Tensor:
        """Return what the output head reads of states [n, E]."""
        return states

    def drafts(self, states: Tensor) -> Tensor:
        """Return the most probable token behind each state: [n, E] -> [n] int32."""
        head = self.own_head or self.__dict__["attached"].lm_head
        ids, _ = argmax(head(self.head_input(states), True))
        lazy_fusion.flush()
        return ids if self.token_map is None else self.token_map(ids)

    def embed_ids(self, ids: Tensor) -> Tensor:
        """Token ids [n] -> embeddings [n, E]."""
        table = self.own_embedding or self.__dict__["attached"].embed_tokens
        return cast(Tensor, table(ids))

    def embed(self, step: StepInputs) -> Tensor:
        """Return the embeddings of a step's tokens [n, E]: those given, as media have some."""
        given = step.inputs_embeds
        return self.embed_ids(step.token_ids) if given is None else given


class TokenMap(ParamModule):
    """Ids of a smaller vocabulary to those of the target: id + offsets[id]."""

    offsets: Tensor

    def __init__(self, size: int, vocab: int) -> None:
        """vocab: of the target."""
        super().__init__()
        self.size, self.vocab = size, vocab
        self.ids = torch.empty(0)  # until the offsets are loaded
        self.declare("offsets")

    def forward(self, ids: Tensor) -> Tensor:
        """[n] int32 -> [n] int32."""
        return self.ids.index_select(0, ids)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((self.size,))

    def dtype(self, param: str) -> torch.dtype | None:
        return torch.int64

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, 0.0)

    def after_load(self, dtype: torch.dtype) -> None:
        offsets = self.offsets.detach()
        ids = offsets + torch.arange(self.size, device=offsets.device)
        if not offsets.is_meta and not bool(((ids >= 0) & (ids < self.vocab)).all()):
            raise WeightError(
                f"d2t: the head drafts tokens {ids.min()} to {ids.max()}; those of the model are 0 "
                f"to {self.vocab - 1}"
            )
        self.ids = ids.int()


def read_layer_config(hf: Mapping[str, Any], target: ModelConfig) -> llama.Config:
    """Read the decoder layers of a head, which are Llama's or Qwen 3's. Raises ConfigError."""
    fields = fill_defaults({"num_hidden_layers": 1, "max_position_embeddings": 2048, **hf})
    bias = field_of(fields, "attention_bias", bool, default=False)
    window = field_of(fields, "sliding_window", int, default=None)
    kinds = field_of(fields, "layer_types", list, default=[])
    return llama.Config(
        **{**rotary_sizes_of(fields), "vocab": target.vocab},
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=field_of(fields, "mlp_bias", bool, default=False),
    )


def has_tensor(names: Collection[str], module: str) -> bool:
    """Whether a checkpoint has the weight of a module, under any prefix."""
    return any(f".{name}".endswith(f".{module}.weight") for name in names)


def check_size(shapes: Mapping[str, tuple[int, ...]], name: str, axis: int, wanted: int) -> None:
    """Check one axis of a tensor with this name under any prefix, if there is one. Raises
    ConfigError."""
    for own, shape in shapes.items():
        if f".{own}".endswith(f".{name}") and len(shape) > axis and shape[axis] != wanted:
            raise ConfigError(
                f"speculative_config: {own} has {shape[axis]} {'columns' if axis else 'rows'}, and "
                f"the head's config.json and the model ask for {wanted}: the head was made for "
                "another model"
            )


def side_by_side(*parts: Tensor) -> Tensor:
    """Return tensors [n, A], [n, B], ... as one: [n, A + B + ...]."""
    lazy_fusion.flush()  # they are read by torch
    return torch.cat(parts, dim=1)


def taps_before(layers: Sequence[int], depth: int) -> tuple[int, ...]:
    """Return the layers whose outputs are the inputs of `layers`. Raises ConfigError."""
    if not layers or not all(type(one) is int and 1 <= one <= depth for one in layers):
        raise ConfigError(
            f"config.json: eagle_aux_hidden_state_layer_ids is {list(layers)}; it must hold "
            f"numbers from 1 to {depth}, the layers of the model"
        )
    return tuple(one - 1 for one in layers)
