"""Tensor, pipeline and data parallelism: the mesh of processes and their collectives."""
