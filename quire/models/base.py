"""Contract of a model file: `Config`, read from config.json by field, and the inputs of a step.

A model file holds `Config` (with `from_hf`) and `Model`, a quire.models._decoder.Decoder. It
describes shapes and data flow; build.py adds device, dtype, cache, ranks and quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import numpy as np
from torch import Tensor

from quire.config.memory.kv_layout import LayerFacts
from quire.config.memory.state_layout import StateFacts
from quire.config.quant.facts import QuantFacts
from quire.config.recurrent_layers import ATTENTION, BOTH
from quire.errors import ConfigError
from quire.kernels.state_rows import StateRows
from quire.layers import ACTIVATION_KINDS
from quire.layers.rope import TokenAngles
from quire.weights.mapping import Weights

if TYPE_CHECKING:
    from quire.attention.base import AttentionStep

__all__ = [
    "CarriedStates",
    "EncoderInput",
    "Hf",
    "HiddenTaps",
    "LabelTokens",
    "LanguageModel",
    "MediaEncoderConfig",
    "ModelConfig",
    "ReplaysEncoder",
    "ResultRows",
    "SourceInputs",
    "StateStep",
    "StepInputs",
    "Weights",
    "field_of",
    "sizes_of",
]

Hf = Mapping[str, Any]
"""A parsed config.json, or a section of it."""

T = TypeVar("T")
_REQUIRED: Any = object()


CarriedStates = tuple[Tensor, "Tensor | None"]
"""Between two layers: the output of the first [T, E], and the residual it is added to, if any."""


@dataclass(frozen=True, slots=True)
class HiddenTaps:
    """Hidden states that a forward pass is to keep, by layer number: [T, E] after that layer."""

    layers: frozenset[int]
    hidden: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResultRows:
    """Rows of a media encoder that are results by themselves, in place of those of the layers."""

    is_row: Tensor  # bool [T, 1], whether a token has a row
    rows: Tensor  # [T, width]; of other tokens any


@dataclass(frozen=True, slots=True)
class StateStep:
    """The states of a step's S rows. Recurrent layers read them and write them."""

    conv: Sequence[Tensor]  # per recurrent layer [N, channels, steps]
    recurrent: Sequence[Tensor]  # per recurrent layer [N, ...] float32
    rows: StateRows


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a forward pass. Tokens of all rows are packed; there is no batch axis.

    Where a token is in the cache is part of `attention`, so `positions` may differ from it.
    """

    token_ids: Tensor  # [T] int32
    positions: Tensor | TokenAngles
    """[T] int32, or [3, T] with a rotary position per axis (time, height, width); layers get the
    angles of the latter."""
    attention: AttentionStep
    inputs_embeds: Tensor | None = None  # [T, width]: replaces embed_tokens(token_ids)
    token_types: Tensor | None = None  # [T] int32: segment of each token (BERT); None: all 0
    carried: Tensor | None = None  # [T, E] of the pipeline stage before; None: the first stage
    taps: HiddenTaps | None = None
    result_rows: ResultRows | None = None
    deepstack: Tensor | None = None  # [T, levels * E]: added after the first layers, one each
    layer_inputs: Tensor | None = (
        None  # [T, layers * P]: further inputs of each layer, side by side
    )
    states: StateStep | None = None  # of a model with recurrent layers
    needed: Tensor | None = None
    """[R] int32: the tokens whose hidden states are read, of a model that selects_rows; None: all.
    The result is then [R, E]."""


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One image, video or recording. Tensors are on the device, under names of the family."""

    modality: str  # "image", "video" or "audio"
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class SourceInputs:
    """The inputs of an encoder. Positions of all sources are packed."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32, in the source
    starts: Tensor  # [S + 1] int32
    longest: int  # tokens of the longest source
    slots: Tensor  # [T] int64: where the cache has the keys and values of the output
    attention: AttentionStep
    media: tuple[EncoderInput, ...] = ()  # of the sources that have one
    media_rows: Tensor | None = None  # int64 [n]: the positions that take their rows, in order


class ReplaysEncoder(Protocol):
    """Runs forward passes of an encoder from CUDA graphs."""

    def size_for(self, patches: int) -> int | None:
        """The smallest size that has a graph and space for so many patches."""
        ...

    def run(self, size: int, patches: Tensor, arrays: Mapping[str, np.ndarray]) -> Tensor:
        """Run a size's graph. Returns its rows, which the next run overwrites."""
        ...


