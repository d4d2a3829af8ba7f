"""Pooling: turns the hidden states of prompts into vectors, logits of labels, or one per token."""
