"""Layers written as op calls on the GPU bodies, to be run with fusion and without."""

from typing import NamedTuple

import torch

from quire.kernels import act, add, kv_write, linear, rms_norm, rope
from quire.kernels.framework import lazy_fusion
from quire.kernels.framework.op import OPS
from tests.op_cases import copied

FILES = (act, add, kv_write, linear, rms_norm, rope)  # importing one files its ops


def call(name, *args, **kwargs):
    """An op as its caller on a GPU sees it, whatever device the tensors are on."""
    body = OPS[name].gpu
    outs = body.outputs(*args, **kwargs)
    assert outs is not NotImplemented, name
    for t in outs if isinstance(outs, tuple) else (outs,):
        if t is not None and not any(t is a for a in args):
            t.fill_(float("nan") if t.is_floating_point() else -7)
    lazy_fusion.submit(name, body.launch, outs, args, kwargs)
    return outs


class Sizes(NamedTuple):
    T: int
    E: int
    F: int
    H: int
    K: int
    D: int


def inputs(s, device, dtype=torch.bfloat16, cached=None):
    def rand(*shape, by=1.0):
        return (torch.randn(*shape, device=device) * by).to(dtype)

    qkv = (s.H + 2 * s.K) * s.D
    return {
        "x": rand(s.T, s.E),
        "res": rand(s.T, s.E),
        "norm": 1 + rand(s.E, by=0.02),
        "norm2": 1 + rand(s.E, by=0.02),
        "q_norm": 1 + rand(s.D, by=0.02),
        "k_norm": 1 + rand(s.D, by=0.02),
        "qkv": rand(qkv, s.E, by=s.E**-0.5),
        "qkv_bias": rand(qkv),
        "o": rand(s.E, s.H * s.D, by=(s.H * s.D) ** -0.5),
        "gate_up": rand(2 * s.F, s.E, by=s.E**-0.5),
        "down": rand(s.E, s.F, by=s.F**-0.5),
        "positions": torch.randint(0, 50, (s.T,), device=device, dtype=torch.int32),
        "table": torch.randn(50, s.D, device=device),
        "slots": torch.randperm(16 * (s.T // 16 + 2), device=device)[: s.T].contiguous(),
        "cache": torch.zeros(s.T // 16 + 2, 2, s.K, 16, s.D, device=device).to(cached or dtype),
    }


def layer(s, t, *, head_norms=True, bias=False, act="silu"):
    """One layer without its attention: the rotated queries go straight on."""
    x, res = call("rms_norm", t["x"], t["norm"], 1e-6, t["res"])
    qkv = call("linear", x, t["qkv"], t["qkv_bias"] if bias else None)
    q, k, v = torch.split(qkv.view(s.T, -1, s.D), [s.H, s.K, s.K], dim=1)
    if head_norms:
        q, k = normed(q, t["q_norm"]), normed(k, t["k_norm"])
    q, k = call("rope", q, k, t["positions"], t["table"])
    scales = t.get("scales")
    call("kv_write", k, v, t["cache"], t["slots"], scales=scales)
    x = call("linear", q.view(s.T, -1), t["o"])
    x, res = call("rms_norm", x, t["norm2"], 1e-6, res, offset=0.5)
    x = mlp(x, t, act)
    lazy_fusion.flush()
    made = {"x": x, "res": res, "q": q, "k": k, "cache": t["cache"], "scales": scales}
    return {name: tensor for name, tensor in made.items() if tensor is not None}


def normed(heads, weight):
    return call("rms_norm", heads, weight, 1e-6)[0]


def mlp(x, t, act):
    return call("linear", call("act_mul", call("linear", x, t["gate_up"]), act), t["down"])


def quantized(t, quantize):
    """The layer's weights in another form."""
    return {**t, **{name: quantize(t[name]) for name in ("qkv", "o", "gate_up", "down")}}


def both(s, t, **how):
    """(fused, unfused) results."""
    mine = layer(s, t | copied(t), **how)
    with lazy_fusion.disabled():
        return mine, layer(s, t | copied(t), **how)
