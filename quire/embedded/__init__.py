"""The model that ships with quire: a Qwen3-shaped checkpoint folder inside the package.

`LLM("embedded")` reads this folder like any other. The files are written by
`tools/embedded_model/`; what they can do, and what they cannot, is in MODEL_CARD.md.
"""

from pathlib import Path


def path() -> Path:
    """Return the folder that holds config.json, model.safetensors and the tokenizer."""
    return Path(__file__).resolve().parent
