"""Lazy fusion launches GPU ops later than they are called, so that neighbours become one kernel.

    rms_norm -> linear -> act_mul              one row: one kernel (gpu/linear/gemv*.py)
                linear -> act_mul              a few rows: one kernel (gpu/linear/small_m_linear.py)
                linear -> rms_norm             a few rows: the product adds the residual, and the
                                               squares that the norm needs; the norm itself is in
                                               the next product (gpu/linear/small_m_bands.py)
     linear -> lora_linear                     up to 64 rows: around or inside the product
                                               (gpu/lora/adapted_linear.py)
           lora_linear -> act_mul              any rows: the first does it
  all_reduce -> rms_norm                       any rows: one kernel (gpu/peer_all_reduce.py)
    rms_norm -> moe_router                     few rows: the router's blocks normalise them
    rms_norm of q, of k -> rope -> kv_write    any rows: one pass from qkv to the cache
    ... -> paged_attention                     one query per sequence: attention in it as well
    rms_norm or act_mul -> linear over bytes   many rows: computed and quantized in one pass

An op that may be part of a chain is pending until the next op either joins it or causes its launch,
in order. Results are allocated at the call. Code that reads a result with anything but an op calls
`flush` first. A result inside a chain is dropped only if nothing else refers to it, by Python's
reference counts and the storage's. Each thread has a queue of its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.kernels.formats.fp8_weight import Fp8Weight
from quire.kernels.formats.int8_weight import Int8Weight


class PendingOp(NamedTuple):
    """An op that has been called and not launched, its arguments in full.

    known: what an earlier kernel computed of its result: of a norm, partial sums of squares.
    """

    op: str
    launch: Callable[..., None]
    outputs: Any
    args: tuple[Any, ...]
    known: Any = None


class FusionQueue:
    """Pending ops of one thread: a chain in which each op reads the result of one before it."""

    def __init__(self) -> None:
        self.pending: list[PendingOp] = []
        self.enabled = True
        self.memory_idle = False  # the kernel launched last leaves memory idle

    def submit(
        self, op: str, launch: Callable[..., None], outs: Any, args: Any, kwargs: Any
    ) -> None:
        """Launch, hold or fuse an op whose results are allocated."""
        rule = _FUSION_RULES.get(op) if self.enabled else None
        if rule is not None:
            rule(self, launch, outs, *args, **kwargs)
        else:
            self.launch_unfused(launch, outs, *args, **kwargs)
        if op in _MEMORY_IDLE_OPS:
            self.memory_idle = True

    def enqueue(self, op: str, launch: Callable[..., None], outs: Any, *args: Any) -> None:
        self.pending.append(PendingOp(op, launch, outs, args))

    def launch_unfused(
        self, launch: Callable[..., None], outs: Any, *args: Any, **named: Any
    ) -> None:
        """Launch an op that joins nothing and that nothing can join."""
        if self.pending:
            self.flush()
        self.memory_idle = False
        launch(outs, *args, **named)

    def pop_all(self) -> list[PendingOp]:
        """Return the pending ops, which the caller launches, and leave none."""
        pending, self.pending, self.memory_idle = self.pending, [], False
        return pending

    def flush(self) -> None:
        """Launch the pending ops, fused as far as they are."""
        memory_idle, pending = self.memory_idle, self.pop_all()
        if not pending:
            return
        last = pending[-1]
        if last.op == "linear":
            _launch_linear(pending, None, memory_idle)
        elif last.op == "lora_linear":
            _launch_lora_linear(pending, None, memory_idle)
        elif last.op == "kv_write":
            _launch_norm_rope_write(pending)
        elif last.op == "rms_norm" and pending[0].op == "all_reduce":
            _launch_normed_sum(pending)
        else:
            _launch_each(pending)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.queue = FusionQueue()


_thread_state = _ThreadState()


def submit(op: str, launch: Callable[..., None], outs: Any, args: Any, kwargs: Any) -> None:
    """Launch an op on the GPU, now or with its neighbours."""
    _thread_state.queue.submit(op, launch, outs, args, kwargs)


def flush() -> None:
    """Launch the pending ops. Needed before anything but an op reads the result of an op."""
    if _thread_state.queue.pending:
        _thread_state.queue.flush()


def discard() -> None:
    """Drop the pending ops of a step that has failed."""
    _thread_state.queue.pop_all()


@contextmanager
def disabled() -> Iterator[None]:
    """Within, this thread launches each op by itself, for tests and for fault isolation."""
    flush()
    queue = _thread_state.queue
    before, queue.enabled = queue.enabled, False
    try:
        yield
    finally:
        queue.enabled = before


def _launch_each(chain: list[PendingOp]) -> None:
    for held in chain:
        held.launch(held.outputs, *held.args)


# -- one row: norm, product, activation -------------------------------------------------------


def _fuse_rms_norm(
    queue: FusionQueue,
    launch: Callable[..., None],
    outs: tuple[Tensor, Tensor],
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    offset: float = 0.0,
) -> None:
    args = (x, weight, eps, residual, offset)
    if x.dim() == 3 and residual is None:  # of heads: that of k may follow that of q
        chain = queue.pending
        if chain and not (len(chain) == 1 and _is_head_norm(chain[0])):
            queue.flush()
        queue.enqueue("rms_norm", launch, outs, *args)
    elif x.dim() == 2 and x.is_contiguous() and (residual is None or residual.is_contiguous()):
        chain = queue.pending
        if residual is not None and chain and _adds_residual(chain[-1], x, residual):
            squares = _launch_linear_and_add(queue, residual, outs[1])
            sum_args = (outs[1], weight, eps, None, offset)
            queue.pending.append(PendingOp("rms_norm", launch, outs, sum_args, squares))
            return
        if chain and not (chain[0].op == "all_reduce" and chain[-1].outputs is x):
            queue.flush()
        queue.enqueue("rms_norm", launch, outs, *args)
    else:
        queue.launch_unfused(launch, outs, *args)


def _adds_residual(held: PendingOp, x: Tensor, residual: Tensor) -> bool:
    """Whether x is the result of this product, which can add the residual to it."""
    if held.op != "linear" or held.outputs is not x or residual.dtype != x.dtype:
        return False
    return _gpu_module("linear.small_m_linear").adds_residual(*held.args[:2])


def _launch_linear_and_add(queue: FusionQueue, residual: Tensor, r: Tensor) -> Tensor:
    """Launch the pending product with the sum after it. Returns partial sums of its squares."""
    memory_idle, chain = queue.memory_idle, queue.pop_all()
    added = _gpu_module("linear.small_m_linear").added_residual(residual, r)
    _launch_linear(chain, None, memory_idle, added)
    return added.squares


def _fuse_all_reduce(
    queue: FusionQueue, launch: Callable[..., None], out: Tensor, x: Tensor, *args: Any
) -> None:
    """A norm may follow, if the sum goes through the peers' memory."""
    peers = args[1] if len(args) > 1 else None
    if peers is None or not peers.fits(x):
        queue.launch_unfused(launch, out, x, *args)
        return
    if queue.pending:
        queue.flush()
    queue.enqueue("all_reduce", launch, out, x, *args)


