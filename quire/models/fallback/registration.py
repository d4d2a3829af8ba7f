"""Registration of quire's functions with transformers, under names of their own."""

from __future__ import annotations

import functools

from quire.models.fallback import attention, experts, probe


@functools.cache
def register() -> None:
    """Add the functions; models choose them by name, so others are as before."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(attention.NAME, attention.attend)
    AttentionInterface.register(probe.NAME, probe.record_attention)
    AttentionMaskInterface.register(probe.NAME, probe.make_mask)
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError:  # an older version: experts run as their class has them
        return
    ExpertsInterface.register(probe.NAME, experts.shape_only)
