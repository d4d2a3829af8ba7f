"""Texts for calibration, as token sequences of one length."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, RequestError
from quire.text.tokenizing.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)


def read_sequences(
    path: Path, folder: Path, *, samples: int, seqlen: int, seed: int
) -> list[list[int]]:
    """Tokenize the texts of a file, cut them into sequences, and choose some of them.

    path: .jsonl, each line an object with "text" or "messages"; else one text. folder: of the
    model, with its tokenizer. Raises ConfigError.
    """
    tokenizer = load_tokenizer(folder)
    ids = [token for text in _texts(path, tokenizer) for token in text]
    windows = [ids[at : at + seqlen] for at in range(0, len(ids) - seqlen + 1, seqlen)]
    if not windows:
        raise ConfigError(
            f"{path} has {len(ids)} tokens, fewer than one sequence of --seqlen {seqlen}"
        )
    if len(windows) <= samples:
        if len(windows) < samples:
            log.warning("%s has %d of %d sequences", path, len(windows), samples)
        return windows
    return random.Random(seed).sample(windows, samples)


def _texts(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from error
    if path.suffix != ".jsonl":
        yield tokenizer.encode(text)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _line_ids(line, f"{path}, line {number}", tokenizer)


def _line_ids(line: str, where: str, tokenizer: Tokenizer) -> list[int]:
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if isinstance(found, dict) and isinstance(found.get("text"), str):
        return tokenizer.encode(found["text"])
    if isinstance(found, dict) and isinstance(found.get("messages"), list):
        for one in found["messages"]:
            if not isinstance(one, dict) or not isinstance(one.get("role"), str):
                raise ConfigError(
                    f"{where}: a message is {one!r:.80}; it must have role and content"
                )
        try:
            text = tokenizer.apply_chat_template(found["messages"], tokenize=False)
        except (RequestError, ConfigError) as error:
            raise ConfigError(f"{where}: {error}") from error
        return tokenizer.encode(str(text), add_special_tokens=False)
    raise ConfigError(f"{where} must be an object with text (a string) or messages (a list)")