def _launch_normed_sum(chain: list[PendingOp]) -> None:
    """A sum over the ranks and the norm of it."""
    held, (_, weight, eps, residual, offset) = chain[0], chain[1].args
    body = _gpu_module("peer_all_reduce")
    # references to a sum: twice its own entry, and the norm's. Without a residual the norm returns
    # it as one
    store = residual is None or not _is_unreferenced(held.outputs, 3)
    norm = body.SumNorm(weight, eps, residual, offset, *chain[1].outputs)
    body.launch(held.outputs, held.args[0], held.args[2], norm, store)


def _is_head_norm(held: PendingOp) -> bool:
    return held.op == "rms_norm" and held.args[0].dim() == 3


def _fuse_linear(
    queue: FusionQueue,
    launch: Callable[..., None],
    out: Tensor,
    x: Tensor,
    weight: Any,
    bias: Tensor | None = None,
) -> None:
    chain = queue.pending
    if _gpu_module("linear.small_m_linear").supports(x, weight, bias):
        if chain and not (len(chain) == 1 and _fuses_into_linear(chain[0], x, weight)):
            queue.flush()
        queue.enqueue("linear", launch, out, x, weight, bias)
    else:
        queue.launch_unfused(launch, out, x, weight, bias)


def _fuses_into_linear(held: PendingOp, x: Tensor, weight: object) -> bool:
    """Whether a product of x can be fused with this op before it."""
    quantized = x.shape[0] > 1 and isinstance(weight, Fp8Weight | Int8Weight)
    if held.op == "rms_norm":
        fuses = _gpu_module("linear.small_m_linear").fuses_norm
        return held.outputs[0] is x and x.dim() == 2 and (quantized or fuses(x, weight, held.known))
    return held.op == "act_mul" and held.outputs is x and quantized


