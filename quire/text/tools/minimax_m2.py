"""A tag for each call and for each parameter in an outer tag: MiniMax M2."""

from __future__ import annotations

from quire.text.tools._tag_calls import invoke_format

FORMAT = invoke_format(
    "minimax_m2",
    "minimax:tool_call",
    marker="minimax:tool_call",
    excluded_markers=("]<]minimax[>[",),
)

detect = FORMAT.detect
