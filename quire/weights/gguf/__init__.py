"""GGUF files: the container, and the tensors of a model in it."""