def _fuse_act_mul(
    queue: FusionQueue, launch: Callable[..., None], out: Tensor, x: Tensor, kind: str
) -> None:
    chain = queue.pending
    if chain and chain[-1].op == "lora_linear" and chain[-1].outputs is x:
        memory_idle, act = queue.memory_idle, _gpu_module("linear.gemv").FusedActivation
        _launch_lora_linear(queue.pop_all(), act(kind, out), memory_idle)
        return
    if (
        chain
        and chain[-1].op == "linear"
        and chain[-1].outputs is x
        and _gpu_module("linear.small_m_linear").fuses_act(*chain[-1].args[:2])
    ):
        memory_idle, act = queue.memory_idle, _gpu_module("linear.gemv").FusedActivation
        _launch_linear(queue.pop_all(), act(kind, out), memory_idle)
        return
    if chain:
        queue.flush()
    if x.shape[0] > 1:
        queue.enqueue("act_mul", launch, out, x, kind)
    else:
        launch(out, x, kind)


def _fuse_lora_linear(
    queue: FusionQueue,
    launch: Callable[..., None],
    out: Tensor,
    y: Tensor,
    x: Tensor,
    bank: Any,
    rows: Any,
) -> None:
    """Adapters of a pending product are launched with it, if it is of a plain weight, else their
    first half before it. The activation of a gated MLP may follow any."""
    body, chain = _gpu_module("lora.lora_linear"), queue.pending
    if chain and chain[-1].op == "linear" and chain[-1].outputs is y and chain[-1].args[0] is x:
        if _gpu_module("lora.adapted_linear").supports(*chain[-1].args, bank):
            if len(chain) == 2 and chain[0].known is not None:  # no adapters in such a product
                _launch_each([chain.pop(0)])
            queue.enqueue("lora_linear", launch, out, y, x, bank, rows)
            if not body.fuses_act(bank):
                queue.flush()
            return
        if len(y) > 1 and not isinstance(chain[-1].args[1], Fp8Weight | Int8Weight):
            *before, product = queue.pop_all()
            _launch_each(before)
            launch = partial(launch, v=body.launch_shrink(y, x, bank, rows))
            _launch_linear([product], None, memory_idle=False)
    if not body.fuses_act(bank):
        queue.launch_unfused(launch, out, y, x, bank, rows)
        return
    if queue.pending:
        queue.flush()
    queue.memory_idle = False
    queue.enqueue("lora_linear", launch, out, y, x, bank, rows)


def _launch_lora_linear(chain: list[PendingOp], act: Any, memory_idle: bool) -> None:
    """Adapters with the product before them, if there is one, and the norm before that."""
    *before, held = chain
    if not before:
        held.launch(held.outputs, *held.args, act)
        return
    _, _, bank, rows = held.args
    _gpu_module("lora.adapted_linear").launch(
        before[-1].outputs, *before[-1].args, bank, rows, _fused_norm(before), act, memory_idle
    )


