"""Triton kernels of multi-head latent attention."""
