"""Train the embedded model within a wall-clock budget and write its checkpoint folder.

    python tools/embedded_model/train.py --tokenizer quire/embedded/tokenizer.json --out OUT --seconds 480

Muon for the matrices inside the layers, AdamW for the embedding and the norms. The learning rate follows the
clock, not the step count: warm up, hold, then fall to zero at the end of the budget, so that a run always
ends with a finished model however fast the machine is. Data never repeats unless the trainer outruns it.
"""

import argparse
import json
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import torch
from network import Qwen3, Shape, attend, attend_reference
from packing import CHUNK, DOCS, LONG, LONG_SHARE, PROMPT_WEIGHT, ROW, SHORT, Feed
from torch import Tensor, nn


class Pool:
    """All chunks of rows received so far, on the device; unseen chunks are served first."""

    def __init__(self, capacity: int, device: str) -> None:
        self.tokens = torch.zeros(capacity, CHUNK, ROW, dtype=torch.int16, device=device)
        self.weights = torch.zeros(capacity, CHUNK, ROW, dtype=torch.float16, device=device)
        self.starts = torch.zeros(capacity, CHUNK, DOCS + 1, dtype=torch.int32, device=device)
        self.longest: list[int] = []
        self.capacity, self.filled, self.served, self.repeats = capacity, 0, 0, 0
        self.random = random.Random(1)

    def receive(self, feed: Feed) -> None:
        """Thread body: move rows from the workers to the device."""
        while self.filled < self.capacity and not feed.stop.is_set():
            try:
                tokens, weights, starts, longest = feed.queue.get(timeout=1)
            except Exception:  # noqa: BLE001 - queue.Empty, or the queue was closed at the end
                continue
            self.tokens[self.filled] = torch.from_numpy(tokens).to(self.tokens.device)
            self.weights[self.filled] = torch.from_numpy(weights).to(self.tokens.device)
            self.starts[self.filled] = torch.from_numpy(starts).to(self.tokens.device)
            self.longest.append(longest)
            self.filled += 1

    def pick(self) -> int:
        while self.filled == 0:
            time.sleep(0.05)
        if self.filled > self.served:
            self.served += 1
            return self.served - 1
        self.repeats += 1
        return self.random.randrange(self.filled)

    def batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        """(ids, targets, weights, positions, cu, longest) of one chunk, [CHUNK * ROW] each but cu."""
        chosen = self.pick()
        ids = self.tokens[chosen].long()
        targets = torch.roll(ids, -1, 1)
        starts = self.starts[chosen].long()
        t = torch.arange(ROW, device=ids.device).expand(CHUNK, ROW).contiguous()
        doc = torch.searchsorted(starts, t, right=True) - 1
        positions = t - starts.gather(1, doc)
        offsets = torch.arange(CHUNK, device=ids.device)[:, None] * ROW
        cu = torch.cat(
            ((starts + offsets)[:, :-1].flatten(), torch.tensor([CHUNK * ROW], device=ids.device))
        )
        weights = self.weights[chosen].float()
        return (
            ids.flatten(),
            targets.flatten(),
            weights.flatten(),
            positions.flatten(),
            cu.int(),
            self.longest[chosen],
        )


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz: the nearest orthogonal matrices, roughly. x [n, rows, columns].

    Source: Muon, K. Jordan and others, 2024 (coefficients of the quintic iteration).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    y = x.bfloat16()
    tall = y.shape[1] > y.shape[2]
    if tall:
        y = y.mT
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        g = y @ y.mT
        y = a * y + (b * g + c * g @ g) @ y
    return y.mT if tall else y


