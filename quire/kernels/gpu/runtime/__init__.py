"""Launch helpers of GPU kernels."""
