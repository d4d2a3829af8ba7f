"""Triton kernels of recurrent layers: convolution, scans, and the gates beside them."""