class Muon:
    """Momentum whose update is made orthogonal, for stacks of equally shaped matrices."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        shapes = sorted({tuple(p.shape) for p in params})
        self.stacks = [[p for p in params if tuple(p.shape) == s] for s in shapes]
        self.moments = [torch.zeros(len(s), *s[0].shape, device=s[0].device) for s in self.stacks]
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self.orthogonal = torch.compile(orthogonal) if params[0].is_cuda else orthogonal

    @torch.no_grad()
    def step(self, factor: float) -> None:
        lr = self.lr * factor
        for stack, moment in zip(self.stacks, self.moments, strict=True):
            grad = torch.stack([p.grad for p in stack])  # type: ignore[misc]
            moment.lerp_(grad, 1 - self.momentum)
            update = self.orthogonal(grad.lerp(moment, self.momentum))
            rows, columns = stack[0].shape
            scale = max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(stack, 1 - lr * self.decay)
            torch._foreach_add_(stack, list(update.float().unbind()), alpha=-lr * scale)


def factor_at(share: float, hold: float) -> float:
    """Learning-rate factor at a share of the budget: warm up, hold, fall linearly to zero."""
    if share < 0.02:
        return max(share / 0.02, 0.02)
    return 1.0 if share < hold else max(0.0, (1 - share) / (1 - hold))


def check_attention(device: str) -> None:
    """The packed kernel against a mask, values and gradients, before trusting it with a run."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(512, 8, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    cu = torch.tensor([0, 100, 101, 300, 512, 512, 512], device=device, dtype=torch.int32)
    weight = torch.randn(512, 8, 32, device=device)
    grads = []
    for y in (attend(q, k, v, cu, 512)[0], attend_reference(q.float(), k.float(), v.float(), cu)):
        (y * weight).sum().backward()
        grads.append([y.detach().float()] + [x.grad.float() for x in (q, k, v)])  # type: ignore[union-attr]
        q.grad = k.grad = v.grad = None
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(*grads, strict=True)]
    print("attention errors", errors, flush=True)
    assert max(errors) < 2e-2, errors


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.net = Qwen3(Shape()).to(args.device)
        if args.resume:
            from safetensors.torch import load_file

            self.net.load_state_dict({k: v.float() for k, v in load_file(args.resume).items()})
        inner = [p for n, p in self.net.named_parameters() if p.dim() == 2 and "embed" not in n]
        others = [p for n, p in self.net.named_parameters() if p.dim() != 2 or "embed" in n]
        self.muon = Muon(inner, args.muon_lr)
        self.adam = torch.optim.AdamW(
            others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.loss_fns = dict.fromkeys((SHORT, LONG), self.net.loss)
        if args.device == "cuda":
            self.loss_fns = {n: torch.compile(self.net.loss, dynamic=False) for n in (SHORT, LONG)}
        self.curve: list[dict[str, float]] = []

    def step(self, pool: Pool, share: float) -> Tensor:
        factor = factor_at(share, self.args.hold)
        *inputs, longest = pool.batch()
        with torch.autocast(self.args.device, torch.bfloat16):
            loss = self.loss_fns[longest](*inputs, longest)
        loss.backward()
        self.muon.step(factor)
        for group in self.adam.param_groups:
            group["lr"] = self.args.adam_lr * factor
        self.adam.step()
        self.net.zero_grad(set_to_none=True)
        return loss.detach()

    def run(self, pool: Pool) -> int:
        """Train until the budget is spent; the number of steps."""
        start, steps, shown, total = time.time(), 0, 0.0, torch.zeros((), device=self.args.device)
        since = 0
        while (elapsed := time.time() - start) < self.args.seconds:
            total += self.step(pool, elapsed / self.args.seconds)
            steps, since = steps + 1, since + 1
            if since >= 8 and elapsed - shown > self.args.every:
                entry = {"s": round(elapsed, 1), "step": steps, "loss": round(float(total) / since, 4),
                         "tokens": steps * CHUNK * ROW, "fresh": pool.filled * CHUNK * ROW, "repeats": pool.repeats * CHUNK * ROW}  # fmt: skip
                self.curve.append(entry)
                print(json.dumps(entry), flush=True)
                total.zero_()
                since, shown = 0, elapsed
        return steps


def save(net: Qwen3, out: Path) -> None:
    """Write config and bf16 weights under the names Hugging Face uses."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in net.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(net.shape.hf_config(), indent=2) + "\n")


def score(net: Qwen3, args: argparse.Namespace) -> dict[str, list[int]]:
    """Evaluate the rounded weights in bf16 and print the report."""
    import evaluate
    from decode import Decoder
    from tokenizers import Tokenizer

    rounded = Qwen3(net.shape).to(args.device)
    rounded.load_state_dict(net.state_dict())
    rounded = rounded.bfloat16()
    decoder, tokenizer = Decoder(rounded, {0, 2}), Tokenizer.from_file(args.tokenizer)
    right, wrong = evaluate.run_all(decoder, tokenizer, args.eval)
    text = evaluate.report(right, wrong, 4) + "\n" + evaluate.demos(decoder, tokenizer)
    (args.out / "report.txt").write_text(
        evaluate.report(right, wrong, 30) + "\n" + evaluate.demos(decoder, tokenizer)
    )
    print(text, flush=True)
    return {k: list(v) for k, v in right.items()}


def profile(trainer: Trainer, pool: Pool) -> None:
    """Print where the time of a few steps goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    with watch(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(4):
            trainer.step(pool, 0.0)
        torch.cuda.synchronize()
    print(
        seen.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=16, max_name_column_width=60
        )
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--hold", type=float, default=0.4)
    parser.add_argument("--capacity", type=int, default=13_000)
    parser.add_argument("--every", type=float, default=15)
    parser.add_argument("--eval", type=int, default=400)
    parser.add_argument("--resume", default="")
    parser.add_argument("--note", default="")
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse()
    began = time.time()
    feed = Feed(Path(args.tokenizer), args.seed, args.workers)  # fork before the device is touched
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    if args.device == "cuda":
        check_attention(args.device)
    trainer = Trainer(args)
    pool = Pool(args.capacity, args.device)
    threading.Thread(target=pool.receive, args=(feed,), daemon=True).start()
    seen: set[int] = set()
    while len(seen) < 2:  # both sorts of batch get compiled
        seen.add(pool.longest[pool.served] if pool.filled > pool.served else SHORT)
        trainer.step(pool, 0.0)
    if args.profile:
        profile(trainer, pool)
    print(
        f"ready after {time.time() - began:.0f} s, {os.cpu_count()} cores, {pool.filled} rows",
        flush=True,
    )
    started = time.time()
    steps = trainer.run(pool)
    seconds = time.time() - started
    feed.close()
    save(trainer.net, args.out)
    tokens = steps * CHUNK * ROW
    print(
        f"{steps} steps, {tokens / 1e6:.0f} M tokens, {tokens / seconds / 1e6:.2f} M/s, saved",
        flush=True,
    )
    record = {"note": args.note, "seconds": round(seconds, 1), "steps": steps, "tokens": tokens,
              "fresh_tokens": min(pool.filled * CHUNK * ROW, tokens), "final_loss": trainer.curve[-1]["loss"] if trainer.curve else None,
              "settings": {k: str(v) for k, v in vars(args).items()}, "packing": [ROW, LONG_SHARE, PROMPT_WEIGHT],
              "curve": trainer.curve, "machine": torch.cuda.get_device_name() if args.device == "cuda" else "cpu"}  # fmt: skip
    (args.out / "run.json").write_text(json.dumps(record))
    record["scores"] = score(trainer.net, args)
    (args.out / "run.json").write_text(json.dumps(record))
    print(f"done after {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
