"""GPU bodies of the ops in Triton, by family. See quire/kernels/framework/op.py."""