def _launch_linear(chain: list[PendingOp], act: Any, memory_idle: bool, added: Any = None) -> None:
    """A chain that ends in a product: of one row, of a few, or of quantized rows."""
    rows, weight = chain[-1].args[0].shape[0], chain[-1].args[1]
    if rows > 1 and isinstance(weight, Fp8Weight | Int8Weight):
        _launch_quantized_linear(chain)
        return
    _gpu_module("linear.small_m_linear").launch(
        chain[-1].outputs, *chain[-1].args, _fused_norm(chain), act, memory_idle, added
    )


def _fused_norm(chain: list[PendingOp]) -> Any:
    """The norm that a chain begins with, before its product."""
    if len(chain) == 1:
        return None
    (y, r), (inner, weight, eps, residual, offset) = chain[0].outputs, chain[0].args
    return _gpu_module("linear.gemv").FusedNorm(
        inner, weight, eps, residual, offset, y, r, chain[0].known
    )


def _launch_quantized_linear(chain: list[PendingOp]) -> None:
    """Quantize the rows of a norm or an activation in the kernel that computes them."""
    producer = chain[0].op if len(chain) == 2 else None
    # references to an activation: its own entry and the product's
    if producer is None or (producer == "act_mul" and not _is_unreferenced(chain[0].outputs, 2)):
        _launch_each(chain)
        return
    x, weight, bias = chain[1].args
    body = _gpu_module("linear.quantize_fused")
    rows = body.empty_rows(x, weight)
    if producer == "act_mul":
        body.act_mul_quantize(rows, *chain[0].args)
    else:  # the normed rows are stored too: other ops may read them
        (y, r), (inner, norm_weight, eps, residual, offset) = chain[0].outputs, chain[0].args
        made_r = None if residual is None else r
        body.rms_norm_quantize(rows, inner, norm_weight, eps, residual, offset, y, made_r)
    body.multiply(chain[1].outputs, rows, weight, bias)


def _fuse_moe_router(
    queue: FusionQueue,
    launch: Callable[..., None],
    outs: tuple[Tensor, Tensor],
    x: Tensor,
    weight: Tensor,
    routing: Any,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
) -> None:
    chain = queue.pending
    follows = len(chain) == 1 and chain[0].op == "rms_norm" and chain[0].outputs[0] is x
    if follows and _gpu_module("moe.moe_router").supports_norm(*chain[0].args):
        (y, r), args = queue.pop_all()[0][2:4]
        inner, norm_weight, eps, residual, offset = args
        norm = _gpu_module("moe.moe_router").RouterNorm(
            inner, norm_weight, eps, residual, offset, y, r
        )
        _gpu_module("moe.moe_router").launch_normed(outs, weight, routing, bias, correction, norm)
    else:
        queue.launch_unfused(launch, outs, x, weight, routing, bias, correction)


# -- heads: norms, rotation, cache ------------------------------------------------------------


def _fuse_rope(
    queue: FusionQueue,
    launch: Callable[..., None],
    outs: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool = False,
) -> None:
    chain = queue.pending
    if chain and not _is_qk_norm_pair(chain, q, k):
        queue.flush()
    queue.enqueue("rope", launch, outs, q, k, positions, cos_sin, interleaved)


def _is_qk_norm_pair(chain: list[PendingOp], q: Tensor, k: Tensor) -> bool:
    """Whether the pending ops are the norm of these queries and the norm of these keys."""
    if len(chain) != 2 or not all(_is_head_norm(held) for held in chain):
        return False
    return chain[0].outputs[0] is q and chain[1].outputs[0] is k


