"""H2OVL-Mississippi: InternVL in the form of the hub, with an image tiled twice.

Source: model_type "h2ovl_chat", https://huggingface.co/h2oai/h2ovl-mississippi-2b
"""

from __future__ import annotations

from quire.models.multimodal import internvl_chat


class Encoder(internvl_chat.Encoder):
    max_tiles = 13  # 6 and 6, and the thumbnail
