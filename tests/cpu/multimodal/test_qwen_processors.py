"""Processors of Qwen's families: pixels, tokens and rotary positions are those of transformers."""

import functools
import itertools
import random

import numpy as np
import pytest
import torch

from quire.errors import ConfigError, RequestError, Unsupported
from quire.media.processor import (
    DecodedImage,
    DecodedVideo,
    ExpandedItem,
    ProcessedMedia,
    VideoInfo,
    processor_type,
)
from quire.media.processors._qwen import PixelBounds, smart_resize
from tests.cpu.multimodal.families import image
from tests.cpu.multimodal.qwen_models import (
    FAMILIES,
    expanded,
    model_of,
    own_processor,
    patches_in,
    processor_of,
    video_of,
)

SIZES = [(56, 56), (40, 120), (200, 61), (300, 333), (17, 23), (28, 560)]
LEVEL = 1 / 255 / 0.26130258
"""One step of a byte, normalized."""


@functools.cache
def theirs_of(family):
    return model_of(family)


def own(family, processor):
    return own_processor(processor, theirs_of(family).config.to_dict())


def metadata_of(video):
    from transformers.video_utils import VideoMetadata

    info = video.info
    return VideoMetadata(
        total_num_frames=info.total_num_frames,
        fps=info.fps,
        duration=info.duration,
        frames_indices=list(info.frames_indices),
    )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
@pytest.mark.parametrize("pil", [False, True])
def test_pixels_of_images_equal_those_of_the_library_that_resizes(family, pil):
    """The encoder resizes as torchvision does, and what shrinks by much is resized by PIL."""
    processor, exact = processor_of(family, pil=pil), 0
    ours = own(family, processor)
    for size in SIZES:
        want = processor.image_processor(image(*size), return_tensors="pt")
        item = ours.process(DecodedImage(np.asarray(image(*size))), {})
        got, grid = patches_in(item, ours)
        assert grid == want["image_grid_thw"][0].tolist()
        off = (got - want["pixel_values"]).abs().max().item()
        sent = item.tensors[0].shape[1:3] == size
        assert off < (2.01 * LEVEL if sent == pil else 1e-5)
        exact += sent != pil
    assert 0 < exact < len(SIZES)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "glm4v"])
