"""Writes docs/models.md from the table of architectures: python tools/models.py. A test proves the
page current."""

from __future__ import annotations

from pathlib import Path

from quire.config.architectures import Architecture, architectures
from quire.config.pooling import SUFFIXES

PAGE = Path(__file__).resolve().parents[1] / "docs/models.md"
HEAD = """# Models

Made by `python tools/models.py` from `quire/config/architectures.py` and the files of `quire/models`; do
not edit it by hand. `quire models` prints it, `quire models NAME` a part of it, `--json` as JSON.

- **native**: a file of `quire/models`. [Adding a model](adding-a-model.md) has the steps.
- **transformers**: the class of `transformers` computes, with quire's attention, linear layers and experts; paged
  cache, prefix caching, preemption, quantization and structured output are those of native models.
  `--model-impl transformers` chooses it for a native model too.
- **refused**: a start ends with the reason, before any weight is read.

Both kinds have the log-probabilities of `transformers` within 1e-4: each architecture is compared as a tiny random
model, several sequences in a step, in chunks and token by token, with windows, rotary scaling and multipliers in
effect. Native models are compared in `tests/cpu/models`, those with an encoder in `tests/cpu/encoder_decoder`, encoders in
`tests/cpu/encoders`, the others in `tests/cpu/models/fallback`.

A model type that is not here is tried with its class in the installed `transformers`, or with the code of its folder
(`--trust-remote-code`). A forward pass without memory shows every attention call; what the engine cannot serve
exactly is refused with the layer and the reason.

In a multimodal checkpoint the text half counts (`text_config`). **text and media**: images, and video or audio where
the model has them, are read too, if its text half is native. Their towers are compared with `transformers` in
`tests/cpu/multimodal`. **as text**: prompts with media are refused. **from its description**: the model's code is in its repository
of the hub alone, and is not run. `tests/cpu/multimodal/test_hub_*.py` compare tensors by name, towers and projectors with relatives
in `transformers` or with plain float32 forms, and tokens and tiles with tables; no answer of the original was compared.

What a model does ([pooling.md](pooling.md)) follows from its files (`modules.json` of sentence-transformers), else its class:

| class ends with | runner | head |
|---|---|---|
{suffixes}

Decoders below, native or through `transformers`, can be converted: `--runner pooling --convert embed` (the last state
is the embedding) or `--convert classify` (the checkpoint has a `score`, or labels are logits of tokens). An
encoder-decoder only generates.
"""


def page() -> str:
    """The whole page."""
    rows = architectures()
    parts = [HEAD.replace("{suffixes}", _suffixes())]
    encoders = [row for row in rows if "generate" not in row.tasks and row.tasks]
    parts.append(_table(f"Encoders ({len(encoders)})", encoders, "what"))
    for title, served, last in (
        ("Native", "native", "what"),
        ("Through transformers", "transformers", "what"),
        ("Refused", "refused", "because"),
    ):
        some = [row for row in rows if row.served == served and row not in encoders]
        parts.append(_table(f"{title} ({len(some)})", some, last))
    return "\n".join(parts)


def _suffixes() -> str:
    heads = {"embed": "none: embeddings", "classify": "classifies", "none": "generates"}
    merged: dict[tuple[str, str], list[str]] = {}
    for suffix, runner, convert in SUFFIXES:
        merged.setdefault((runner, convert), []).append(f"`{suffix}`")
    return "\n".join(
        f"| {', '.join(ends)} | {runner} | {heads[convert]} |"
        for (runner, convert), ends in merged.items()
    )


def _table(title: str, rows: list[Architecture], last: str) -> str:
    noted = any(row.note for row in rows)
    head = ["architecture", "model type", *([last] if noted else [])]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [f"`{row.name}`", f"`{row.model_type}`", *([row.note] if noted else [])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([f"## {title}", "", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {page().count(chr(10))} lines")
