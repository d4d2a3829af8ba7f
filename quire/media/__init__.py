"""Media of prompts: images, videos and recordings become tensors and placeholder tokens.

    fetch ─ decode ─ process (in worker processes) ─ cache ─ expand (on token ids) ─ Request.media

    processor.py      contract of a model family: what it makes of one item
    processors/       one file per outer model_type: registry "quire.media.processors"
    image_ops.py      pixel operations that families share
    native/           resizing in C++, with the pixels of PIL

It has no device and no torch. Encoders of the families: quire.models.multimodal.
"""
