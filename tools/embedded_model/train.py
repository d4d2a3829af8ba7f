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
from packing import DOCS, LONG_SHARE, PROMPT_WEIGHT, ROW, Feed
from torch import Tensor, nn

LONGEST = 4096


class Pool:
    """All rows received so far, on the device; unseen rows are served first."""

    def __init__(self, capacity: int, device: str) -> None:
        self.tokens = torch.zeros(capacity, ROW, dtype=torch.int16, device=device)
        self.weights = torch.zeros(capacity, ROW, dtype=torch.float16, device=device)
        self.starts = torch.zeros(capacity, DOCS + 1, dtype=torch.int32, device=device)
        self.capacity, self.filled, self.served, self.repeats = capacity, 0, 0, 0
        self.random = random.Random(1)

    def receive(self, feed: Feed) -> None:
        """Thread body: move rows from the workers to the device."""
        while self.filled + 16 <= self.capacity and not feed.stop.is_set():
            try:
                tokens, weights, starts = feed.queue.get(timeout=1)
            except Exception:  # noqa: BLE001 - queue.Empty, or the queue was closed at the end
                continue
            at, n = self.filled, len(tokens)
            self.tokens[at : at + n] = torch.from_numpy(tokens).to(self.tokens.device)
            self.weights[at : at + n] = torch.from_numpy(weights).to(self.tokens.device)
            self.starts[at : at + n] = torch.from_numpy(starts).to(self.tokens.device)
            torch.cuda.current_stream().synchronize() if self.tokens.is_cuda else None
            self.filled = at + n

    def pick(self, rows: int) -> list[int]:
        while self.filled < rows:
            time.sleep(0.05)
        if self.filled - self.served >= rows:
            chosen = list(range(self.served, self.served + rows))
            self.served += rows
            return chosen
        self.repeats += rows
        return self.random.sample(range(self.filled), rows)

    def batch(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(ids, targets, weights, positions, cu) of a packed batch, [rows * ROW] each but cu."""
        index = torch.tensor(self.pick(rows), device=self.tokens.device)
        ids = self.tokens[index].long()
        targets = torch.roll(ids, -1, 1)
        starts = self.starts[index].long()
        t = torch.arange(ROW, device=ids.device).expand(rows, ROW).contiguous()
        doc = torch.searchsorted(starts, t, right=True) - 1
        positions = t - starts.gather(1, doc)
        offsets = torch.arange(rows, device=ids.device)[:, None] * ROW
        cu = torch.cat(((starts + offsets)[:, :-1].flatten(), torch.tensor([rows * ROW], device=ids.device)))
        return ids.flatten(), targets.flatten(), self.weights[index].float().flatten(), positions.flatten(), cu.int()


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

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
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
    q, k, v = (torch.randn(512, 8, 32, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
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
        self.adam = torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.loss_fn = torch.compile(self.net.loss) if args.device == "cuda" else self.net.loss
        self.curve: list[dict[str, float]] = []

    def step(self, pool: Pool, share: float) -> Tensor:
        factor = factor_at(share, self.args.hold)
        ids, targets, weights, positions, cu = pool.batch(self.args.rows)
        with torch.autocast(self.args.device, torch.bfloat16):
            loss = self.loss_fn(ids, targets, weights, positions, cu, LONGEST)
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
                         "tokens": steps * self.args.rows * ROW, "fresh": pool.filled * ROW, "repeats": pool.repeats * ROW}  # fmt: skip
                self.curve.append(entry)
                print(json.dumps(entry), flush=True)
                total.zero_()
                since, shown = 0, elapsed
        return steps


def save(net: Qwen3, out: Path) -> None:
    """Write config and bf16 weights under the names Hugging Face uses."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in net.state_dict().items()}
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
    (args.out / "report.txt").write_text(evaluate.report(right, wrong, 30) + "\n" + evaluate.demos(decoder, tokenizer))
    print(text, flush=True)
    return {k: list(v) for k, v in right.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--hold", type=float, default=0.4)
    parser.add_argument("--capacity", type=int, default=160_000)
    parser.add_argument("--every", type=float, default=15)
    parser.add_argument("--eval", type=int, default=400)
    parser.add_argument("--resume", default="")
    parser.add_argument("--note", default="")
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
    trainer.step(pool, 0.0)  # compiles
    print(f"ready after {time.time() - began:.0f} s, {os.cpu_count()} cores, {pool.filled} rows", flush=True)
    started = time.time()
    steps = trainer.run(pool)
    seconds = time.time() - started
    feed.close()
    save(trainer.net, args.out)
    tokens = steps * args.rows * ROW
    print(f"{steps} steps, {tokens / 1e6:.0f} M tokens, {tokens / seconds / 1e6:.2f} M/s, saved", flush=True)
    record = {"note": args.note, "seconds": round(seconds, 1), "steps": steps, "tokens": tokens,
              "fresh_tokens": min(pool.filled * ROW, tokens), "final_loss": trainer.curve[-1]["loss"] if trainer.curve else None,
              "settings": {k: str(v) for k, v in vars(args).items()}, "packing": [ROW, LONG_SHARE, PROMPT_WEIGHT],
              "curve": trainer.curve, "machine": torch.cuda.get_device_name() if args.device == "cuda" else "cpu"}  # fmt: skip
    (args.out / "run.json").write_text(json.dumps(record))
    record["scores"] = score(trainer.net, args)
    (args.out / "run.json").write_text(json.dumps(record))
    print(f"done after {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
