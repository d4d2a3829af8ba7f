"""Triton kernels of element-wise ops."""