def _fuse_kv_write(
    queue: FusionQueue,
    launch: Callable[..., None],
    outs: None,
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    slots: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    scales: Tensor | None = None,
    head_scales: Tensor | None = None,
) -> None:
    args = (k, v, cache, slots, k_scale, v_scale, scales, head_scales)
    chain = queue.pending
    if chain and chain[-1].op == "rope" and chain[-1].outputs[1] is k:
        q_raw, k_raw, _, cos_sin, _ = chain[-1].args
        norms = chain[:-1]
        if norms:
            q_raw, k_raw = norms[0].args[0], norms[1].args[0]
        # references to a norm's result: its own entry and the rope's
        if _gpu_module("attention.norm_rope_write").supports(
            q_raw, k_raw, v, cos_sin, cache, slots
        ) and all(_is_unreferenced(held.outputs[0], 2) for held in norms):
            queue.enqueue("kv_write", launch, outs, *args)
            return
    queue.launch_unfused(launch, outs, *args)


class _QKVInputs(NamedTuple):
    """Inputs of a chain of [norms,] rope and kv_write."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    cos_sin: Tensor
    interleaved: bool
    norms: Any


def _qkv_inputs(chain: list[PendingOp]) -> _QKVInputs:
    q, k, positions, cos_sin, interleaved = chain[-2].args
    norms = chain[:-2]
    if norms:
        q, k = norms[0].args[0], norms[1].args[0]
    norm = _gpu_module("attention.norm_rope_write").QKNorm
    norm_inputs = tuple(norm(h.args[1], h.args[2], h.args[4]) for h in norms) or None
    return _QKVInputs(q, k, chain[-1].args[1], positions, cos_sin, interleaved, norm_inputs)


def _launch_norm_rope_write(chain: list[PendingOp]) -> None:
    _gpu_module("attention.norm_rope_write").launch(
        chain[-2].outputs, *_qkv_inputs(chain), *chain[-1].args[2:]
    )


def _fuse_paged_attention(
    queue: FusionQueue,
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
    """Attention reads the chain's q and cache; no op reads q or k after it (AttentionStep)."""
    chain = queue.pending
    if chain and chain[-1].op == "kv_write" and chain[-2].outputs[0] is q:
        body = _gpu_module("attention.paged_attention")
        heads, written = _qkv_inputs(chain), chain[-1].args
        slots, measured = written[3], written[6] is not None
        if written[2] is cache and body.launch_fused(
            out, q, heads, slots, measured, cache, tables, contexts, *features, **named
        ):
            queue.pop_all()
            return
    queue.launch_unfused(launch, out, q, cache, tables, q_starts, contexts, *features, **named)


def _is_unreferenced(result: Tensor, held: int) -> bool:
    """Whether the chain's `held` references are the only ones to a result, and it has no view."""
    if sys.getrefcount(result) - _REFCOUNT_OVERHEAD > held:
        return False
    handle = result.untyped_storage()  # a tensor and this handle: two uses
    return torch._C._storage_Use_Count(handle._cdata) <= 2


def _refcount(thing: object) -> int:
    return sys.getrefcount(thing)


def _measure_refcount_overhead() -> int:
    """References that the query itself adds: they differ between versions of Python."""
    box = (object(),)
    return _refcount(box[0]) - 1


_REFCOUNT_OVERHEAD = _measure_refcount_overhead()


def _gpu_module(name: str) -> Any:
    """A module of GPU kernels, imported at its first use."""
    module = sys.modules.get(f"quire.kernels.gpu.{name}")
    return module if module is not None else import_module(f"quire.kernels.gpu.{name}")


_MEMORY_IDLE_OPS = {"paged_attention", "mla_attention"}
"""Ops that leave memory idle: the next kernel may prefetch its weights meanwhile."""

_FUSION_RULES: dict[str, Callable[..., None]] = {
    "all_reduce": _fuse_all_reduce,
    "rms_norm": _fuse_rms_norm,
    "linear": _fuse_linear,
    "act_mul": _fuse_act_mul,
    "lora_linear": _fuse_lora_linear,
    "moe_router": _fuse_moe_router,
    "rope": _fuse_rope,
    "kv_write": _fuse_kv_write,
    "paged_attention": _fuse_paged_attention,
}
