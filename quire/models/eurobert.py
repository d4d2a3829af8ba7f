"""EuroBERT: Llama in both directions.

Its head for sequences may classify every token and average ("late"): the first matrix then belongs
to the hidden states, and what is pooled is their mean.

Source: model_type "eurobert", https://huggingface.co/EuroBERT/EuroBERT-210m; transformers
modeling_eurobert.py
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace

from torch import Tensor

from quire.layers import Activation, ClassifierLinear, Linear
from quire.models import llama
from quire.models.base import Hf, ModelConfig, field_of

CONVENTIONS = {
    "defaults": {"rms_norm_eps": 1e-5, "classifier_pooling": "late"},
    "bidirectional": True,
}
POOLING = ("late", "mean", "bos")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    late: bool  # the first matrix of the head for sequences is before pooling

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        base = llama.Config.from_hf(hf)
        pooling = field_of(hf, "classifier_pooling", str, default="late", one_of=POOLING)
        read = {one.name: getattr(base, one.name) for one in fields(base)}
        return cls(**read | {"bidirectional": True}, late=pooling == "late")


class Model(llama.Model):
    """The head of masked tokens has a bias if the MLP has."""

    weights = replace(llama.Model.weights, ignore=("*.rotary_emb.inv_freq",))

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.dense: Linear | None = None
        if c.head == "classify":
            float32 = c.head_dtype == "float32"
            self.late = c.late
            self.dense = (
                Linear(c.hidden, c.hidden, bias=True)
                if c.late
                else ClassifierLinear(c.hidden, c.hidden, bias=True, float32=float32)
            )
            self.act = Activation("gelu")

    def set_head(self, c: ModelConfig, names: Collection[str]) -> None:
        super().set_head(c, names)
        if self.dense is None:
            self.weights = replace(self.weights, absent=(*self.weights.absent, "dense."))

    def finish(self, x: Tensor, res: Tensor | None) -> Tensor:
        states = super().finish(x, res)
        if self.dense is None or not self.late:
            return states
        return self.act(self.dense(states))

    def classify(self, pooled: Tensor) -> Tensor:
        """Logits of labels: [n, E] float32 -> [n, labels] float32."""
        if self.dense is not None and not self.late:
            pooled = self.act(self.dense(pooled))
        return super().classify(pooled)
