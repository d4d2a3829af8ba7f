"""Tiny models of Qwen's and GLM's multimodal families with random weights, in transformers."""

import numpy as np
import torch

from quire.media.image_ops import from_tensor
from quire.media.processor import (
    DecodedVideo,
    ExpandedItem,
    ProcessorFiles,
    VideoInfo,
    processor_type,
)
from tests.cpu.multimodal.families import image, tokenizer_of

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
VISION = {"depth": 4, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
IDS = {
    "vision_start_token_id": 190,
    "vision_end_token_id": 191,
    "image_token_id": 192,
    "video_token_id": 193,
}
DEEPSTACK = {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2], "patch_size": 16}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3],
    },
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
PLAIN = {"num_position_embeddings": 36, "patch_size": 16, "intermediate_size": 44}
GLM = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 2],
    }
}
GLM_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
}
FAMILIES = {
    "qwen2_vl": ({}, {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}),
    "qwen2_5_vl": ({}, {"intermediate_size": 44, "fullatt_block_indexes": [1, 3]} | VISION),
    "qwen3_vl": ({}, {"intermediate_size": 44} | DEEPSTACK | VISION),
    "glm4v": (GLM, {"intermediate_size": 44, "image_size": 70} | VISION),
    "glm4v_moe": (GLM | GLM_EXPERTS, {"intermediate_size": 44, "image_size": 70} | VISION),
    "glm_ocr": (GLM, {"intermediate_size": 44} | VISION),
    "qwen3_vl_moe": (EXPERTS, {"intermediate_size": 44} | DEEPSTACK | VISION),
    "qwen3_5": (DELTA_NET, PLAIN | VISION),
    "qwen3_5_moe": (DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 40}, PLAIN | VISION),
}
"""Outer model type -> (further fields of the text half, fields of the tower)."""


SPECIAL = {
    "<|vision_start|>": 190,
    "<|vision_end|>": 191,
    "<|image_pad|>": 192,
    "<|video_pad|>": 193,
}
GLM_SPECIAL = {
    "<|begin_of_image|>": 190,
    "<|end_of_image|>": 191,
    "<|image|>": 192,
    "<|video|>": 193,
    "<|begin_of_video|>": 194,
    "<|end_of_video|>": 195,
}
SIZES = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 20}
"""Bounds on pixels that most of the tests' images pass."""


TIMES = {f"<{i / 10:.1f}": 200 + i for i in range(400)}
"""Tokens of the first word of a time, for prompts that no model sees."""


