"""Sizes of steps with prompts that are captured as CUDA graphs: arithmetic alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

CAPTURED_TOKENS = 1024
"""Steps with prompts are captured up to this size, whatever the model."""
MOST_CAPTURED_TOKENS = 4096
"""No step beyond this size is captured."""
LAYER_PRODUCTS = 1.1e11
"""Multiplications that a GPU does while the host launches the kernels of one layer: 0.32 ms at
690 TFLOP/s. Hosts of H200s take 0.2 to 0.7 ms."""


def max_captured_tokens(model: ModelFacts, tensor: int) -> int:
    """Return the tokens of the largest step with prompts that is captured.

    A small model computes steps of some thousand tokens faster than the host launches them.
    tensor: ranks over which each layer is sharded.
    """
    sizes = ((model.heads + one.kv_heads) * 2 * one.head_dim for one in model.layers)
    attention = max(sizes, default=4 * model.hidden)
    inner = model.top_k * model.expert_mlp or model.mlp
    tokens = int(LAYER_PRODUCTS * tensor / (model.hidden * (attention + 3 * inner)))
    return min(max(tokens, CAPTURED_TOKENS), MOST_CAPTURED_TOKENS)
