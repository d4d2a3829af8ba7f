"""Ops: a file per op with reference and test cases; bodies in native/ (C++) and gpu/ (Triton)."""
