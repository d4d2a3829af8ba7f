"""Byte alphabet: the printable character that byte-level tokenizers write for each byte."""

from __future__ import annotations


def byte_alphabet() -> dict[int, str]:
    """byte -> character: itself where printable, else the next one from U+0100 on.

    Source: the byte-to-unicode table published with GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet]
    return alphabet | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
