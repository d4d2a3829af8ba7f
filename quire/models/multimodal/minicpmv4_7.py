"""MiniCPM-V 4.7: the vision tower of 4.6.

Source: model_type "minicpmv4_7", https://huggingface.co/openbmb/MiniCPM-V-4.7-1B; transformers
        modeling_minicpmv4_7.py
"""

from __future__ import annotations

from quire.models.multimodal import minicpmv4_6

Encoder = minicpmv4_6.Encoder
