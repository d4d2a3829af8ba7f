"""A tag for each call and for each parameter in an outer tag, in messages: Muse."""

from __future__ import annotations

from quire.text.tools._tag_calls import invoke_format

FORMAT = invoke_format(
    "muse",
    "atem:function_calls",
    prefix="atem:",
    marker="<atem:function_calls>",
    channels="muse",
)

detect = FORMAT.detect
