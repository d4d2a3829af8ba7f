"""Times the processing of one image: quire's worker and encoder against transformers' processors.

    python bench/media_processor.py [--sides 512 1024] [--rounds 60] [--threads 1]

Milliseconds of processor time, the least of the rounds, in which all take turns; with more threads of
torch milliseconds by the clock. Needs torchvision. The families after Qwen's resize in the worker, by
the native library, and leave to the encoder what is linear: it normalizes and cuts patches, here on
this CPU. Behind times of quire: how many times as fast as transformers, without that and with it.
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
    Gemma3ImageProcessor,
    GotOcr2ImageProcessor,
    Idefics3ImageProcessor,
    Llama4ImageProcessor,
    LlavaNextImageProcessor,
    LlavaOnevisionImageProcessor,
    Phi4MultimodalImageProcessor,
    PixtralImageProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessor,
)

from quire.media.image_ops import from_tensor
from quire.media.native.library import find_library, load_library
from quire.media.processor import DecodedImage, MediaProcessor, ProcessorFiles, processor_type
from quire.models.base import EncoderInput
from quire.models.multimodal._base import normalized_patches
from quire.models.multimodal.qwen2_5_vl import Encoder
from quire.sandbox.heap import keep_freed_memory

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
    "llava_onevision": (LlavaOnevisionImageProcessor(), {"image_size": 384}),
    "idefics3": (Idefics3ImageProcessor(), {"image_size": 364}),
    "mistral3": (PixtralImageProcessor(size={"longest_edge": 1540}, patch_size=14), {}),
    "gemma3": (
        Gemma3ImageProcessor(size={"height": 896, "width": 896}, do_pan_and_scan=False),
        {"image_size": 896},
    ),
    "llama4": (Llama4ImageProcessor(), {"image_size": 336}),
    "phi4_multimodal": (Phi4MultimodalImageProcessor(), {"image_size": 448}),
    "clip": (CLIPImageProcessor(), {}),
    "siglip": (SiglipImageProcessor(), {}),
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
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    keep_freed_memory()  # as workers do
    load_library(find_library())
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
        for name, (peer, _) in OTHERS.items():
            times[f"transformers, {name}"] = partial(peer, image, return_tensors="pt")
            times[f"quire, {name}"] = call = partial(other(name).process, decoded, {})
            arrays = {one.name: torch.from_numpy(from_tensor(one).copy()) for one in call().tensors}
            pixels = arrays["pixels"].reshape(-1, *arrays["pixels"].shape[-3:])
            times[f"encoder, {name}"] = partial(
                normalized_patches, pixels, arrays["scale_shift"], 14, torch.float32
            )
        least = least_ms(times, args.rounds, clock)
        for name, ms in least.items():
            line = f"{side:5} {name:34} {ms:8.2f} ms"
            if name.startswith("quire, ") and (of := name.removeprefix("quire, ")) in OTHERS:
                peer_ms, encoder_ms = least[f"transformers, {of}"], least[f"encoder, {of}"]
                line += f" {peer_ms / ms:6.2f} x {peer_ms / (ms + encoder_ms):6.2f} x"
            print(line)


def least_ms(
    calls: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Least time of each call, after two rounds that do not count."""
    least = dict.fromkeys(calls, float("inf"))
    for i in range(rounds + 2):
        for name, call in calls.items():
            start = clock()
            call()
            took = 1000 * (clock() - start)
            if i >= 2:
                least[name] = min(least[name], took)
    return least


if __name__ == "__main__":
    main()
