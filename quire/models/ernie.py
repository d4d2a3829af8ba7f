"""ERNIE: BERT, whose embeddings may have a term for the kind of task; it is that of task 0.

Source: model_type "ernie", https://huggingface.co/nghuyong/ernie-3.0-base-zh; transformers
modeling_ernie.py
"""

from __future__ import annotations

from dataclasses import replace

from quire.models import bert
from quire.models._encoder import Encoder, EncoderConfig, encoder_sizes
from quire.models.base import Hf, field_of

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "tied": True,
    "bidirectional": True,
    "defaults": {"type_vocab_size": 2},
}


class Config(EncoderConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        types = [field_of(hf, "type_vocab_size", int)]
        if field_of(hf, "use_task_id", bool, default=False):
            types.append(field_of(hf, "task_type_vocab_size", int, default=3))
        return cls(**encoder_sizes(hf), types=tuple(types))


TABLES = (*bert.FUSED["embed_positions"], "task_type_embeddings")


class Model(Encoder):
    weights = replace(
        bert.Model.weights,
        strip=("ernie.", "bert."),
        fuse={**bert.FUSED, "embed_positions": TABLES},
    )
