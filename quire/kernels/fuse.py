"""Ops on the GPU that are launched later than they are called, so that neighbours become one.

    rms_norm -> linear -> act_mul                   one row: a single kernel (gpu/gemv*.py)
                linear -> act_mul                   a few rows: a single kernel (gpu/few_rows.py)
    rms_norm -> moe_router                          few rows: the router's blocks normalise them
    rms_norm of q, of k -> rope -> kv_write         any rows: one pass from qkv to the cache
    ... -> paged_attention                          one query a sequence: attention in it as well
    rms_norm -> or act_mul -> linear over e4m3      many rows: made and quantized in one pass

An op that may begin or go on such a chain is held until the next op is called: it either joins or
has everything held launched first, in order. So at most five ops wait, and what an op returns is
allocated when it is called. Models do not know; whoever reads results with anything but ops calls
`flush` first. A result inside a chain is left out only when nothing but the chain refers to it,
which Python's reference counts and the storage's say; else the ops are launched one by one.

Not here: kernels. State: one queue a thread, held by it alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.kernels.fp8 import Fp8Weight


class Held(NamedTuple):
    """An op that has been called and not launched, its arguments in full."""

    op: str
    launch: Callable[..., None]
    outs: Any
    args: tuple[Any, ...]


class Queue:
    """The ops held by one thread: a chain in which each one reads what one before it returns."""

    def __init__(self) -> None:
        self.chain: list[Held] = []
        self.fusing = True
        self.quiet = False  # the kernel launched last leaves memory idle

    def put(self, op: str, launch: Callable[..., None], outs: Any, args: Any, kwargs: Any) -> None:
        """Take over an op whose results are allocated: launch it, hold it, or fuse it."""
        rule = _RULES.get(op) if self.fusing else None
        if rule is not None:
            rule(self, launch, outs, *args, **kwargs)
        else:
            self.alone(launch, outs, *args, **kwargs)
        if op in _QUIET:
            self.quiet = True

    def hold(self, op: str, launch: Callable[..., None], outs: Any, *args: Any) -> None:
        self.chain.append(Held(op, launch, outs, args))

    def alone(self, launch: Callable[..., None], outs: Any, *args: Any, **named: Any) -> None:
        """Launch an op that joins nothing and that nothing can join."""
        if self.chain:
            self.flush()
        self.quiet = False
        launch(outs, *args, **named)

    def take(self) -> list[Held]:
        """What is held, for whoever launches it now."""
        chain, self.chain, self.quiet = self.chain, [], False
        return chain

    def flush(self) -> None:
        """Launch what is held, as far as it is fused."""
        quiet, chain = self.quiet, self.take()
        if not chain:
            return
        last = chain[-1]
        if last.op == "linear":
            _launch_linear(chain, None, quiet)
        elif last.op == "kv_write":
            _launch_heads(chain)
        else:
            _one_by_one(chain)


class _Mine(threading.local):
    def __init__(self) -> None:
        self.queue = Queue()


_mine = _Mine()


def put(op: str, launch: Callable[..., None], outs: Any, args: Any, kwargs: Any) -> None:
    """Launch an op on the GPU, now or with its neighbours."""
    _mine.queue.put(op, launch, outs, args, kwargs)


def flush() -> None:
    """Launch what is pending. Before anything but an op reads what an op returned."""
    if _mine.queue.chain:
        _mine.queue.flush()


def drop() -> None:
    """Forget what is pending: whoever asked for it has failed."""
    _mine.queue.take()


@contextmanager
def off() -> Iterator[None]:
    """Within, this thread launches each op by itself: for tests and for finding a fault."""
    flush()
    queue = _mine.queue
    before, queue.fusing = queue.fusing, False
    try:
        yield
    finally:
        queue.fusing = before


def _one_by_one(chain: list[Held]) -> None:
    for held in chain:
        held.launch(held.outs, *held.args)


# -- one row: norm, product, activation -------------------------------------------------------


def _rms_norm(
    queue: Queue,
    launch: Callable[..., None],
    outs: tuple[Tensor, Tensor],
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    offset: float = 0.0,
) -> None:
    args = (x, weight, eps, residual, offset)
    if x.dim() == 3 and residual is None:  # of heads: the second may stand beside the first
        chain = queue.chain
        if chain and not (len(chain) == 1 and _is_head_norm(chain[0])):
            queue.flush()
        queue.hold("rms_norm", launch, outs, *args)
    elif x.dim() == 2 and x.is_contiguous() and (residual is None or residual.is_contiguous()):
        if queue.chain:
            queue.flush()
        queue.hold("rms_norm", launch, outs, *args)
    else:
        queue.alone(launch, outs, *args)


def _is_head_norm(held: Held) -> bool:
    return held.op == "rms_norm" and held.args[0].dim() == 3


def _linear(
    queue: Queue,
    launch: Callable[..., None],
    out: Tensor,
    x: Tensor,
    weight: Any,
    bias: Tensor | None = None,
) -> None:
    chain = queue.chain
    if _row_body(weight, x.shape[0]).takes(x, weight, bias):
        if chain and not (len(chain) == 1 and _leads_to(chain[0], x, weight)):
            queue.flush()
        queue.hold("linear", launch, out, x, weight, bias)
    else:
        queue.alone(launch, out, x, weight, bias)


def _leads_to(held: Held, x: Tensor, weight: object) -> bool:
    """Whether a product of x can take this op in."""
    quantized = x.shape[0] > 1 and isinstance(weight, Fp8Weight)
    if held.op == "rms_norm":
        return held.outs[0] is x and x.dim() == 2 and (x.shape[0] == 1 or quantized)
    return held.op == "act_mul" and held.outs is x and quantized


def _act_mul(queue: Queue, launch: Callable[..., None], out: Tensor, x: Tensor, kind: str) -> None:
    chain = queue.chain
    if chain and chain[-1].op == "linear" and chain[-1].outs is x:
        weight = chain[-1].args[1]
        if x.shape[0] == 1 or not isinstance(weight, Fp8Weight):
            quiet = queue.quiet
            _launch_linear(queue.take(), _gpu("gemv").Act(kind, out), quiet)
            return
    if chain:
        queue.flush()
    if x.shape[0] > 1:
        queue.hold("act_mul", launch, out, x, kind)
    else:
        launch(out, x, kind)


def _launch_linear(chain: list[Held], act: Any, quiet: bool) -> None:
    """A chain that ends in a product: of one row, of a few, or of quantized rows."""
    rows, weight = chain[-1].args[0].shape[0], chain[-1].args[1]
    if rows > 1 and isinstance(weight, Fp8Weight):
        _launch_quantized(chain)
        return
    norm = None
    if len(chain) == 2:
        (y, r), (inner, norm_weight, eps, residual, offset) = chain[0].outs, chain[0].args
        norm = _gpu("gemv").Norm(inner, norm_weight, eps, residual, offset, y, r)
    _row_body(weight, rows).launch(chain[-1].outs, *chain[-1].args, norm, act, quiet)


def _launch_quantized(chain: list[Held]) -> None:
    """Rows that a norm or an activation makes are quantized as they are made."""
    made = chain[0].op if len(chain) == 2 else None
    # an activation is known to its own entry, to the product's, and to nobody else
    if made is None or (made == "act_mul" and not _unread(chain[0].outs, 2)):
        _one_by_one(chain)
        return
    x, weight, bias = chain[1].args
    rows = _gpu("quantize_fp8").empty_rows(*x.shape, weight.block, x.device)
    if made == "act_mul":
        _gpu("quantize_fused").act_mul(rows, *chain[0].args)
    else:  # whoever else reads the normed rows finds them
        (y, r), (inner, norm_weight, eps, residual, offset) = chain[0].outs, chain[0].args
        made_r = None if residual is None else r
        _gpu("quantize_fused").norm(rows, inner, norm_weight, eps, residual, offset, y, made_r)
    _gpu("fp8_linear").product(chain[1].outs, *rows, weight, bias)


def _row_body(weight: object, rows: int) -> Any:
    """The kernels that multiply so many rows by such a weight, if they take them."""
    if rows == 1:
        return _gpu("gemv_fp8" if isinstance(weight, Fp8Weight) else "gemv")
    return _gpu("quantize_fused" if isinstance(weight, Fp8Weight) else "few_rows")


def _moe_router(
    queue: Queue,
    launch: Callable[..., None],
    outs: tuple[Tensor, Tensor],
    x: Tensor,
    weight: Tensor,
    routing: Any,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
) -> None:
    chain = queue.chain
    follows = len(chain) == 1 and chain[0].op == "rms_norm" and chain[0].outs[0] is x
    if follows and _gpu("moe_router").takes_norm(*chain[0].args):
        (y, r), args = queue.take()[0][2:]
        inner, norm_weight, eps, residual, offset = args
        norm = _gpu("moe_router").Norm(inner, norm_weight, eps, residual, offset, y, r)
        _gpu("moe_router").launch_normed(outs, weight, routing, bias, correction, norm)
    else:
        queue.alone(launch, outs, x, weight, routing, bias, correction)


# -- heads: norms, rotation, cache ------------------------------------------------------------


def _rope(
    queue: Queue,
    launch: Callable[..., None],
    outs: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool = False,
) -> None:
    chain = queue.chain
    if chain and not _norms_of(chain, q, k):
        queue.flush()
    queue.hold("rope", launch, outs, q, k, positions, cos_sin, interleaved)


def _norms_of(chain: list[Held], q: Tensor, k: Tensor) -> bool:
    """Whether what is held is the norm of these queries and the norm of these keys."""
    if len(chain) != 2 or not all(_is_head_norm(held) for held in chain):
        return False
    return chain[0].outs[0] is q and chain[1].outs[0] is k


def _kv_write(
    queue: Queue,
    launch: Callable[..., None],
    outs: None,
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    slots: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    chain = queue.chain
    if chain and chain[-1].op == "rope" and chain[-1].outs[1] is k:
        q_raw, k_raw, _, cos_sin, _ = chain[-1].args
        norms = chain[:-1]
        if norms:
            q_raw, k_raw = norms[0].args[0], norms[1].args[0]
        # a norm's result is known to its entry, to the rope's, and to nobody else
        if _gpu("norm_rope_write").takes(q_raw, k_raw, v, cos_sin, cache, slots) and all(
            _unread(held.outs[0], 2) for held in norms
        ):
            queue.hold("kv_write", launch, outs, k, v, cache, slots, k_scale, v_scale)
            return
    queue.alone(launch, outs, k, v, cache, slots, k_scale, v_scale)


class _Heads(NamedTuple):
    """What a chain of [norms,] rope and kv_write begins with."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    cos_sin: Tensor
    interleaved: bool
    norms: Any


