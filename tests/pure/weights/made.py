"""Safetensors files made by hand, good and bad."""

import json

BYTES = {"F32": 4, "BF16": 2, "U8": 1}


def safetensors(path, tensors, *, header=None, cut=0, metadata=None):
    """Write {name: (dtype, shape)} full of zeros. header: use this JSON text. cut: bytes missing."""
    entries, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = BYTES[dtype]
        for n in shape:
            size *= n
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    if metadata:
        entries["__metadata__"] = metadata
    text = (header if header is not None else json.dumps(entries)).encode()
    whole = len(text).to_bytes(8, "little") + text + bytes(at)
    path.write_bytes(whole[: len(whole) - cut])


def index(path, weight_map):
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
