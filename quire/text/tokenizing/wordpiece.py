"""BERT's tokenizer from a vocab.txt, for folders without a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from quire.config.json_file import MAX_BYTES, read_text
from quire.errors import ConfigError
from quire.text.tokenizing.folder_check import BERT_VOCABULARY

BERT_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


def load_wordpiece(
    folder: Path, settings: Mapping[str, Any], named: Mapping[str, str]
) -> FastTokenizer:
    """Build it. named: special tokens by name. Raises ConfigError."""
    path = folder / BERT_VOCABULARY
    lines = read_text(path, MAX_BYTES).split("\n")
    if lines[-1] == "":
        lines.pop()
    vocab = {line: i for i, line in enumerate(lines)}
    needed = [named[name] for name in ("unk_token", "cls_token", "sep_token")]
    lacks = [token for token in needed if token not in vocab]
    if lacks:
        raise ConfigError(f"{path} has no {', '.join(lacks)}, which the tokenizer needs")
    tokenizer = FastTokenizer(models.WordPiece(vocab, unk_token=named["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars") is not False,
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case") is not False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    first, last = named["cls_token"], named["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(one, vocab[one]) for one in (first, last)],
    )
    return tokenizer
