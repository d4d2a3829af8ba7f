"""Times the processing of one image: quire's worker and encoder against transformers' processors.

    python bench/media_processor.py [--sides 512 1024] [--rounds 60]

One thread, milliseconds of processor time, the least of the rounds. Needs torchvision. The families
after Qwen's resize in the worker, and leave to the encoder what is linear.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessor,
    GotOcr2ImageProcessor,
    LlavaNextImageProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessor,
)

from quire.media.image_ops import from_tensor
from quire.media.processor import DecodedImage, MediaProcessor, ProcessorFiles, processor_type
from quire.models.base import EncoderInput
from quire.models.multimodal.qwen2_5_vl import Encoder

SIZE = {"shortest_edge": 56 * 56, "longest_edge": 12_845_056}
HF = {
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "depth": 1, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64,
        "out_hidden_size": 64, "patch_size": 14,
    },
}  # fmt: skip


CROP = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
OTHERS = {
    "llava": (CLIPImageProcessor(**CROP), {"model_type": "clip_vision_model", "image_size": 336}),
    "paligemma": (SiglipImageProcessor(size={"height": 448, "width": 448}), {"image_size": 448}),
    "internvl": (
        GotOcr2ImageProcessor(size={"height": 448, "width": 448}, crop_to_patches=True),
        {"image_size": [448, 448], "patch_size": [14, 14]},
    ),
    "llava_next": (
        LlavaNextImageProcessor(**CROP, image_grid_pinpoints=GRIDS),
        {"model_type": "clip_vision_model", "image_size": 336},
    ),
}
"""Model type -> transformers' fast processor, fields of the tower."""


def other(model_type: str) -> MediaProcessor:
    """Make quire's processor of the same settings."""
    fast, vision = OTHERS[model_type]
    config = {"text_config": {"hidden_size": 64}, "vision_config": {"patch_size": 14} | vision}
    config |= {"image_token_index": 5, "image_grid_pinpoints": GRIDS}
    family = processor_type(model_type)
    assert family is not None
    return family(ProcessorFiles(config, {"image": fast.to_dict()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sides", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    fast, slow = Qwen2VLImageProcessor(size=SIZE), Qwen2VLImageProcessorPil(size=SIZE)
    family = processor_type("qwen2_5_vl")
    assert family is not None
    processor, encoder = family(ProcessorFiles(HF, {"image": fast.to_dict()})), Encoder.from_hf(HF)
    for side in args.sides:
        small = np.random.default_rng(0).integers(0, 256, (side // 8, side // 8, 3), np.uint8)
        image = Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)
        decoded = DecodedImage(np.asarray(image))
        made = processor.process(decoded, {})
        tensors = {one.name: torch.from_numpy(from_tensor(one).copy()) for one in made.tensors}
        times = {
            "transformers, torchvision": partial(fast, image, return_tensors="pt"),
            "transformers, PIL": partial(slow, image, return_tensors="pt"),
            "quire, in the worker": partial(processor.process, decoded, {}),
            "quire, in the encoder on this CPU": partial(
                encoder.patches_of, EncoderInput("image", tensors)
            ),
        }
        for name in OTHERS:
            call = partial(OTHERS[name][0], image, return_tensors="pt")
            times[f"transformers, {name}"] = call
            times[f"quire, {name}"] = partial(other(name).process, decoded, {})
        for name, call in times.items():
            print(f"{side:5} {name:34} {least_ms(call, args.rounds):8.2f} ms")


def least_ms(call: Callable[[], object], rounds: int) -> float:
    """Least processor time of a call."""
    found = []
    for _ in range(rounds + 2):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return 1000 * min(found[2:])


if __name__ == "__main__":
    main()
