"""What adapters can change in a model: its layers with weights, under the names of checkpoints."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from quire.layers import Embedding, Experts, LMHead, ParamModule
from quire.layers.linear import ClassifierLinear, Linear
from quire.weights.adapters.modules import AdapterModules, ModuleShape
from quire.weights.mapping import Weights

OTHER = "quire does not serve adapters of this kind of module; train one without it"


def adapter_modules(model: nn.Module, tied: bool) -> AdapterModules:
    """Return what adapters can change. tied: layers of `Weights.tie` have no weight of their own.

    The model may be on the meta device; sizes are those before it is cut over ranks.
    """
    weights = cast(Weights, model.weights)
    layers = {
        name: _shape(module)
        for name, module in model.named_modules()
        if isinstance(module, ParamModule)
    }
    tie = weights.tie if tied else {}
    return AdapterModules(
        weights,
        layers,
        {ours: of for ours, of in tie.items() if ours in layers and of in layers},
        labels_are_rows=getattr(model, "label_rows", None) is not None,
    )


def _shape(module: ParamModule) -> ModuleShape:
    if isinstance(module, Experts):
        return ModuleShape(
            "experts",
            (module.mlp, module.mlp, module.hidden),
            module.hidden,
            experts=module.experts,
            turned=module.transposed,
            interleaved=module.interleaved,
        )
    if isinstance(module, Embedding):
        return ModuleShape("embedding", (module.size,), module.vocab, scale=module.scale)
    if isinstance(module, Linear):
        outputs = tuple(out.rows for out in module.outputs)
        return ModuleShape(
            "head" if isinstance(module, (LMHead, ClassifierLinear)) else "linear",
            outputs,
            module.inputs,
            order=_row_order(module, sum(outputs)),
            has_bias="bias" in module.param_names(),
            head_dim=getattr(module, "head_dim", 0),
            refusal=module.adapter_refusal,
        )
    return ModuleShape("linear", (), 0, refusal=OTHER)


def _row_order(module: Linear, rows: int) -> torch.Tensor | None:
    """The model's order of the rows of a checkpoint's tensor of all parts; None: it is the same."""
    with torch.device("cpu"):
        given = torch.arange(rows)
        made = torch.cat(list(module.split_fused("lora_B", given)))
    return None if torch.equal(made, given) else made
