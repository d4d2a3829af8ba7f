"""Qwen3 in plain PyTorch, for training and for evaluating while the device is there.

Not the engine's model: no paged cache, no parallelism. Parameter names are those of Hugging Face's
Qwen3ForCausalLM, so a state dict is a checkpoint. Documents packed in a row do not see each other.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    intermediate_size: int = 768
    max_position_embeddings: int = 4096
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6

    def hf_config(self) -> dict[str, object]:
        """The `config.json` of this shape."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.num_hidden_layers,
            "initializer_range": 0.02,
            "rope_scaling": None,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def _flash_fake(q, k, v, cu, longest):  # type: ignore[no-untyped-def]
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return (
        torch.empty_like(q),
        lse,
        q.new_empty((2,), dtype=torch.uint64),
        q.new_empty((), dtype=torch.uint64),
    )


@torch.library.custom_op("quill::attend", mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention inside each document of a packed batch; q, k, v [T, H, D], cu [documents + 1]."""
    out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu, cu, longest, longest, 0.0, True, False
    )
    return out, lse, rng.clone(), unused.clone()


attend.register_fake(_flash_fake)


@torch.library.custom_op("quill::attend_back", mutates_args=())
def attend_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu: Tensor, longest: int,
    rng: Tensor, unused: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, lse, cu, cu, longest, longest, 0.0, True, rng, unused
    )
    return dq, dk, dv


@attend_back.register_fake
def _(grad, q, k, v, out, lse, cu, longest, rng, unused):  # type: ignore[no-untyped-def]
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, cu, ctx.longest = inputs
    out, lse, rng, unused = output
    ctx.save_for_backward(q, k, v, out, lse, cu, rng, unused)


def _back(ctx, grad, *_):  # type: ignore[no-untyped-def]
    q, k, v, out, lse, cu, rng, unused = ctx.saved_tensors
    return (*attend_back(grad, q, k, v, out, lse, cu, ctx.longest, rng, unused), None, None)


attend.register_autograd(_back, setup_context=_save)


def attend_reference(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    """The same by a mask: for machines without the flash kernel, and to check it. T * T memory."""
    t = torch.arange(q.shape[0], device=q.device)
    doc = torch.searchsorted(cu[1:].contiguous(), t, right=True)
    mask = (doc[:, None] == doc[None, :]) & (t[:, None] >= t[None, :])
    y = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], mask
    )
    return y[0].transpose(0, 1)


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = (
            s.num_attention_heads,
            s.num_key_value_heads,
            s.head_dim,
        )
        self.q_proj = nn.Linear(s.hidden_size, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(s.hidden_size, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(s.hidden_size, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, s.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.size, s.rms_norm_eps)
        self.k_norm = RMSNorm(self.size, s.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [..., H, D], k and v [..., K, D], rotated."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.size)))
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.size)))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.size))
        return rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cu: Tensor, longest: int) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        y = attend(q, k, v, cu, longest)[0] if q.is_cuda else attend_reference(q, k, v, cu)
        return self.o_proj(y.flatten(-2))


class MLP(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(s)
        self.mlp = MLP(s)
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)


class Body(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_hidden_layers))
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)


class Qwen3(nn.Module):
    """The whole network; the head is the embedding."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.model = Body(s)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = (
                    (2 * s.num_hidden_layers) ** -0.5
                    if name.endswith(("o_proj.weight", "down_proj.weight"))
                    else 1.0
                )
                nn.init.normal_(p, std=0.02 * scale)
        inv = s.rope_theta ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
        angle = torch.outer(torch.arange(s.max_position_embeddings).float(), inv)
        angle = torch.cat((angle, angle), -1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        weights: Tensor,
        positions: Tensor,
        cu: Tensor,
        longest: int,
    ) -> Tensor:
        """Weighted mean cross entropy of packed tokens, all [T]."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = x + layer.self_attn(layer.input_layernorm(x), cos, sin, cu, longest)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight)
        ce = F.cross_entropy(logits.float(), targets, reduction="none")
        return (ce * weights).sum() / weights.sum()
