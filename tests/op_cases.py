"""An op's body against its reference, over the op's own cases."""

import importlib
import pkgutil

import torch

import quire.kernels
from quire.kernels.framework.op import OPS

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}


def all_ops():
    """Names of all ops; every op file is imported to find them."""
    for module in pkgutil.iter_modules(quire.kernels.__path__):
        if not module.ispkg:
            importlib.import_module(f"quire.kernels.{module.name}")
    return sorted(OPS)


def ops_on_gpu():
    """Names of the ops that have GPU kernels."""
    return [name for name in all_ops() if OPS[name].gpu is not None]


def elements(case):
    return sum(v.numel() for v in case.values() if isinstance(v, torch.Tensor))


def flat(result):
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


def copied(case):
    """Some ops write what they are given: each body gets its own, with the same strides."""
    written = ("cache", "scales", "counts", "logits", "y", "order", "starts", "pair_slots", "state")
    return {k: _copied(v) if k in written and v is not None else v for k, v in case.items()}


def _copied(x):
    memory = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        memory, x.storage_offset(), x.shape, x.stride()
    )


def written_cache(case):
    """What an op without a result has written."""
    return [case[name] for name in ("cache", "scales") if case.get(name) is not None]


def written_state(case):
    """What an op has written beside its result."""
    return [case["state"]] if "state" in case else []


def poison(outs, case):
    """What no kernel writes must show. A result that is an argument itself stays."""
    given = [v for v in case.values() if isinstance(v, torch.Tensor)]
    for t in outs:
        if any(t is g for g in given):
            continue
        if t.dtype.is_floating_point:
            t.view(torch.uint8).fill_(0xFF)  # a NaN in every float format
        else:
            t.fill_(1 if t.dtype == torch.bool else -7 if t.dtype.is_signed else 7)


def agree(name, case):
    """Compare the GPU body with the reference on one case. False: the kernels do not take it."""
    op, mine, theirs = OPS[name], copied(case), copied(case)
    outs = op.gpu.outputs(**mine)
    if outs is NotImplemented:
        return False
    poison(flat(outs), mine)
    op.gpu.launch(outs, **mine)
    want = (flat(op.reference(**theirs)) or written_cache(theirs)) + written_state(theirs)
    got = (flat(outs) or written_cache(mine)) + written_state(mine)
    for g, w in zip(got, want, strict=True):
        # attention to slices has float32 results of products in its queries' dtype
        tol = TOLERANCE.get(case["q"].dtype if "q" in case else g.dtype, op.atol)
        if not g.dtype.is_floating_point:
            tol = 0  # ids and counts: a share of a large one would hide what is off by one
        if g.element_size() == 1 and g.is_floating_point():
            g, w, tol = g.float(), w.float(), 0.25 if g.dtype == torch.float8_e5m2 else 0.125
        torch.testing.assert_close(g, w, atol=tol, rtol=tol, equal_nan=True)
    return True
