"""Prompts of benchmarks: random token ids, or read from a file. Equal seeds give equal prompts.

Random ids are below the vocabulary's size and above the first few, which are often special tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

FIRST_RANDOM_TOKEN_ID = 10


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request: a prompt (token ids or text) and the number of tokens to generate."""

    prompt: tuple[int, ...] | str
    output_len: int


WORKLOADS = ("random", "sharegpt", "custom", "prefix_repetition")


def add_workload_flags(
    parser: argparse.ArgumentParser, *, prompts: int, seed: Sequence[str] = ()
) -> None:
    """Add the flags that `items` reads. seed: further names of --workload-seed."""
    group = parser.add_argument_group("workload")
    group.add_argument("--dataset-name", choices=WORKLOADS, default=None)
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help="sharegpt: JSON of conversations; custom: JSON lines with prompt, output_tokens",
    )
    group.add_argument("--num-prompts", type=int, default=prompts)
    group.add_argument("--input-len", "--random-input-len", type=int, default=1024)
    lengths = ("random", "sharegpt", "custom", "prefix-repetition")
    names = ("--output-len", *(f"--{one}-output-len" for one in lengths))
    group.add_argument(*names, type=int, default=None, help="tokens per answer")
    group.add_argument("--prefix-len", "--random-prefix-len", type=int, default=0)
    group.add_argument(
        "--range-ratio",
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="random lengths vary by this fraction of input-len and output-len (0 to 1)",
    )
    for name, default in PREFIX_REPETITION_DEFAULTS.items():
        group.add_argument(f"--prefix-repetition-{name}", type=int, default=default)
    group.add_argument("--workload-seed", *seed, type=int, default=0, help="seed of the prompts")


PREFIX_REPETITION_DEFAULTS = {"num-prefixes": 10, "prefix-len": 256, "suffix-len": 256}
"""Add the flags of prefix_repetition: several prefixes, each with an equal share of prompts."""


def build_requests(args: argparse.Namespace, vocab: int) -> list[SampleRequest]:
    """Return the requests that the flags describe. Raises ConfigError."""
    check_workload(args)
    name = args.dataset_name or ("sharegpt" if args.dataset_path else "random")
    rng = random.Random(args.workload_seed)
    if name == "random":
        return _random_requests(args, vocab, rng)
    if name == "prefix_repetition":
        return _prefix_repetition_requests(args, vocab, rng)
    if args.dataset_path is None:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path FILE")
    found = _read_dataset(Path(args.dataset_path), name, args.output_len)
    if not found:
        raise ConfigError(f"{args.dataset_path} has no prompts in the format of {name!r}")
    rng.shuffle(found)
    times = -(-args.num_prompts // len(found))
    return (found * times)[: args.num_prompts]


def check_workload(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that describe no workload."""
    for name, least in (("num_prompts", 1), ("input_len", 1), ("prefix_len", 0)):
        if getattr(args, name) < least:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} must be >= {least}, got {getattr(args, name)}")
    if args.output_len is not None and args.output_len < 1:
        raise ConfigError(f"--output-len must be >= 1, got {args.output_len}")
    if not 0 <= args.range_ratio <= 1:
        raise ConfigError(f"--range-ratio must be in [0, 1], got {args.range_ratio}")


def _random_requests(
    args: argparse.Namespace, vocab: int, rng: random.Random
) -> list[SampleRequest]:
    low = min(FIRST_RANDOM_TOKEN_ID, vocab - 1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(low, vocab) for _ in range(count))

    def length(around: int) -> int:
        spread = int(around * args.range_ratio)
        return max(1, rng.randint(around - spread, around + spread))

    prefix, answer = ids(args.prefix_len), args.output_len or 128
    return [
        SampleRequest(prefix + ids(length(args.input_len)), length(answer))
        for _ in range(args.num_prompts)
    ]


def _prefix_repetition_requests(
    args: argparse.Namespace, vocab: int, rng: random.Random
) -> list[SampleRequest]:
    """Return prompts with shared prefixes, in groups, shuffled."""
    low = min(FIRST_RANDOM_TOKEN_ID, vocab - 1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(low, vocab) for _ in range(count))

    count, answer = args.prefix_repetition_num_prefixes, args.output_len or 128
    if min(count, args.prefix_repetition_prefix_len, args.prefix_repetition_suffix_len) < 1:
        raise ConfigError("--prefix-repetition-* must be >= 1")
    prefixes = [ids(args.prefix_repetition_prefix_len) for _ in range(count)]
    found = [
        SampleRequest(prefixes[n % count] + ids(args.prefix_repetition_suffix_len), answer)
        for n in range(args.num_prompts)
    ]
    rng.shuffle(found)
    return found


def decode_prompts(work: Sequence[SampleRequest], tokenizer: str | None) -> list[SampleRequest]:
    """Return the same prompts as text, made with a tokenizer; None: unchanged."""
    if tokenizer is None:
        return list(work)
    from quire.text.tokenizing.tokenizer import load_tokenizer
    from quire.weights.files import resolve_model_folder

    loaded = load_tokenizer(resolve_model_folder(tokenizer, want="tokenizer"))
    return [
        one
        if isinstance(one.prompt, str)
        else SampleRequest(loaded.decode(list(one.prompt)), one.output_len)
        for one in work
    ]


def _read_dataset(path: Path, name: str, output_len: int | None) -> list[SampleRequest]:
    try:
        text = path.read_text()
        if name == "custom":
            lines = [json.loads(line) for line in text.splitlines() if line.strip()]
            return [_custom_request(one, output_len) for one in lines]
        talks = json.loads(text)
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--dataset-path {path} is not a {name} file: {error!r}") from None
    found = [_sharegpt_request(one, output_len) for one in talks]
    return [one for one in found if one is not None]


def _custom_request(line: dict[str, Any], output_len: int | None) -> SampleRequest:
    prompt = line["prompt"]
    prompt = prompt if isinstance(prompt, str) else tuple(prompt)
    return SampleRequest(prompt, output_len or int(line.get("output_tokens", 128)))


def _sharegpt_request(conversation: dict[str, Any], output_len: int | None) -> SampleRequest | None:
    """Return the first question of a conversation; its answer has the recorded length."""
    turns: Sequence[dict[str, Any]] = conversation.get("conversations") or ()
    if len(turns) < 2 or not turns[0].get("value"):
        return None
    words = max(4, len(str(turns[1].get("value", ""))) // 4)
    return SampleRequest(str(turns[0]["value"]), output_len or words)
