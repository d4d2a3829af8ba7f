"""Command-line flags for sampling, and their SamplingParams, for all commands that generate."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from quire.core.params import SamplingParams
from quire.errors import RequestError

FLAGS: Mapping[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens to generate"),
    "min_tokens": (int, "fewest tokens to generate"),
    "temperature": (float, "0: greedy"),
    "top_p": (float, "sample from the most likely tokens with this sum of probabilities"),
    "top_k": (int, "sample from the k most likely tokens"),
    "min_p": (float, "drop tokens less likely than this fraction of the most likely one"),
    "presence_penalty": (float, "in [-2, 2]"),
    "frequency_penalty": (float, "in [-2, 2]"),
    "repetition_penalty": (float, "> 0; above 1 discourages repetition"),
    "n": (int, "answers per prompt"),
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags. Those not given leave the model's defaults."""
    group = parser.add_argument_group("sampling")
    for name, (kind, about) in FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, dest=name, type=kind, default=argparse.SUPPRESS, help=about)
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text")
    group.add_argument("--ignore-eos", action="store_true", help="continue after the end token")
    group.add_argument(
        "--sampling-seed", type=int, metavar="SEED", help="make each request's sampling repeatable"
    )


def quiet_engine_options(args: argparse.Namespace) -> dict[str, object]:
    """Set engine options for interactive use in a terminal, unless they were given."""
    wanted: dict[str, object] = {"use_tqdm_on_load": False, "log_level": "WARNING"}
    return {name: value for name, value in wanted.items() if name not in vars(args)}


def has_max_tokens(args: argparse.Namespace, llm: Any) -> bool:
    """Whether the command line or the model's generation config limits the length."""
    return "max_tokens" in vars(args) or "max_tokens" in llm.llm_engine.config.sampling.defaults


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given flags as fields of a request to a server."""
    given: dict[str, Any] = {name: vars(args)[name] for name in FLAGS if name in vars(args)}
    if args.stop:
        given["stop"] = list(args.stop)
    if args.ignore_eos:
        given["ignore_eos"] = True
    if args.sampling_seed is not None:
        given["seed"] = args.sampling_seed
    return given


def parse_value(name: str, value: str) -> Any:
    """Parse the value of a sampling parameter. Raises RequestError."""
    if name not in FLAGS or name == "n":
        known = ", ".join(one for one in FLAGS if one != "n")
        raise RequestError(f"/set takes {known}; got {name!r}")
    try:
        return FLAGS[name][0](value)
    except ValueError:
        raise RequestError(f"{name} must be a number, got {value!r}") from None


def params_from_args(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """Return the defaults with the given flags applied, verified."""
    given: dict[str, Any] = {name: vars(args)[name] for name in FLAGS if name in vars(args)}
    params = defaults.clone()
    for name, value in given.items():
        setattr(params, name, value)
    if args.stop:
        params.stop = list(args.stop)
    if args.ignore_eos:
        params.ignore_eos = True
    if args.sampling_seed is not None:
        params.seed = args.sampling_seed
    params.verify()
    return params
