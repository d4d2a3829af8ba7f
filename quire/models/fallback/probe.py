"""Probe: one forward pass of a skeleton on the meta device, which shows what the model does.

The record is the truth about the model: its attention calls in order, each with its sizes, scale,
window and soft cap; which keywords of the forward pass reach them; what the output head reads. A
config.json may state something else, or nothing. What the engine cannot serve exactly is refused
here, with the layer and the reason.

Axes: T tokens, H query heads, K kv heads, D size of keys, V size of values.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quire.errors import ConfigError
from quire.models.fallback.attention import KEYWORD
from quire.models.fallback.masks import MaskRecord, record_mask, window_of

NAME = "quire_probe"
"""Of the recording functions, in transformers' registries."""
TOKENS = 5
IGNORED_KEYWORDS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "layer_type",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "s_aux",
        "scaling",
        "shared_kv_states",
        "sliding_window",
        "softcap",
        "use_cache",
    }
)
"""Keywords of an attention call that are handled, or that change no result."""
RECURRENT = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid", "moe_mamba")
"""Layer types that keep a state from token to token."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention call of a forward pass."""

    module: str  # path of the attention module
    turn: int  # which of the module's calls
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    source: int | None  # index of an earlier call with the same keys and values; None: its own
    keyword: bool  # the step arrived as a keyword

    @property
    def head_dim(self) -> int:
        """Size in the cache, of keys and values alike."""
        return max(self.key_size, self.value_size)


@dataclass(frozen=True, slots=True)
class Probe:
    """What a forward pass does. Calls are in the order of the modules in the skeleton."""

    calls: tuple[AttentionCall, ...]
    base: str  # path of the module whose result the output head reads
    hidden: int  # numbers per token of that result
    result: str | None  # class of that result, as module:name; None: a tuple
    direct: frozenset[str]  # modules whose weights are read by other code than their own
    together: tuple[tuple[str, ...], ...]  # linear layers of one parent that read the same tensor
    quiet: frozenset[str]  # norms whose results only linear layers read


@dataclass
class _Recorder:
    """What the functions registered with transformers note during one forward pass."""

    paths: dict[nn.Module, str]
    both: bool = False  # an encoder: tokens see those after them
    calls: list[AttentionCall] = field(default_factory=list)
    given: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # q, k, v of calls
    turns: Counter[nn.Module] = field(default_factory=Counter)
    masks: list[MaskRecord] = field(default_factory=list)
    running: list[nn.Module] = field(default_factory=list)  # modules that are running, outer first
    ran: dict[nn.Module, None] = field(default_factory=dict)
    called: set[nn.Module] = field(default_factory=set)  # with an attention call inside
    owners: dict[int, set[str]] = field(default_factory=dict)  # id of a weight -> its modules
    direct: set[str] = field(default_factory=set)
    positional: dict[int, Tensor] = field(default_factory=dict)  # made of positions, by identity
    rotated: bool = False  # an attention call has had queries or keys made of positions
    inputs: dict[tuple[str, int], list[str]] = field(default_factory=dict)  # linears by input
    held: list[Any] = field(default_factory=list)  # tensors whose identities are in use
    norms: dict[int, str] = field(default_factory=dict)  # id of a norm's result -> its path
    loud: set[str] = field(default_factory=set)  # norms whose results other code reads
    top: list[tuple[nn.Module, Any]] = field(default_factory=list)  # called by the model itself


_current: list[_Recorder] = []
"""The recorder of the probe that runs; masks are made without keywords of the forward pass."""


