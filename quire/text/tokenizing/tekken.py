"""Tekken: builds a tokenizer of the tokenizers library from Mistral's tekken.json.

    id = rank of a special token, or number of special tokens + rank of a run of bytes

The file has the bytes of each token by rank and a regular expression that cuts a text first, as for
tiktoken: of all neighbours, those that join to the token of the lowest rank are joined next. The
library wants the joins themselves, in this order.

Source: https://github.com/mistralai/mistral-common, docs and tekken.json files of
https://huggingface.co/mistralai
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from quire.config.json_file import read_json_object
from quire.errors import ConfigError
from quire.text.tokenizing.byte_alphabet import byte_alphabet

TEKKEN_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
OLD_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Special tokens of files up to version 7, which do not list them."""
MAX_TOKENS = 1 << 22
MAX_TOKEN_BYTES = 1 << 12


def load_tekken(path: Path) -> FastTokenizer:
    """Build the tokenizer of a tekken.json. Raises ConfigError, and whatever a bad file causes."""
    data = read_json_object(path)
    try:
        return _build(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _build(data: Mapping[str, Any]) -> FastTokenizer:
    config = data["config"]
    specials = _special_tokens(data, _count(config, "default_num_special_tokens"))
    size = _count(config, "default_vocab_size") - len(specials)
    ranks = _ranks(data["vocab"], size)
    alphabet = byte_alphabet()
    write = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    vocab = {name: i for i, name in enumerate(specials)}
    vocab |= {write[token]: len(specials) + rank for token, rank in ranks.items()}
    if len(vocab) != len(specials) + len(ranks):
        raise ConfigError("a special token is spelled like another token")
    merges = [(write[left], write[right]) for left, right in _merges(ranks)]
    tokenizer = FastTokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in specials]
    )
    bos = TEKKEN_TOKENS["bos_token"]
    if bos in specials:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A $B",
            special_tokens=[(bos, specials.index(bos))],
        )
    return tokenizer


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config[name]
    if type(value) is not int or not 0 < value <= MAX_TOKENS:
        raise ConfigError(f"{name} is {value!r:.40}; it must be from 1 to {MAX_TOKENS}")
    return value


def _special_tokens(data: Mapping[str, Any], count: int) -> list[str]:
    """By id. Ids without a name of their own have one of the form <SPECIAL_20>."""
    listed = data.get("special_tokens")
    if listed is None:
        named = dict(enumerate(OLD_SPECIAL_TOKENS))
    else:
        named = {one["rank"]: one["token_str"] for one in listed}
        if len(named) != len(listed):
            raise ConfigError("two special tokens have the same rank")
    if any(type(rank) is not int or not 0 <= rank < count for rank in named):
        raise ConfigError(f"special tokens have ranks outside of 0 to {count - 1}")
    found = [str(named.get(i, f"<SPECIAL_{i}>")) for i in range(count)]
    if len(set(found)) != count:
        raise ConfigError("two special tokens have the same name")
    return found


def _ranks(vocab: Sequence[Mapping[str, Any]], size: int) -> dict[bytes, int]:
    """Bytes -> rank of the first `size` tokens, by rank."""
    found: dict[bytes, int] = {}
    for one in sorted(vocab, key=lambda one: int(one["rank"]))[: max(size, 0)]:
        try:
            token = base64.b64decode(one["token_bytes"], validate=True)
        except (binascii.Error, TypeError):
            raise ConfigError(f"token_bytes of rank {one['rank']} is not base64") from None
        if not 0 < len(token) <= MAX_TOKEN_BYTES or one["rank"] != len(found) or token in found:
            raise ConfigError(
                f"the tokens up to {size} must have the ranks 0, 1, 2, ... and different bytes; "
                f"that of rank {one['rank']!r:.40} does not"
            )
        found[token] = len(found)
    if len(found) != size or any(bytes([byte]) not in found for byte in range(256)):
        raise ConfigError(
            f"it has {len(found)} of {size} tokens; it must have all, the 256 single bytes included"
        )
    return found


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """All joins that make a token, by its rank: whatever two parts are there may be joined."""
    for token in ranks:
        for cut in range(1, len(token)):
            if token[:cut] in ranks and token[cut:] in ranks:
                yield token[:cut], token[cut:]
