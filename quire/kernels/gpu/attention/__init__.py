"""Triton kernels of paged attention and KV cache writes."""
