"""Sampling: logits to token ids."""