@pytest.mark.parametrize("shape", [(4, 60, 90), (3, 61, 140), (2, 300, 200), (5, 20, 33)])
def test_pixels_of_videos_are_within_two_steps_of_torchvision(family, shape):
    processor = processor_of(family)
    ours, video = own(family, processor), video_of(*shape)
    want = processor.video_processor(
        torch.from_numpy(video.frames).permute(0, 3, 1, 2), return_tensors="pt"
    )
    got, grid = patches_in(ours.process(video, {}), ours)
    assert grid == want["video_grid_thw"][0].tolist()
    assert (got - want["pixel_values_videos"]).abs().max().item() < 2.01 * LEVEL


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_frames_share_the_pixels_of_a_context_where_the_files_ask_for_it(family):
    processor, video = processor_of(family), video_of(6, 200, 160)
    capped = {"cap_pixels_per_frame": True, "max_video_tokens": 40 if family == "qwen2_vl" else 6}
    for key, value in capped.items():
        setattr(processor.video_processor, key, value)
    ours = own(family, processor)
    want = processor.video_processor(
        torch.from_numpy(video.frames).permute(0, 3, 1, 2), return_tensors="pt"
    )["video_grid_thw"][0]
    ours.settings["video"] |= capped
    item = ours.process(video, {})
    assert item.sizes["grid"] == (want[0], want[1] // 2, want[2] // 2)
    ours.settings["video"]["cap_pixels_per_frame"] = False
    assert ours.process(video, {}).sizes["grid"] != item.sizes["grid"]


def test_sizes_are_those_of_transformers_for_random_images_and_bounds():
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as theirs

    drawn = random.Random(3)
    for _ in range(2000):
        height, width = drawn.randint(1, 3000), drawn.randint(1, 3000)
        factor, least = drawn.choice([28, 32]), drawn.randint(1, 200_000)
        bounds = PixelBounds(least, least + drawn.randint(0, 2_000_000))
        if max(height, width) > 200 * min(height, width):
            with pytest.raises(RequestError, match="at most 200 times"):
                smart_resize(height, width, factor, bounds)
        else:
            want = theirs(height, width, factor, *bounds)
            assert smart_resize(height, width, factor, bounds) == want


def test_options_of_a_request_bound_the_pixels_as_in_transformers():
    processor = processor_of("qwen2_5_vl")
    ours, given = own("qwen2_5_vl", processor), image(300, 333)
    for kwargs in (
        {"max_pixels": 28 * 28 * 6},
        {"min_pixels": 28 * 28 * 8, "max_pixels": 28 * 28 * 9},
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 4}},
    ):
        want = processor.image_processor(given, return_tensors="pt", **kwargs)["image_grid_thw"]
        item = ours.process(DecodedImage(np.asarray(given)), kwargs)
        assert patches_in(item, ours)[1] == want[0].tolist()
        assert item.sizes["grid"] == (1, want[0, 1] // 2, want[0, 2] // 2)
    with pytest.raises(RequestError, match="the former must not be above the latter"):
        ours.process(DecodedImage(np.asarray(given)), {"min_pixels": 28 * 28 * 21})


def test_patches_of_another_size_than_the_models_are_refused():
    with pytest.raises(ConfigError, match=r"patch_size for image is 16, and .* patch_size 14"):
        own("qwen2_vl", processor_of("qwen3_vl"))


MIXES = ["", "i", "v", "iv", "vi", "ivi", "iiv", "vv", "iii"]


def mixed(family, mix, seed):
    """(their inputs, our ids, our places, ours) of a prompt with images and videos."""
    processor = processor_of(family, times=True)
    ours, drawn = own(family, processor), random.Random(f"{mix}{seed}")
    images, videos, texts, theirs, items = [], [], [], [], []
    for kind in mix:
        height, width = drawn.randint(20, 180), drawn.randint(20, 180)
        words = " ".join(drawn.choices([f"w{i}" for i in range(3, 100)], k=drawn.randint(0, 5)))
        texts.append(words)
        theirs.append(words)
        mark = ours.placeholder("image" if kind == "i" else "video", 1)
        texts.append(mark)
        if kind == "i":
            images.append(image(height, width))
            items.append(ours.process(DecodedImage(np.asarray(images[-1])), {}))
            theirs.append(mark)
            continue
        step, fps = drawn.choice([1, 4, 15, 40]), drawn.choice([24.0, 29.97, 30.0])
        videos.append(video_of(drawn.randint(2, 7), height, width, fps, step))
        items.append(ours.process(videos[-1], {}))
        # transformers keeps the marks around a placeholder of Qwen3-VL, against its authors.
        theirs.append("<|video_pad|>" if family == "qwen3_vl" else mark)
    end = " w40 w41"
    given = {
        "images": images or None,
        "videos": [torch.from_numpy(v.frames).permute(0, 3, 1, 2) for v in videos] or None,
        "video_metadata": [metadata_of(v) for v in videos] or None,
    }
    inputs = processor(text=" ".join(theirs) + end, return_tensors="pt", **given)
    return inputs, *expanded(ours, " ".join(texts) + end, items, processor.tokenizer), ours


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_tokens_and_rotary_positions_are_those_of_transformers(family):
    compared = 0
    for mix, seed in itertools.product(MIXES, range(3)):
        inputs, ids, placed, ours = mixed(family, mix, seed)
        assert ids == inputs["input_ids"][0].tolist()
        got = ours.rope(ids, placed)
        if not mix:
            assert got is None
            continue
        model = theirs_of(family).model
        rope = {k: v for k, v in inputs.items() if "grid" in k or "mm_token" in k}
        want, delta = model.get_rope_index(inputs["input_ids"], **rope)
        if reaches_in_time(placed):
            continue
        compared += 1
        assert np.array_equal(got[0], want[:, 0].numpy())
        assert got[0].dtype == np.int32
        assert got[1] == int(delta)
    assert compared >= 15


def reaches_in_time(placed):
    """Whether a video has more steps of time than rows and columns: transformers' next position
    is then one that the video has too."""
    longest = 0
    for one in placed:
        pairs, rows, columns = one.sizes["grid"]
        if one.modality == "video" and len(one.expansion.runs) == 1:
            steps = (pairs - 1) * 2 * 4 * one.sizes.get("seconds", 1 / 8)
            longest = max(longest, steps + 1 - max(rows, columns))
    return longest > 0


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_text_after_a_long_video_has_positions_that_are_free_on_all_axes(family):
    ours = own(family, processor_of(family))
    item = ours.process(video_of(12, 56, 56, fps=1.0, step=1), {})
    made = ours.expand(item, 1)
    ids = [190, *made.token_ids, 191, 5]
    positions, delta = ours.rope(ids, [ExpandedItem("video", 1, made, item.sizes)])
    last = {"qwen2_vl": 5, "qwen2_5_vl": 5 * 2 * 4}[family]  # 4 a second, 2 s a pair
    assert positions[0].max() == positions[0, -1] == 1 + last + 2
    assert positions[:, -2:].tolist() == [[last + 2, last + 3]] * 3
    assert delta == last + 4 - len(ids)


def test_times_of_frames_are_those_of_the_source():
    processor = processor_of("qwen3_vl")
    ours = own("qwen3_vl", processor)
    pixels = video_of(3, 64, 64).frames
    video = DecodedVideo(pixels, VideoInfo(25.0, (10, 60, 200), 250, 10.0))
    item = ours.process(video, {})
    assert item.sizes["times"] == ((10 / 25 + 60 / 25) / 2, 200 / 25)
    said = processor.tokenizer.get_vocab()
    made = ours.expand(item, 1)
    assert [ids for ids in made.token_ids if ids == said["<|vision_start|>"]] == [190, 190]
    assert made.replaces == (190, 193, 191)
    assert made.rows == 2 * 2 * 2


def test_embeddings_need_the_grid_of_their_patches():
    ours = own("qwen3_vl", processor_of("qwen3_vl"))
    made = ours.expand(ProcessedMedia("image", (), {"rows": 6, "image_grid_thw": (1, 4, 6)}), 1)
    assert made.token_ids == (192,) * 6
    for sizes in ({}, {"image_grid_thw": (1, 4)}, {"image_grid_thw": (1, 3, 4)}):
        with pytest.raises(RequestError, match="embeddings of images need image_grid_thw"):
            ours.expand(ProcessedMedia("image", (), {"rows": 6} | sizes), 1)
    with pytest.raises(Unsupported, match="no times of frames"):
        ours.expand(ProcessedMedia("video", (), {"rows": 6, "video_grid_thw": (1, 4, 6)}), 1)


def test_every_family_has_a_processor():
    assert all(processor_type(family) for family in FAMILIES)
