"""Quantization methods: storage and products of weights; one file per method, found by name."""
