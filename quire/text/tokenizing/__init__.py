"""Tokenizers, detokenizers and the bytes of tokens."""