def run_to_end(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return cast(T, ended.value)


class SourceSwitch:
    """Whether layers that attend to sources run: where no row of a step has one they add nothing.

    A model that has such layers besides others has it as `source_switch`.
    """

    on = False


class EncodesMedia(Protocol):
    """A media encoder, as the runner calls it."""

    graphs: ReplaysEncoder | None

    @property
    def width(self) -> int:
        """Numbers of a row: E, times 1 + the levels of DeepStack; of results, those of a result."""
        ...

    @property
    def makes_results(self) -> bool:
        """Whether rows are results of the model, in place of embeddings of tokens."""
        ...

    @property
    def added_token(self) -> int | None:
        """The token to whose embedding rows are added; None: they take the place of embeddings."""
        ...

    @property
    def slices(self) -> int:
        """Parts of about equal time that its work can be divided into, at most."""
        ...

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """Rows [n, width] of each item, in the order of the positions that they stand for."""
        ...

    def encode_in_slices(
        self, items: Sequence[EncoderInput]
    ) -> Generator[None, None, list[Tensor]]:
        """The same; it stops between its slices, without CUDA graphs."""
        ...

    def max_rows(self, modality: str) -> int:
        """Rows of the largest item of a modality that the model was made for."""
        ...

    def graph_sizes(self) -> Sequence[int]:
        """Numbers of patches of which forward passes have graphs, ascending."""
        ...

    def graph_inputs(self, size: int) -> tuple[int, Mapping[str, np.ndarray]]:
        """Numbers of a patch, and arrays like those that a forward pass of a size reads."""
        ...

    def graph_forward(self, size: int, patches: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        """Rows of a forward pass that a graph has."""
        ...


class LanguageModel(Protocol):
    """A built model, as the runner calls it."""

    @property
    def embed_tokens(self) -> Callable[[Tensor], Tensor]:
        """Token ids [T] -> their embeddings, new: [T, width]. What `inputs_embeds` replaces."""
        ...

    @property
    def media_encoder(self) -> EncodesMedia | None:
        """What encodes images, video and audio, on the first pipeline stage; None: nothing does."""
        ...

    @property
    def is_recordable(self) -> bool:
        """Whether a step runs quire's ops only, so that a tape of them repeats it on a CPU."""
        ...

    def __call__(self, step: StepInputs) -> Tensor:
        """Hidden states of every token in the step: [T, E]."""
        ...

    def logits(self, hidden: Tensor, *, whole: bool = True) -> Tensor:
        """[R, E] -> [R, V]. Of the head "lm".

        whole: False: only this rank's strip of the vocabulary (quire.distributed.mesh.vocab_range).
        """
        ...

    def classify(self, pooled: Tensor) -> Tensor:
        """Logits of labels: [n, E] float32 -> [n, labels] float32. Of heads that classify."""
        ...


class EncoderDecoderModel(LanguageModel, Protocol):
    """A model whose decoder attends to the output of an encoder."""

    def encode(self, source: SourceInputs) -> None:
        """Run the encoder, and write what the decoder's cross attention reads to the cache."""
        ...


def field_of(
    hf: Hf,
    key: str,
    kind: type[T],
    *,
    default: T | None = _REQUIRED,
    one_of: Collection[Any] | None = None,
) -> T:
    """One typed field of a config.json; null counts as absent. Raises ConfigError by name."""
    value = hf.get(key)
    if value is None:
        if default is _REQUIRED:
            raise ConfigError(f"config.json: {key} is missing; it must be {_kind(kind)}")
        value = default
    elif kind is float and type(value) is int:
        value = float(value)
    elif type(value) is not kind:
        raise ConfigError(f"config.json: {key} is {value!r:.80}; it must be {_kind(kind)}")
    if one_of is not None and value not in one_of:
        allowed = ", ".join(str(option) for option in one_of)
        raise ConfigError(f"config.json: {key} is {value!r:.80}; supported: {allowed}")
    return cast(T, value)


def _kind(kind: type) -> str:
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    return names.get(kind, f"a {kind.__name__}")


HeadKind = Literal["lm", "none", "classify", "token_classify"]
"""What follows the last norm: logits of tokens; nothing; logits of labels for pooled states [n, E]
-> [n, labels]; the same for the state of each token."""


@dataclass(frozen=True, slots=True)
class LabelTokens:
    """A head that classifies by the logits that the output head gives to some tokens."""

    ids: tuple[int, ...]
    difference: bool  # the only logit is that of the second token minus that of the first


@dataclass(frozen=True, slots=True)
class MediaEncoderConfig:
    """The media encoder beside a text model."""

    family: str  # a file of quire.models.multimodal
    hf: Hf  # the wrapper's config.json; `text_config` is the text model's


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The config fields that the engine reads of every model. Each model's Config adds its own."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    max_len: int  # positions it can serve; the engine may set fewer (dataclasses.replace)
    norm_eps: float
    act: str  # a key of layers.KINDS
    tied: bool  # the output head is the token embedding
    dtype: str | None  # of the checkpoint, if config.json has it
    quantized: QuantFacts | None = None  # how its weights are stored; None: unquantized
    head: HeadKind = "lm"
    labels: int = 0  # of a head that classifies
    head_dtype: Literal["float32", "model"] = "float32"  # of a head that classifies
    label_tokens: LabelTokens | None = None  # of a head that is made of the output head
    wrapper_type: str | None = None  # of the multimodal model whose text half this is
    media: MediaEncoderConfig | None = None  # of that model's towers, if they are used
    windows: tuple[int | None, ...] = ()  # per layer; (): full attention in every layer
    embed_scale: float = 1.0  # of token embeddings
    norm_offset: float = 0.0  # added to the weights of the last norm
    logit_scale: float = 1.0  # of logits, before the cap
    logit_softcap: float | None = None
    bidirectional: bool = False  # a token attends to those after it too, and nothing is cached
    states: tuple[StateFacts, ...] = ()  # what each recurrent layer keeps, in their order
    kinds: tuple[str, ...] = ()
    """quire.config.recurrent_layers: of each layer; (): all have attention."""

    def usual_fields(self) -> dict[str, Any] | None:
        """Return config.json under the names that models share; None: it has them itself."""
        return None

    def window(self, layer: int) -> int | None:
        """Return the window of one layer; None if it covers every served length."""
        found = self.windows[layer] if self.windows else None
        return found if found is not None and found < self.max_len else None

    def attention_layers(self) -> tuple[LayerFacts, ...]:
        """Return what each attention layer stores in the cache; () if the model has no KV."""
        cached = 0 if self.bidirectional else self.layers
        own = [i for i in range(cached) if not self.kinds or self.kinds[i] in (ATTENTION, BOTH)]
        return tuple(LayerFacts(self.kv_heads, self.head_dim, self.window(i)) for i in own)


def sizes_of(hf: Hf, *, act: str = "hidden_act", tied: bool = False) -> dict[str, Any]:
    """The fields of ModelConfig that most config.json files name alike.

    act: the name of the activation's field. tied: the default of tie_word_embeddings.
    """
    heads = field_of(hf, "num_attention_heads", int)
    hidden = field_of(hf, "hidden_size", int)
    kv_heads = field_of(hf, "num_key_value_heads", int, default=heads)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads is {kv_heads}; it must divide "
            f"num_attention_heads, which is {heads}"
        )
    if hf.get("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size is {hidden}; it must be a multiple of "
            f"num_attention_heads, which is {heads}, unless head_dim is given"
        )
    return {
        "vocab": field_of(hf, "vocab_size", int),
        "hidden": hidden,
        "layers": field_of(hf, "num_hidden_layers", int),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": field_of(hf, "head_dim", int, default=hidden // heads),
        "mlp": field_of(hf, "intermediate_size", int),
        "max_len": field_of(hf, "max_position_embeddings", int),
        "norm_eps": field_of(hf, "rms_norm_eps", float, default=1e-6),
        "act": field_of(hf, act, str, default="silu", one_of=ACTIVATION_KINDS),
        "tied": field_of(hf, "tie_word_embeddings", bool, default=tied),
        "dtype": dtype_of(hf),
    }


def dtype_of(hf: Hf) -> str | None:
    """The dtype of the checkpoint, under its newer or its older name."""
    key = "dtype" if hf.get("dtype") is not None else "torch_dtype"
    return field_of(hf, key, str, default=None)
