"""Triton bodies of the ops, one file per op of the same name. See quire/kernels/framework/op.py."""
