"""Greedy decoding of many prompts at once with the training network, for evaluation only."""

import torch
import torch.nn.functional as F
from network import Qwen3
from torch import Tensor


class Decoder:
    """Decodes greedily in the dtype the weights are in; a row stops at an end id."""

    def __init__(self, net: Qwen3, end_ids: set[int]) -> None:
        self.net = net
        self.end_ids = end_ids
        self.device = net.cos.device
        self.dtype = net.model.embed_tokens.weight.dtype

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], max_new: int, rows: int = 512) -> list[list[int]]:
        """New ids per prompt, without the end id."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        out: list[list[int]] = [[] for _ in prompts]
        for at in range(0, len(order), rows):
            part = order[at : at + rows]
            for i, ids in zip(part, self.batch([prompts[i] for i in part], max_new), strict=True):
                out[i] = ids
        return out

    def batch(self, prompts: list[list[int]], max_new: int) -> list[list[int]]:
        net, n = self.net, len(prompts)
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        width = int(lengths.max())
        room = min(width + max_new, net.shape.max_position_embeddings)
        ids = torch.zeros(n, width, dtype=torch.long)
        for i, p in enumerate(prompts):
            ids[i, : len(p)] = torch.tensor(p)
        size = (
            net.shape.num_hidden_layers,
            2,
            n,
            net.shape.num_key_value_heads,
            room,
            net.shape.head_dim,
        )
        cache = torch.zeros(size, device=self.device, dtype=self.dtype)
        steps = torch.arange(width, device=self.device).expand(n, width)
        last = self.forward(ids.to(self.device), steps, cache, None)[
            torch.arange(n, device=self.device), lengths - 1
        ]
        done = torch.zeros(n, dtype=torch.bool, device=self.device)
        ends = torch.tensor(sorted(self.end_ids), device=self.device)
        made: list[Tensor] = []
        for step in range(room - width):
            token = last.argmax(-1)
            made.append(token.masked_fill(done, -1))
            done |= torch.isin(token, ends)
            if step % 16 == 15 and bool(done.all()):
                break
            seen = torch.arange(room, device=self.device)[None] <= (lengths + step)[:, None]
            last = self.forward(token[:, None], (lengths + step)[:, None], cache, seen)[:, 0]
        rows = torch.stack(made, 1).tolist()
        return [[t for t in row if t >= 0 and t not in self.end_ids] for row in rows]

    def forward(self, ids: Tensor, positions: Tensor, cache: Tensor, seen: Tensor | None) -> Tensor:
        """Logits [n, t, V]; writes keys and values at `positions`. seen None: a prompt, causal."""
        net = self.net
        cos = net.cos[positions][:, :, None].to(self.dtype)
        sin = net.sin[positions][:, :, None].to(self.dtype)
        x = net.model.embed_tokens(ids)
        for i, layer in enumerate(net.model.layers):
            att = layer.self_attn
            q, k, v = (y.transpose(1, 2) for y in att.project(layer.input_layernorm(x), cos, sin))
            groups = att.heads // att.kv_heads
            if seen is None:
                cache[i, 0, :, :, : ids.shape[1]], cache[i, 1, :, :, : ids.shape[1]] = k, v
                y = F.scaled_dot_product_attention(
                    q,
                    k.repeat_interleave(groups, 1),
                    v.repeat_interleave(groups, 1),
                    is_causal=True,
                )
            else:
                at = positions[:, 0][:, None, None, None].expand(-1, k.shape[1], 1, k.shape[3])
                cache[i, 0].scatter_(2, at, k)
                cache[i, 1].scatter_(2, at, v)
                keys, values = (
                    cache[i, 0].repeat_interleave(groups, 1),
                    cache[i, 1].repeat_interleave(groups, 1),
                )
                y = F.scaled_dot_product_attention(q, keys, values, seen[:, None, None])
            x = x + att.o_proj(y.transpose(1, 2).flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return F.linear(net.model.norm(x), net.model.embed_tokens.weight)
