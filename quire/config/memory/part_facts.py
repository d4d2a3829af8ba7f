"""Facts of parts beside the text model: what adapters, a media encoder and a drafter take of the
device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.config.memory.kv_layout import LayerFacts
from quire.config.memory.weight_facts import WeightFacts
from quire.config.quant.facts import QuantFacts


@dataclass(frozen=True, slots=True)
class AdapterNumbers:
    """Numbers that the slots of adapters have on one rank, in the model's dtype."""

    layers: int = 0  # for each rank of a slot, of all layers but experts
    experts: int = 0  # for each rank of a slot
    token: int = 0  # for each token of a slot whose row of embedding and output head is replaced
    classifiers: int = 0  # for each slot, of heads that classify
    scales: int = 0  # float32 numbers of each slot


PAGE_ROWS = 16
"""Rows of a page of the encoder cache, which is a multiple of it."""


@dataclass(frozen=True, slots=True)
class MediaEncoderFacts:
    """What reads images, video and audio for a text model."""

    width: int  # numbers of a row that it makes
    largest: Mapping[str, int]  # modality -> rows of its largest item
    widest: int  # inputs and outputs together of its widest layer
    bidirectional: bool = False  # tokens of an item attend to each other in both directions
    patches_per_row: int = 4  # that a row is made of, at most
    slices: int = 1  # that it can divide its work into, at most


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """What a drafter with weights takes."""

    layers: tuple[LayerFacts, ...]  # what each of its attention layers keeps of a token
    weights: WeightFacts
    quantization: QuantFacts | None
    rotary: int  # as in ModelFacts
    states: int  # numbers of the model's states that it reads, of each token of a step
    widest: int  # numbers of a token in its own pass