def run_probe(skeleton: Any, max_len: int, *, both: bool = False) -> Probe:
    """Return what the skeleton does. Its buffers are copied. Raises ConfigError.

    max_len: positions that masks are compared for. both: of an encoder, whose tokens see those
    after them too.
    """
    model = copy.deepcopy(skeleton).to("meta")
    try:
        first = _forward(model, TOKENS, max_len, both)
    except _NeedsValues:
        model = _with_values(skeleton)
        first = _forward(model, TOKENS, max_len, both)
    second = _forward(model, TOKENS - 2, max_len, both)
    if first.calls != second.calls:
        raise ConfigError(
            f"{_name(model)} cannot be served: its attention depends on the number of tokens"
        )
    _check_layers(model, first)
    base = _find_base(model, first)
    order = {path: i for i, path in enumerate(first.paths.values())}
    ranked = sorted(range(len(first.calls)), key=lambda i: (order[first.calls[i].module], i))
    place = {old: new for new, old in enumerate(ranked)}
    calls = tuple(_with_source(first.calls[i], place) for i in ranked)
    return Probe(
        calls,
        *base,
        direct=frozenset(first.direct | second.direct),
        together=tuple(tuple(one) for one in first.inputs.values() if len(one) > 1),
        quiet=frozenset({*first.norms.values()} - first.loud),
    )


def check_mixing(skeleton: Any, max_len: int) -> None:
    """Raise ConfigError if tokens reach each other by other ways than attention.

    Attention calls of the probe return zeros. So a first token that is not a number makes others so
    only through a recurrence, a convolution or a shift, which the cache would have to keep.
    """
    model = _with_values(skeleton)
    whole = _states(model, _forward(model, TOKENS, max_len))

    def spoil(module: nn.Module, args: Any, rows: Tensor) -> Tensor:
        rows = rows.clone()
        rows[:, 0] = torch.nan
        return rows

    handle = model.get_input_embeddings().register_forward_hook(spoil)
    spoiled = _states(model, _forward(model, TOKENS, max_len))
    handle.remove()
    if any((b.isnan() & ~a.isnan())[..., 1:, :].any() for a, b in zip(whole, spoiled)):
        raise ConfigError(
            f"{_name(model)} cannot be served through transformers: tokens depend on "
            "earlier ones by other ways than attention, which the cache does not hold"
        )


class _NeedsValues(ConfigError):
    """The forward pass reads values of tensors, which the meta device does not have."""


def _with_values(skeleton: Any) -> Any:
    """Return a copy on the CPU, each of whose parameters is one number in all places."""
    model = copy.deepcopy(skeleton)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                one = torch.full((), 0.01, dtype=param.dtype, device="cpu").expand(param.shape)
                module._parameters[name] = nn.Parameter(one, requires_grad=False)
    return model


def _with_source(call: AttentionCall, place: Mapping[int, int]) -> AttentionCall:
    return call if call.source is None else replace(call, source=place[call.source])


def _name(model: Any) -> str:
    return f"{type(model).__name__} (model_type {model.config.model_type})"


def _forward(model: Any, tokens: int, max_len: int, both: bool = False) -> _Recorder:
    paths = {module: path for path, module in model.named_modules()}
    recorder = _Recorder(paths, both)
    device = next(model.parameters()).device
    ids = torch.zeros((1, tokens), dtype=torch.int64, device=device)
    positions = torch.arange(tokens, device=device)[None]
    for module, path in paths.items():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            recorder.owners.setdefault(id(module.weight), set()).add(path)
    _current.append(recorder)
    try:
        with (
            torch.no_grad(),
            _one_sequence(),
            _tracked(model, recorder),
            _Watch(recorder, positions),
        ):
            cache = {} if both else {"use_cache": False}
            model(
                input_ids=ids,
                position_ids=positions,
                **cache,
                **{KEYWORD: (recorder, max_len)},
            )
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        kind = _NeedsValues if device.type == "meta" else ConfigError
        raise kind(
            f"{_name(model)} cannot be served: its forward pass without a cache failed "
            f"({type(error).__name__}: {reason:.200})"
        ) from error
    finally:
        _current.pop()
    return recorder


def _one_sequence() -> Any:
    """Within, masks are made without a look at the positions, which have no values here."""
    from transformers import masking_utils

    return mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)