def processor_of(family, *, pil=False, times=False):
    """A processor of transformers. times: its tokenizer tells the times of frames apart."""
    import transformers

    if family.startswith("glm"):
        images = getattr(transformers, f"Glm4vImageProcessor{'Pil' if pil else ''}")(size=SIZES)
        videos = transformers.Glm4vVideoProcessor(do_sample_frames=False, size=SIZES)
        return transformers.Glm4vProcessor(images, tokenizer_of(GLM_SPECIAL), videos)
    classes = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}
    newer = family.startswith("qwen3")
    name = classes.get(family, "Qwen3VL")
    settings = {"size": SIZES}
    if newer:
        settings |= {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = getattr(transformers, f"Qwen2VLImageProcessor{'Pil' if pil else ''}")(**settings)
    video = "Qwen3VLVideoProcessor" if newer else "Qwen2VLVideoProcessor"
    videos = getattr(transformers, video)(do_sample_frames=False, **settings)
    return getattr(transformers, f"{name}Processor")(
        images, tokenizer_of(SPECIAL | (TIMES if times else {})), videos
    )


def own_processor(processor, hf):
    """Ours, with the files that a processor of transformers would write beside a config.json."""
    tokenizer = processor.tokenizer
    files = ProcessorFiles(
        hf,
        {
            "image": processor.image_processor.to_dict(),
            "video": processor.video_processor.to_dict(),
        },
        {},
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.get_vocab().get,
    )
    return processor_type(hf["model_type"])(files)


def model_of(family):
    """A model of transformers whose weights are large enough to tell errors."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    from tests.cpu.models.peers import scale_weights

    text, vision = FAMILIES[family]
    sections = {"text_config": TEXT | text, "vision_config": vision}
    torch.manual_seed(2)
    glm = {"image_start_token_id": 190, "image_end_token_id": 191}
    ids = IDS | (glm if family.startswith("glm") else {})
    config = AutoConfig.for_model(family, **sections, **ids)
    model = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager").eval()
    scale_weights(model, 2.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def saved(family, folder):
    """Such a model, and its folder as the files are on the hub."""
    model = model_of(family)
    model.save_pretrained(folder)
    if (
        family == "qwen3_vl_moe"
    ):  # transformers turns what it has loaded back, but not a new model's
        from safetensors.torch import load_file, save_file

        path = folder / "model.safetensors"
        turned = {
            name: one.transpose(1, 2).contiguous() if ".experts." in name else one
            for name, one in load_file(path).items()
        }
        save_file(turned, path, {"format": "pt"})
    return model


def pixels_of(frames, height, width, seed=0):
    """Frames of a drawn gradient with noise: uint8 [F, H, W, 3]."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    smooth = np.stack((rows * 200 // height, columns * 200 // width, (rows + columns) % 200), -1)
    noise = rng.integers(0, 56, (frames, height, width, 3))
    return (smooth + noise).astype(np.uint8)


def scale_shift():
    """[2, 3]: what makes normalized numbers of bytes."""
    mean, std = np.array((0.48, 0.46, 0.41)), np.array((0.27, 0.26, 0.28))
    return np.stack((1 / (255 * std), -mean / std)).astype(np.float32)


def patches_of(pixels, patch, factors=None, merge=2):
    """(patches [P, 3 * 2 * patch^2], grid) as the processors of transformers make them."""
    frames = np.concatenate([pixels, pixels[-1:]]) if len(pixels) % 2 else pixels
    scale, shift = torch.from_numpy(scale_shift() if factors is None else factors)
    values = torch.from_numpy(frames) * scale + shift
    count, height, width, _ = values.shape
    rows, columns = height // patch, width // patch
    cut = values.permute(0, 3, 1, 2).reshape(
        count // 2, 2, 3, rows // merge, merge, patch, columns // merge, merge, patch
    )
    flat = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * patch**2)
    return flat, [count // 2, rows, columns]


def video_of(frames, height, width, fps=30.0, step=15, total=None):
    """Frames of a source of which every `step`-th was decoded."""
    pixels = np.stack([np.asarray(image(height, width, i)) for i in range(frames)])
    total = total or frames * step
    return DecodedVideo(
        pixels, VideoInfo(fps, tuple(i * step for i in range(frames)), total, total / fps)
    )


def patches_in(item, processor):
    """What the encoder makes of the tensors of an item: [P, 3 * 2 * patch^2]."""
    from torchvision.transforms.v2 import functional

    pixels, cells, factors = (from_tensor(one).copy() for one in item.tensors)
    settings = processor.settings["image"]
    size = [side * settings["patch_size"] * settings["merge_size"] for side in cells.shape]
    frames = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    if frames.shape[2:] != tuple(size):
        frames = functional.resize(frames, size, functional.InterpolationMode.BICUBIC)
    pixels = frames.permute(0, 2, 3, 1).numpy()
    return patches_of(pixels, processor.settings["image"]["patch_size"], factors)


def expanded(ours, text, items, tokenizer):
    """(ids, items at their places) of a text with placeholders, each replaced by its item."""
    ids, placed, seen = list(tokenizer.encode(text)), [], {"image": 0, "video": 0}
    at, waiting = 0, list(items)
    while at < len(ids):
        for item in waiting:
            seen_now = seen[item.modality] + 1
            made = ours.expand(item, seen_now)
            if tuple(ids[at : at + len(made.replaces)]) == made.replaces:
                waiting.remove(item)
                seen[item.modality] += 1
                ids[at : at + len(made.replaces)] = made.token_ids
                placed.append(ExpandedItem(item.modality, at, made, item.sizes))
                at += len(made.token_ids) - 1
                break
        at += 1
    assert not waiting
    return ids, placed
