"""Adapters of peft on tiny models, and what merging them changes in the model as quire loads it."""

import torch

from quire.config.model_identity import resolve_identity
from quire.models._adapter_modules import adapter_modules
from quire.models.build import build_model, read_model_config
from quire.weights.adapters.adapter import (
    EmbeddingDelta,
    ExpertsDelta,
    LinearDelta,
    TokenRows,
    WholeWeight,
)
from quire.weights.file_listing import load_json
from tests.cpu.models.peers import peer


def load(folder):
    """The model of a folder, in float32."""
    model_type, config = read_model_config(resolve_identity(load_json(folder, "config.json")))
    model = build_model(model_type, config, folder=folder, dtype=torch.float32, progress=False)
    return model, adapter_modules(model, config.tied)


class PeftCase:
    """A model of transformers with an adapter in folders: base, adapter, merged."""

    def __init__(self, root, variant, change=None, merge=True, **lora):
        from peft import LoraConfig, get_peft_model

        root.mkdir(parents=True, exist_ok=True)
        base = peer(variant, root / "base")
        torch.manual_seed(5)
        lora = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **lora}
        model = get_peft_model(base, LoraConfig(**lora))
        if change is not None:
            change(model)
        self.folder = root / "adapter"
        model.save_pretrained(self.folder)
        self.base, self.modules = load(root / "base")
        self.merged = None
        if merge:
            model.merge_and_unload().save_pretrained(root / "merged")
            self.merged, _ = load(root / "merged")
        self.model = model


def parts_of(module, tensor):
    """Rows of each part of a linear layer's weight."""
    return torch.split(tensor, [out.rows for out in module.outputs])


def weight_of(model, layer, part):
    """A part of a layer's weight as quire has loaded it; of a bank [X, O, I]."""
    module = model.get_submodule(layer)
    if hasattr(module, "gate_up_proj") and hasattr(module, "experts"):
        down = module.down_proj.dequantize()
        return [*module.gate_up_proj.dequantize().chunk(2, dim=1), down][part]
    weight = module.weight.dequantize()
    return parts_of(module, weight)[part] if hasattr(module, "outputs") else weight


def applied(delta, weight):
    """The weight with a delta."""
    weight = weight.clone()
    if isinstance(delta, WholeWeight):
        return delta.weight
    if isinstance(delta, TokenRows):
        weight[delta.indices.long()] = delta.rows
        return weight
    if isinstance(delta, EmbeddingDelta):
        made = weight + delta.a.t() @ delta.b
        return made if delta.magnitude is None else made * delta.magnitude / made.norm(dim=0)
    if isinstance(delta, ExpertsDelta):
        return weight + delta.b.mT @ delta.a
    assert isinstance(delta, LinearDelta)
    made = weight + delta.b.mT @ delta.a
    if delta.magnitude is None:
        return made
    return made * (delta.magnitude / made.norm(dim=1))[:, None]


def every_part(model, modules):
    """(layer, part) of all layers that adapters can change."""
    for layer, shape in modules.layers.items():
        if not shape.refusal:
            yield from ((layer, part) for part in range(len(shape.outputs)))


def assert_equals_merged(adapter, case):
    """Every part of every layer with its delta is what merging made of it."""
    changed = 0
    for layer, part in every_part(case.base, case.modules):
        weight, want = (weight_of(m, layer, part) for m in (case.base, case.merged))
        delta = adapter.deltas.get(layer, {}).get(part)
        if delta is None:
            torch.testing.assert_close(want, weight, rtol=0, atol=0)
            continue
        assert not torch.equal(want, weight), (layer, part)
        torch.testing.assert_close(applied(delta, weight), want, rtol=1e-5, atol=1e-5)
        changed += 1
    assert changed == sum(map(len, adapter.deltas.values()))
    return changed
