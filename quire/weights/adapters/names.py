"""Names of tensors in adapter files: which module of the base model, and which of its tensors.

base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight
\\______________/ \\_____________________________/ \\__________/
  may be absent        module                       slot; an adapter's name may be inside
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Slot = Literal[
    "A", "B", "bias", "embedding_A", "embedding_B", "magnitude", "tokens", "whole", "whole_bias"
]
"""bias: that of B. tokens: rows of trainable tokens. whole: a module's own weight."""

WRAPPERS = ("base_model.model.", "module.")
"""Prefixes that training adds to the names of the base model, any number of them."""
MAX_NAME = 1024
_WRAPPING = frozenset(
    ("token_adapter", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
)
_SLOTS: dict[str, Slot] = {
    "lora_A": "A",
    "lora_B": "B",
    "lora_embedding_A": "embedding_A",
    "lora_embedding_B": "embedding_B",
    "lora_magnitude_vector": "magnitude",
    "trainable_tokens_delta": "tokens",
    "modules_to_save": "whole",
}
_BASE = "base_layer"


class AdapterTensorName(NamedTuple):
    """The parts of a name.

    level: of how many wrappers the module is the base_layer, less one; copied: it is a copy of a
    base weight.
    """

    module: str
    slot: Slot
    adapter: str = ""
    level: int = 0
    copied: bool = False


def parse_tensor_name(name: str) -> AdapterTensorName | None:
    """Return the parts of a tensor's name; None: adapters have no such tensors."""
    if len(name) > MAX_NAME:
        return None
    while prefix := next((one for one in WRAPPERS if name.startswith(one)), ""):
        name = name[len(prefix) :]
    parts = [part for part in name.split(".") if part not in _WRAPPING]
    if not parts:
        return None
    at = next((i for i, part in enumerate(parts) if part in _SLOTS), len(parts) - 1)
    path, marker, tail = parts[:at], parts[at], parts[at + 1 :]
    copied = marker not in _SLOTS and path[-1:] in ([_BASE], ["original_module"])
    slot = _SLOTS.get(marker)
    if slot is None or slot == "whole":
        last = tail.pop() if tail else marker
        if last not in ("weight", "bias"):
            return None
        slot = "whole" if last == "weight" else "whole_bias"
    elif tail and tail[-1] == "weight":
        tail.pop()
    elif tail and tail[-1] == "bias" and slot == "B":
        tail.pop()
        slot = "bias"
    if len(tail) > 1 or tail == ["bias"]:
        return None
    level = 0
    while path and path[-1] in (_BASE, "original_module"):
        path.pop()
        level += 1
    module = ".".join(part for part in path if part != _BASE)
    if not module:
        return None
    return AdapterTensorName(module, slot, tail[0] if tail else "", level, copied)