@contextmanager
def _tracked(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Within, the recorder knows which modules run."""

    def enter(module: nn.Module, args: Any) -> None:
        recorder.running.append(module)
        recorder.ran[module] = None
        if type(module) is nn.Linear and args:
            path = recorder.paths[module]
            recorder.held.append(args[0])
            key = (path.rpartition(".")[0], id(args[0]))
            members = recorder.inputs.setdefault(key, [])
            if path not in members:
                members.append(path)

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        recorder.running.pop()
        if type(module).__name__.endswith("RMSNorm") and isinstance(result, Tensor):
            recorder.held.append(result)
            recorder.norms[id(result)] = recorder.paths[module]
        if recorder.running == [model]:
            recorder.top.append((module, result))

    handles = [m.register_forward_pre_hook(enter) for m in model.modules()]
    handles += [m.register_forward_hook(leave) for m in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Watch(TorchFunctionMode):
    """Notes weights that other modules read, and every tensor that positions go into."""

    def __init__(self, recorder: _Recorder, positions: Tensor) -> None:
        super().__init__()
        self._recorder = recorder
        recorder.positional[id(positions)] = positions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        recorder = self._recorder
        result = func(*args, **(kwargs or {}))
        given = [*_tensors((*args, *(kwargs or {}).values()))]
        if getattr(func, "__name__", "") != "__get__":  # dtype, device and the like: no values
            for tensor in given:
                norm = recorder.norms.get(id(tensor))
                if norm is not None and type(recorder.running[-1]) is not nn.Linear:
                    recorder.loud.add(norm)
                owners = recorder.owners.get(id(tensor))
                if owners and recorder.paths[recorder.running[-1]] not in owners:
                    recorder.direct |= owners
        if any(id(tensor) in recorder.positional for tensor in given):
            recorder.positional.update({id(made): made for made in _tensors((result,))})
        return result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def record_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention function of the probe: notes the call, and returns a result of its shape."""
    recorder = _current[-1]
    path = recorder.paths[module]
    given = keywords.pop(KEYWORD, None)
    max_len = given[1] if given is not None else query.shape[2]
    unknown = {
        key
        for key, value in keywords.items()
        if key not in IGNORED_KEYWORDS and value is not None and value is not False
    }
    if unknown:
        raise ConfigError(
            f"{path} cannot be served: its attention depends on {', '.join(sorted(unknown))}, "
            "which paged attention does not have"
        )
    causal = keywords.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    mask = next((one for one in recorder.masks if _is_same(one.token, attention_mask)), None)
    if attention_mask is not None and mask is None:
        raise ConfigError(f"{path} cannot be served: it makes an attention mask of its own")
    if mask is None and bool(causal) == recorder.both:
        ways = "in one direction only" if causal else "in both directions"
        raise ConfigError(f"{path} cannot be served: it attends {ways}")
    window = keywords.get("sliding_window")
    if mask is not None:
        window = window_of(mask, path, max_len, recorder.both)
    scale = keywords.get("scaling")
    if isinstance(scale, Tensor) or isinstance(keywords.get("softcap"), Tensor):
        raise ConfigError(f"{path} cannot be served: the scale of its scores is computed")
    size = query.shape[-1]
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ConfigError(
            f"{path} cannot be served: it attends with queries {list(query.shape)} to keys "
            f"{list(key.shape)}, which are not those of the same tokens"
        )
    recorder.rotated |= any(id(one) in recorder.positional for one in (query, key))
    source = next(
        (
            i
            for i, (_, known_key, known_value) in enumerate(recorder.given)
            if _is_same(known_key, key) and _is_same(known_value, value)
        ),
        None,
    )
    recorder.calls.append(
        AttentionCall(
            module=path,
            turn=recorder.turns[module],
            heads=query.shape[1],
            kv_heads=key.shape[1],
            key_size=size,
            value_size=value.shape[-1],
            scale=float(size**-0.5 if scale is None else scale),
            window=None if window is None or window >= max_len else int(window),
            softcap=keywords.get("softcap"),
            sinks=keywords.get("s_aux") is not None,
            source=source,
            keyword=given is not None,
        )
    )
    recorder.given.append((query, key, value))
    recorder.turns[module] += 1
    recorder.called.update(recorder.running)
    shape = (1, query.shape[2], query.shape[1], value.shape[-1])
    return query.new_zeros(shape), None


def _is_same(one: Tensor, other: Any) -> bool:
    """Whether a tensor is another, or both are views of a third."""
    if not isinstance(other, Tensor):
        return False
    if one is other or other._base is one:
        return True
    places = [(x._base, x.storage_offset(), x.shape, x.stride()) for x in (one, other)]
    return one._base is not None and places[0][0] is places[1][0] and places[0][1:] == places[1][1:]


def make_mask(**given: Any) -> Any:
    """Mask function of the probe."""
    found = record_mask(given)
    _current[-1].masks.append(found)
    return found.token


def _check_layers(model: Any, recorder: _Recorder) -> None:
    """Raise ConfigError if a layer has no attention call, or keeps a state of its own."""
    kinds = getattr(model.config, "layer_types", None) or getattr(
        model.config, "layers_block_type", None
    )
    for i, kind in enumerate(kinds or ()):
        if kind in RECURRENT:
            raise ConfigError(
                f"{_name(model)} cannot be served through transformers: layer {i} ({kind}) keeps a "
                "recurrent state, which the cache does not hold"
            )
    if not recorder.calls:
        raise ConfigError(
            f"{_name(model)} cannot be served through transformers: its layers have attention of "
            "their own, which cannot be replaced"
        )
    stated = getattr(model.config, "position_embedding_type", "unstated")
    if not recorder.rotated and stated not in (None, "nope"):
        raise ConfigError(
            f"{_name(model)} cannot be served through transformers: it ignores the positions it is "
            "given, and counts them by a cache of its own"
        )
    for path, stack in model.named_modules():
        layers = list(stack) if isinstance(stack, nn.ModuleList) else []
        if not any(layer in recorder.called for layer in layers):
            continue
        for i, layer in enumerate(layers):
            if layer in recorder.ran and layer not in recorder.called:
                raise ConfigError(
                    f"{_name(model)} cannot be served through transformers: {path}.{i} "
                    f"({type(layer).__name__}) makes no attention call that can be replaced"
                )
    for module in recorder.ran:
        if isinstance(module, CONVOLUTIONS):
            raise ConfigError(
                f"{_name(model)} cannot be served through transformers: {recorder.paths[module]} "
                "is a convolution over tokens, whose state the cache does not hold"
            )
        if "Attention" in type(module).__name__ and module not in recorder.called:
            raise ConfigError(
                f"{_name(model)} cannot be served through transformers: {recorder.paths[module]} "
                f"({type(module).__name__}) has attention of its own, which cannot be replaced"
            )


def _find_base(model: Any, recorder: _Recorder) -> tuple[str, int, str | None]:
    """Return the path of the module that holds all layers, and width and class of its result."""
    module, result = _base_result(model, recorder)
    kind = type(result)
    name = None if kind is tuple else f"{kind.__module__}:{kind.__qualname__}"
    return recorder.paths[module], _first_tensor(result).shape[-1], name


def _states(model: Any, recorder: _Recorder) -> list[Tensor]:
    """Return q, k and v of all calls, and what the module that holds all layers has yielded.

    Each is [..., T, size].
    """
    called = [tensor for qkv in recorder.given for tensor in qkv]
    return [*called, _first_tensor(_base_result(model, recorder)[1])]


def _base_result(model: Any, recorder: _Recorder) -> tuple[nn.Module, Any]:
    for module, result in recorder.top:
        if module in recorder.called:
            states = _first_tensor(result)
            if isinstance(states, Tensor) and states.dim() == 3:
                return module, result
    raise ConfigError(f"{_name(model)} cannot be served: no part of it yields hidden states")


def _first_tensor(result: Any) -> Any:
    return result if isinstance(result, Tensor) else result[0]
