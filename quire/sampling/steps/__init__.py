"""Sampling steps: one file per change to the logits."""
