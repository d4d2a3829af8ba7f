"""CUDA worker: graphs, pinned memory, staging buffers."""
