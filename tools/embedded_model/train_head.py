"""Trains an EAGLE-3 head for the embedded model, on answers that the model itself generates.

The head drafts tokens for speculative decoding. Needs no download and no accelerator: the prompts are
those of the training mixture, the answers come from `quire.LLM`. Plain PyTorch; the folder that it
writes is read by `--speculative-config '{"model": "OUT"}'`. The unrolled loss is that of the paper,
arXiv 2503.01840: behind the first pass the head reads its own states.

    python tools/embedded_model/train_head.py OUT [--documents 1200] [--seconds 240]

Axes: B documents, L tokens, A tokens of answers, E hidden, H heads, D head size, V draft vocabulary
"""

import argparse
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from draw import Draw
from evaluate import SEED, cases
from mixture import document
from network import MLP, Qwen3, RMSNorm, Shape, rotate
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TAPS = (2, 4, 6)
"""Layers whose inputs the head reads."""
UNROLLED = 4
"""Drafts for which the head is trained."""


@dataclass
class Document:
    """A prompt with the model's answer, and what the model computed of it."""

    ids: list[int]
    answer: int  # where it begins
    states: Tensor | None = None  # [L, 3 E] entering the layers of TAPS
    last: Tensor | None = None  # [L, E] after the last norm


class Head(nn.Module):
    """Parameter names are those of EAGLE-3 checkpoints."""

    def __init__(self, s: Shape, width: int, drafts: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = (
            s.num_attention_heads,
            s.num_key_value_heads,
            s.head_dim,
        )
        e, linear = s.hidden_size, lambda i, o: nn.Linear(i, o, bias=False)
        self.fc = linear(len(TAPS) * e, e)
        layer = self.midlayer = nn.Module()
        layer.input_layernorm, layer.hidden_norm = RMSNorm(e, 1e-6), RMSNorm(e, 1e-6)
        attention = layer.self_attn = nn.Module()
        attention.q_proj = linear(2 * e, self.heads * self.size)
        attention.k_proj = linear(2 * e, self.kv_heads * self.size)
        attention.v_proj = linear(2 * e, self.kv_heads * self.size)
        attention.o_proj = linear(self.heads * self.size, e)
        layer.post_attention_layernorm = RMSNorm(e, 1e-6)
        layer.mlp = MLP(Shape(hidden_size=e, intermediate_size=width))
        self.norm = RMSNorm(e, 1e-6)
        self.lm_head = linear(e, drafts)

    def split(self, x: Tensor, cos: Tensor, sin: Tensor, rotated: bool = True) -> Tensor:
        """[B, L, K D] -> [B, H, L, D]."""
        x = x.unflatten(-1, (-1, self.size)).transpose(1, 2)
        x = rotate(x, cos[:, None], sin[:, None]) if rotated else x
        return x.repeat_interleave(self.heads // x.shape[1], 1)

    def unroll(self, states: Tensor, tokens: Tensor, at: Tensor, angles: Tensor) -> list[Tensor]:
        """Logits [B, A, V] of each draft behind the tokens at [B, A]. states [B, L, 3 E]; tokens
        [B, L + UNROLLED, E], embedded; angles [2, positions, D], cosines and sines.

        Draft s behind token i attends to the first pass of the tokens up to i, and to the states that
        the drafts before it left behind i.
        """
        layer, attention, length = self.midlayer, self.midlayer.self_attn, states.shape[1]
        scale, found = self.size**-0.5, []
        whole = self.fc(states)
        x = torch.cat(
            (layer.input_layernorm(tokens[:, 1 : length + 1]), layer.hidden_norm(whole)), -1
        )
        cos, sin = angles[:, :length, :][:, None]
        first = self.split(attention.k_proj(x), cos, sin)
        values = self.split(attention.v_proj(x), cos, sin, False)
        hidden = torch.arange(length)[None, None, None] > at[:, None, :, None]
        u = gather(whole, at)
        own: list[tuple[Tensor, Tensor]] = []
        for s in range(UNROLLED):
            following = layer.input_layernorm(gather(tokens, at + 1 + s))
            x = torch.cat((following, layer.hidden_norm(u)), -1)
            cos, sin = angles[:, at + s]
            q = self.split(attention.q_proj(x), cos, sin)
            if s:
                k = self.split(attention.k_proj(x), cos, sin)
                own.append((k, self.split(attention.v_proj(x), cos, sin, False)))
            scores = [(q @ first.transpose(-1, -2)).masked_fill(hidden, -torch.inf)]
            scores += [(q * k).sum(-1, keepdim=True) for k, _ in own]
            weights = (torch.cat(scores, -1) * scale).softmax(-1)
            y = weights[..., :length].to(values.dtype) @ values
            for r, (_, v) in enumerate(own):
                y = y + weights[..., length + r : length + r + 1] * v
            u = u + attention.o_proj(y.transpose(1, 2).flatten(-2))
            u = u + layer.mlp(layer.post_attention_layernorm(u))
            found.append(self.lm_head(self.norm(u)))
        return found


def gather(x: Tensor, at: Tensor) -> Tensor:
    """x [B, L, E], at [B, A] -> [B, A, E]."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def generate(model: str, prompts: list[str], most: int) -> list[Document]:
    """Let the model answer."""
    from quire import LLM, SamplingParams

    llm = LLM(model)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=most), use_tqdm=False)
    return [
        Document([*one.prompt_token_ids, *one.outputs[0].token_ids], len(one.prompt_token_ids))
        for one in outputs
    ]


@torch.inference_mode()
def add_states(net: Qwen3, docs: list[Document]) -> None:
    """Run the model over its answers, and keep what the head reads and should say."""
    for doc in docs:
        ids = torch.tensor(doc.ids)
        cos, sin = net.cos[: len(ids)], net.sin[: len(ids)]
        x, taps = net.model.embed_tokens(ids), []
        for i, layer in enumerate(net.model.layers):
            if i in TAPS:
                taps.append(x.bfloat16())
            a = layer.self_attn
            q, k, v = a.project(layer.input_layernorm(x), cos[:, None], sin[:, None])
            groups = a.heads // a.kv_heads
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            y = F.scaled_dot_product_attention(
                *(one.transpose(0, 1)[None] for one in (q, k, v)), is_causal=True
            )
            x = x + a.o_proj(y[0].transpose(0, 1).flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        doc.states, doc.last = torch.cat(taps, -1), net.model.norm(x).bfloat16()


def pad(parts: list[Tensor], length: int) -> Tensor:
    """Stack tensors of different lengths."""
    out = parts[0].new_zeros((len(parts), length, *parts[0].shape[1:]))
    for i, one in enumerate(parts):
        out[i, : len(one)] = one[:length]
    return out


class Training:
    """Trains a head on documents with states."""

    def __init__(self, net: Qwen3, head: Head, drafts: Tensor) -> None:
        """drafts: [V] ids of the tokens that the head drafts."""
        self.net, self.head = net, head
        self.angles = torch.stack((net.cos, net.sin))
        self.outputs = net.model.embed_tokens.weight[drafts]
        self.place = torch.full((net.shape.vocab_size,), -1).index_copy(
            0, drafts, torch.arange(len(drafts))
        )

    def loss(self, docs: list[Document]) -> tuple[Tensor, Tensor]:
        """Mean loss, and of each draft the share of answer tokens that it names."""
        length = max(len(doc.ids) for doc in docs)
        ids = pad([torch.tensor(doc.ids) for doc in docs], length + UNROLLED + 2)
        states = pad([doc.states for doc in docs], length)  # type: ignore[misc]
        last = pad([doc.last for doc in docs], length + UNROLLED + 2)  # type: ignore[misc]
        embedded = self.net.model.embed_tokens(ids)
        ends = torch.tensor([len(doc.ids) for doc in docs])[:, None]
        starts = torch.tensor([max(doc.answer - 2, 0) for doc in docs])[:, None]
        at = (starts + torch.arange(int((ends - starts).max()))).clamp(max=length - 1)
        logits = self.head.unroll(states, embedded, at, self.angles)
        total, shares = torch.zeros(()), []
        for s, one in enumerate(logits):
            with torch.no_grad():
                wanted = (gather(last, at + 1 + s) @ self.outputs.T).float().softmax(-1)
                label = ids.gather(1, at + 2 + s)
                counted = at + 2 + s < ends
                place = self.place[label]
                weight = (counted & (place >= 0)).float()
            each = -(wanted * one.float().log_softmax(-1)).sum(-1)
            total = total + 0.8**s * (each * weight).sum() / weight.sum().clamp(min=1)
            shares.append(((one.argmax(-1) == place) & counted).sum() / counted.sum())
        return total, torch.stack(shares).detach()

    def run(self, docs: list[Document], seconds: float, size: int, rate: float) -> None:
        """Train for so long; the rate falls to zero."""
        groups = [(p, 0.01 * (p.dim() > 1)) for p in self.head.parameters()]
        optimizer = torch.optim.AdamW(
            [{"params": [p], "weight_decay": decay} for p, decay in groups], betas=(0.9, 0.98)
        )
        source, began, step = torch.Generator().manual_seed(1), time.perf_counter(), 0
        order: list[list[Document]] = []
        while (share := (time.perf_counter() - began) / seconds) < 1:
            if not order:  # documents of similar length in a batch
                mixed = sorted(
                    docs, key=lambda doc: len(doc.ids) + 16 * torch.rand((), generator=source)
                )
                order = [mixed[i : i + size] for i in range(0, len(mixed), size)]
                order = [order[i] for i in torch.randperm(len(order), generator=source)]
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 30) * (1 - share)
            with torch.autocast("cpu", torch.bfloat16):
                loss, shares = self.loss(order.pop())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            optimizer.step()
            if step % 50 == 0:
                named = " ".join(f"{one:.2f}" for one in shares.tolist())
                print(
                    f"{share * seconds:5.0f} s step {step} loss {loss:.3f} named {named}",
                    flush=True,
                )
            step += 1


def write(folder: Path, s: Shape, head: Head, drafts: Tensor, width: int) -> None:
    """Write the folder of the head."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: one.detach().bfloat16() for name, one in head.state_dict().items()}
    tensors["d2t"] = drafts - torch.arange(len(drafts))
    tensors["t2d"] = torch.zeros(s.vocab_size, dtype=torch.bool).index_fill(0, drafts, True)
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors"
    )
    hf = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": s.hidden_size,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": s.num_attention_heads,
        "num_key_value_heads": s.num_key_value_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocab_size,
        "draft_vocab_size": len(drafts),
        "max_position_embeddings": s.max_position_embeddings,
        "rope_theta": s.rope_theta,
        "rms_norm_eps": s.rms_norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(TAPS),
            "use_aux_hidden_state": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")


def report(model: str, folder: Path, count: int, most: int) -> None:
    """Print acceptance and times on held-out prompts, with the head and without."""
    from quire import LLM, SamplingParams

    prompts = [one.prompt for one in random.Random(SEED).sample(cases(20), count)]
    params = SamplingParams(temperature=0, max_tokens=most)
    config = {"model": str(folder), "num_speculative_tokens": UNROLLED, "adaptive": False}
    for given in (None, config):
        llm = LLM(model, speculative_config=given)
        llm.generate(prompts[:2], params, use_tqdm=False)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        done = [one.outputs[0] for one in outputs]
        print(
            f"{len(done)} prompts, {sum(len(one.token_ids) for one in done)} tokens, {seconds:.1f} s"
        )
        figures = [one.spec_decode_metrics for one in done if one.spec_decode_metrics is not None]
        steps = sum(one.num_spec_steps for one in figures)
        if steps:
            reached = [
                sum(sum(f.acceptance_histogram[s:]) for f in figures) for s in range(UNROLLED + 1)
            ]
            rates = " ".join(f"{one / steps:.3f}" for one in reached[1:])
            print(f"tokens a step {1 + sum(reached[1:]) / steps:.3f}, accepted by position {rates}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=Path("quire/embedded"))
    parser.add_argument("--documents", type=int, default=1200)
    parser.add_argument("--longest", type=int, default=448, help="tokens of a document")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--vocab", type=int, default=1024, help="tokens that the head drafts")
    parser.add_argument("--width", type=int, default=512, help="of its MLP")
    parser.add_argument("--held-out", type=int, default=200, help="prompts of the report")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    draw = Draw(4321)
    prompts = [prompt for prompt, _ in (document(draw) for _ in range(args.documents)) if prompt]
    docs = generate(str(args.model), prompts, 160)
    docs = [doc for doc in docs if len(doc.ids) <= args.longest]
    config = json.loads((args.model / "config.json").read_text())
    shape = Shape(**{key: config[key] for key in Shape.__dataclass_fields__})
    net = Qwen3(shape).requires_grad_(False)
    net.load_state_dict(load_file(args.model / "model.safetensors"))
    with torch.autocast("cpu", torch.bfloat16):
        add_states(net.float(), docs)
    counts = Counter(token for doc in docs for token in doc.ids[doc.answer :])
    chosen = [token for token, _ in counts.most_common(args.vocab)]
    chosen += [token for token in range(shape.vocab_size) if token not in counts][
        : args.vocab - len(chosen)
    ]
    drafts = torch.tensor(sorted(chosen))
    share = sum(counts[token] for token in chosen) / counts.total()
    print(f"{time.perf_counter() - began:.0f} s: {len(docs)} documents, {counts.total()} tokens of answers, "
          f"{share:.1%} of them in the draft vocabulary", flush=True)  # fmt: skip
    head = Head(shape, args.width, len(drafts))
    with torch.no_grad():
        head.norm.weight.copy_(net.model.norm.weight)
        head.lm_head.weight.copy_(net.model.embed_tokens.weight[drafts])
        head.fc.weight[:, -shape.hidden_size :] += torch.eye(shape.hidden_size)
    print(f"{sum(p.numel() for p in head.parameters())} weights", flush=True)
    Training(net, head, drafts).run(docs, args.seconds, args.batch, args.rate)
    write(args.out, shape, head, drafts, args.width)
    report(str(args.model), args.out, args.held_out, 160)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
