"""Transformers fallback: runs a causal language model class of transformers on quire's engine.

    hf_classes   config and class of a config.json; a skeleton without weights
    probe        one forward pass on the meta device: its attention calls, and what to refuse
    attention    the function that transformers' attention modules call
    replace      linear layers, embeddings and experts become quire's
    checkpoint   names and conversions of the checkpoint's tensors
    model        Model: the skeleton as a LanguageModel

transformers is imported here only, when a model is served this way.
"""

from quire.models.fallback.config import Config
from quire.models.fallback.model import Model

__all__ = ["Config", "Model"]