def _heads_of(chain: list[Held]) -> _Heads:
    q, k, positions, cos_sin, interleaved = chain[-2].args
    norms = chain[:-2]
    if norms:
        q, k = norms[0].args[0], norms[1].args[0]
    norm = _gpu("norm_rope_write").HeadNorm
    made = tuple(norm(h.args[1], h.args[2], h.args[4]) for h in norms) or None
    return _Heads(q, k, chain[-1].args[1], positions, cos_sin, interleaved, made)


def _launch_heads(chain: list[Held]) -> None:
    _, _, cache, slots, k_scale, v_scale = chain[-1].args
    _gpu("norm_rope_write").launch(
        chain[-2].outs, *_heads_of(chain), cache, slots, (k_scale, v_scale)
    )


def _paged_attention(
    queue: Queue,
    launch: Callable[..., None],
    out: Tensor,
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    *features: Any,
    **named: Any,
) -> None:
    """Attention reads the chain's q and cache, and nobody reads q or k after it (AttentionStep)."""
    chain = queue.chain
    if chain and chain[-1].op == "kv_write" and chain[-2].outs[0] is q:
        body = _gpu("paged_attention_fused")
        heads, slots = _heads_of(chain), chain[-1].args[3]
        extras = body.extras_of(q, contexts, *features, **named)
        if extras is not None and chain[-1].args[2] is cache and body.takes(*heads, slots, cache):
            queue.take()
            body.launch(out, *heads, slots, cache, tables, contexts, extras)
            return
    queue.alone(launch, out, q, cache, tables, q_starts, contexts, *features, **named)


def _unread(result: Tensor, held: int) -> bool:
    """Whether only the `held` references of the chain lead to a result, and no view of it does."""
    if sys.getrefcount(result) - _OWN > held:
        return False
    handle = result.untyped_storage()  # a tensor and this handle: two uses
    return torch._C._storage_Use_Count(handle._cdata) <= 2


def _references(thing: object) -> int:
    return sys.getrefcount(thing)


def _own_references() -> int:
    """What asking adds to a count: it differs between versions of Python."""
    box = (object(),)
    return _references(box[0]) - 1


_OWN = _own_references()


def _gpu(name: str) -> Any:
    """A module of kernels, imported when first needed."""
    module = sys.modules.get(f"quire.kernels.gpu.{name}")
    return module if module is not None else import_module(f"quire.kernels.gpu.{name}")


_QUIET = {"paged_attention", "mla_attention"}
"""Ops that wait more than they read: the weights of what follows may come meanwhile."""

_RULES: dict[str, Callable[..., None]] = {
    "rms_norm": _rms_norm,
    "linear": _linear,
    "act_mul": _act_mul,
    "moe_router": _moe_router,
    "rope": _rope,
    "kv_write": _kv_write,
    "paged_attention": _paged_attention,
}
