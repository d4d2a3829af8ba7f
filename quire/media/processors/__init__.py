"""Processors of model families: `<outer model_type>.py` defines `Processor(MediaProcessor)`.

A model_type with a hyphen has a file with an underscore.
"""
