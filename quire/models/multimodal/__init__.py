"""Media encoders: one file per model type of a multimodal checkpoint, found by its name."""
