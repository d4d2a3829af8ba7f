"""Triton kernels of mixture-of-experts layers."""
