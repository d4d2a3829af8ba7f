"""Attention backends over the paged KV cache, and their selection."""
