"""GPU kernels of low-rank adapters."""
