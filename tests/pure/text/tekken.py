"""A small tekken.json, and what tiktoken's algorithm makes of a text with it."""

import base64
import json
from itertools import pairwise

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIALS = 30
PARTS = """
    th he the in an er on re at ou st en is to or it ng ing and nd of al ent ion tion
    aa aaa aaaa aaaaa ab aba abab ba bab 12 ö öß € 日 日本 日本語 🙂
"""


def tokens():
    """Bytes of all tokens, by rank."""
    found = [bytes([byte]) for byte in range(256)]
    words = PARTS.split()
    for word in [*words, *(f" {word}" for word in words), "  ", "    "]:
        if word.encode() not in found:
            found.append(word.encode())
    return found


def tekken(*, specials=SPECIALS, **more):
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for i, token in enumerate(tokens())
    ]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) + specials,
        "default_num_special_tokens": specials,
        "version": "v3",
    }
    return {"config": config, "vocab": vocab, "type": "Tekken", "version": 1} | more


def write_tekken(folder, **more):
    (folder / "tekken.json").write_text(json.dumps(tekken(**more)))
    return folder


def reference(text):
    """Ids by tiktoken's rule: join the leftmost pair of the lowest rank, over and over."""
    import regex

    ranks, found = {token: i for i, token in enumerate(tokens())}, []
    for piece in regex.findall(PATTERN, text):
        data = piece.encode()
        if data in ranks:
            found.append(SPECIALS + ranks[data])
            continue
        parts = [data[i : i + 1] for i in range(len(data))]
        while True:
            pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
            if not pairs or min(pairs) == len(ranks):
                break
            at = pairs.index(min(pairs))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [SPECIALS + ranks[part] for part in parts]
    return found
