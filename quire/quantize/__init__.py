"""`quire quantize`: writes a quantized copy of a checkpoint, as compressed-tensors or GGUF."""
