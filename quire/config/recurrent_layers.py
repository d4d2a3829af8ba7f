"""Recurrent layers: which layers of a config.json have attention, and what the others keep.

The conventions of a family state where config.json says it, and the kind of its recurrent layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.config.conventions import conventions_of
from quire.config.memory.state_layout import StateFacts
from quire.errors import ConfigError

Json = Mapping[str, Any]

ATTENTION, RECURRENT, BOTH = "attention", "recurrent", "both"
"""What a layer has beside its MLP."""
MLP, EXPERTS = "mlp", "experts"
"""Kinds of a layer that is an MLP, or experts, alone. The layers beside it have no MLP then."""
_KINDS = {
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "conv": RECURRENT,
    "hybrid": BOTH,
    "mlp": MLP,
    "moe": EXPERTS,
    "*": ATTENTION,
    "M": RECURRENT,
    "-": MLP,
    "E": EXPERTS,
}
"""Names in layer_types, and letters in hybrid_override_pattern -> kinds."""


def layer_kinds(hf: Json) -> tuple[str, ...]:
    """Return the kind of each layer; (): all have attention. Raises ConfigError."""
    family = conventions_of(hf)
    if not family.recurrent:
        return ()
    count = _first(hf, "num_hidden_layers", "n_layer")
    given = hf.get("layer_types") or hf.get("layers_block_type")
    given = given or hf.get("hybrid_override_pattern") or ()
    if family.recurrent_layers == "all":
        kinds = [RECURRENT] * count
    elif family.recurrent_layers == "both":
        kinds = [BOTH] * count
    elif given or family.recurrent_layers == "pattern":
        unknown = sorted({one for one in given if one not in _KINDS})
        if unknown:
            raise ConfigError(
                f"config.json: kinds of layers are {', '.join(map(repr, unknown))}; supported: "
                f"{', '.join(_KINDS)}"
            )
        kinds = [_KINDS[one] for one in given]
    elif family.recurrent_layers == "interval":
        every = int(hf.get("full_attention_interval") or 4)
        kinds = [RECURRENT if (i + 1) % every else ATTENTION for i in range(count)]
    elif family.recurrent_layers == "period":
        every, first = _first(hf, "attn_layer_period"), _first(hf, "attn_layer_offset")
        kinds = [ATTENTION if i % every == first else RECURRENT for i in range(count)]
    else:
        own = hf.get("attn_layer_indices", hf.get("full_attn_idxs")) or ()
        kinds = [ATTENTION if i in own else RECURRENT for i in range(count)]
    if len(kinds) != count:
        raise ConfigError(
            f"config.json: the kinds of {len(kinds)} layers are stated, and num_hidden_layers is "
            f"{count}; there must be one for each"
        )
    return tuple(kinds)


def attention_numbers(hf: Json, count: int) -> list[int]:
    """Return the numbers of the layers with attention, of `count`."""
    kinds = layer_kinds(hf)
    return [i for i in range(count) if not kinds or kinds[i] in (ATTENTION, BOTH)]


def stage_shares(kinds: Sequence[str], stage: range) -> tuple[range, range]:
    """Return the numbers of a pipeline stage's layers: among the layers with attention, and among
    the recurrent ones. kinds: of all layers; (): all have attention."""
    if not kinds:
        return stage, range(0)
    attention, recurrent = (
        [sum(kind in (own, BOTH) for kind in kinds[:end]) for end in (stage.start, stage.stop)]
        for own in (ATTENTION, RECURRENT)
    )
    return range(*attention), range(*recurrent)


def has_attention(hf: Json) -> bool:
    """Whether any layer has attention."""
    kinds = layer_kinds(hf)
    return not kinds or not {ATTENTION, BOTH}.isdisjoint(kinds)


def count_mlps(hf: Json, others: int) -> int:
    """Return how many layers have an MLP or experts. others: of a model without recurrent
    layers."""
    kinds = layer_kinds(hf)
    if not kinds:
        return others
    if conventions_of(hf).recurrent_layers == "pattern":
        return kinds.count(MLP) + kinds.count(EXPERTS)
    return 0 if conventions_of(hf).recurrent_layers == "all" else len(kinds)


def count_experts(hf: Json, others: int) -> int:
    """Return how many layers have experts. others: where experts are no layer by themselves."""
    if conventions_of(hf).recurrent_layers == "pattern":
        return layer_kinds(hf).count(EXPERTS)
    return others


def state_facts(hf: Json) -> tuple[StateFacts, ...]:
    """Return what each recurrent layer keeps, in the order of layers; (): there is none."""
    kinds = layer_kinds(hf)
    count = sum(kind in (RECURRENT, BOTH) for kind in kinds)
    if not count:
        return ()
    return (_READERS[conventions_of(hf).recurrent](hf),) * count


def recurrent_weights(hf: Json, heads: int) -> int:
    """Return the elements of recurrent layers, and of what gates the attention beside them."""
    found = sum(one.weights for one in state_facts(hf))
    if conventions_of(hf).recurrent == "gated_delta_net":
        gated = layer_kinds(hf).count(ATTENTION)
        found += gated * _first(hf, "hidden_size") * heads * _first(hf, "head_dim")
    return found


def _mamba(hf: Json) -> StateFacts:
    hidden = _first(hf, "hidden_size", "d_model")
    inner = hf.get("mamba_expand", hf.get("expand"))
    width = int(inner * hidden) if inner else _first(hf, "intermediate_size")
    width = width if "mamba_expand" in hf else int(hf.get("intermediate_size") or width)
    state, kernel = _first(hf, "state_size", "mamba_d_state"), _kernel(hf)
    rank = hf.get("time_step_rank", hf.get("mamba_dt_rank"))
    rank = rank if isinstance(rank, int) else -(-hidden // 16)
    weights = 3 * hidden * width + width * (2 * rank + 3 * state + kernel)
    return StateFacts((width, kernel - 1), (width, state), weights, heads=width)


def _mamba2(hf: Json) -> StateFacts:
    heads = _first(hf, "mamba_n_heads", "mamba_num_heads", "num_heads")
    if hf.get("mamba_d_head") == "auto":
        inner = hf.get("mamba_d_ssm") or _first(hf, "mamba_expand") * _first(hf, "hidden_size")
        size = int(inner) // heads
    else:
        size = _first(hf, "mamba_d_head", "mamba_head_dim", "head_dim")
    groups = _first(hf, "mamba_n_groups", "n_groups")
    state = _first(hf, "mamba_d_state", "ssm_state_size", "state_size")
    inner, hidden = heads * size, _first(hf, "hidden_size")
    channels = inner + 2 * groups * state
    weights = hidden * (inner + channels + heads + inner) + channels * _kernel(hf)
    return StateFacts(
        (channels, _kernel(hf) - 1),
        (heads, size, state),
        weights,
        heads=heads,
        heads_are="heads",
        groups=groups,
        group_channels=2 * state,
    )


def _gated_delta_net(hf: Json) -> StateFacts:
    keys = _first(hf, "linear_num_key_heads") * _first(hf, "linear_key_head_dim")
    heads = _first(hf, "linear_num_value_heads")
    values = heads * _first(hf, "linear_value_head_dim")
    shape = (heads, _first(hf, "linear_key_head_dim"), _first(hf, "linear_value_head_dim"))
    weights = _first(hf, "hidden_size") * (2 * keys + 3 * values + 2 * heads)
    weights += (2 * keys + values) * _kernel(hf)
    conv, key_heads = (2 * keys + values, _kernel(hf) - 1), _first(hf, "linear_num_key_heads")
    return StateFacts(conv, shape, weights, heads=key_heads, heads_are="key heads")


def _short_conv(hf: Json) -> StateFacts:
    hidden, kernel = _first(hf, "hidden_size"), _first(hf, "conv_L_cache")
    return StateFacts((hidden, kernel - 1), (), hidden * (4 * hidden + kernel), heads=hidden)


def mlp_width(hf: Json, stated: int) -> int:
    """Return the width of an MLP: of LFM2 two thirds of the stated one, a factor, rounded up; of
    some a half."""
    own = hf.get("block_ff_dim") or stated
    if conventions_of(hf).mlp_joined:
        return int(own) // 2
    if conventions_of(hf).recurrent != "short_conv" or hf.get("block_auto_adjust_ff_dim") is False:
        return int(own)
    factor, multiple = (
        hf.get("block_ffn_dim_multiplier", 1.0),
        int(hf.get("block_multiple_of", 256)),
    )
    width = int(2 * own / 3)
    return -(-(width if factor is None else int(factor * width)) // multiple) * multiple


def _kernel(hf: Json) -> int:
    return _first(hf, "conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim")


def _first(hf: Json, *names: str) -> int:
    for name in names:
        if type(hf.get(name)) is int:
            return int(hf[name])
    raise ConfigError(f"config.json: {names[0]} is missing; it must be an integer")


_READERS = {
    "mamba": _mamba,
    "mamba2": _mamba2,
    "gated_delta_net": _gated_delta_net,
    "short_conv": _short_conv,
}
