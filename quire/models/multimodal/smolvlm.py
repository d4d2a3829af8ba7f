"""SmolVLM 1 and 2: Idefics 3 with smaller parts.

Source: model_type "smolvlm", https://huggingface.co/HuggingFaceTB/SmolVLM2-2.2B-Instruct;
transformers modeling_smolvlm.py
"""

from quire.models.multimodal import idefics3

Encoder = idefics3.Encoder
