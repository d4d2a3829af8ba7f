"""Triton kernels that read whole rows: norms, embedding, RoPE."""
