"""Contract of a media encoder: the towers of a multimodal checkpoint, and what connects them.

A file of this folder has the name of the wrapper's model type (quire.config.model_identity.
media_family) and holds `Encoder`, a MediaEncoder. It describes shapes and data flow, as the file of
a text model does; build.py makes it a part of the model, `model.media_encoder`, and loads both.

    tensors of items (pixels, features) -> towers, packed over items -> projector -> rows [n, width]

Axes: n rows of an item, E hidden size of the text model, P patches of all items
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from quire.kernels.normalized_patches import normalized_patches
from quire.models.base import EncoderInput, Hf, ReplaysEncoder, Weights, field_of

__all__ = ["EncoderInput", "Hf", "MediaEncoder", "Weights", "field_of", "normalized_patches"]

GRAPH_TOKENS = (
    *range(256, 1024, 128), *range(1024, 2048, 256), *range(2048, 4097, 512)
)  # fmt: skip
"""Tokens of a tower up to which launches take the host as long as the work takes a GPU."""


class MediaEncoder(nn.Module):
    """Base of the encoders. They are whole on every rank, and only on the first pipeline stage.

    Parts that start from the constants of no checkpoint (rotary tables, say) are layers that
    quire.models._decoder.Decoder.prepare fills.
    """

    weights: Weights
    """The names of the tensors of towers and projectors in checkpoints."""
    width: int
    """Numbers of a row: E, times 1 + the levels of DeepStack; of results, those of a result."""
    modalities: tuple[str, ...]
    makes_results: ClassVar[bool] = False
    """Whether rows are results of the model, in place of embeddings of tokens."""
    added_token: int | None = None
    """The token to whose embedding rows are added; None: they take the place of embeddings."""
    patches_per_row = 4
    """Patches that a row is made of, at most; most families merge four."""
    bidirectional: bool = False
    """Whether tokens of an item attend to each other in both directions."""

    graphs: ReplaysEncoder | None = None
    """CUDA graphs of forward passes, which encode() may run in place of them."""

    @classmethod
    @abstractmethod
    def from_hf(cls, hf: Hf) -> MediaEncoder:
        """Build the encoder of a wrapper's config.json. Raises ConfigError.

        Its `text_config` has the fields of the text model, whatever the file calls that section.
        """

    @abstractmethod
    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """Rows [n, width] of each item, in the order of the positions that they stand for."""

    @property
    def slices(self) -> int:
        """Parts of about equal time that its work can be divided into, at most."""
        return 1

    def encode_in_slices(
        self, items: Sequence[EncoderInput]
    ) -> Generator[None, None, list[Tensor]]:
        """Rows of each item as encode() returns them; it stops between slices."""
        return self.encode(items)
        yield

    @abstractmethod
    def max_rows(self, modality: str) -> int:
        """Rows of the largest item of a modality that the model was made for."""

    def graph_sizes(self) -> Sequence[int]:
        """Numbers of patches of which forward passes have graphs, ascending; none by default."""
        return ()

    def graph_inputs(self, size: int) -> tuple[int, Mapping[str, np.ndarray]]:
        """Numbers of a patch, and arrays like those that a forward pass of a size reads."""
        raise NotImplementedError

    def graph_forward(self, size: int, patches: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        """Rows of a forward pass that a graph has: with as many kernels whatever the arrays hold.

        patches: [size, numbers of a patch].
        """
        raise NotImplementedError
