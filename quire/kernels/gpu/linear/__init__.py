"""Triton kernels of matrix products, plain and FP8."""
