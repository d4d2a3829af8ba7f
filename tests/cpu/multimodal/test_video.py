"""Video of families whose frames are images: rows and tokens are those of transformers."""

import numpy as np
import pytest
import torch

from quire.media.expand import ReadyItem, place_items
from quire.media.processor import DecodedVideo, VideoInfo
from quire.text.media_prompt import _ItemTexts
from tests.cpu.multimodal.families import (
    FAMILIES,
    clip_images,
    image,
    llava_next_video,
    made,
)


def clip_of(count):
    frames = np.stack([np.asarray(image(120, 90, seed)) for seed in range(count)])
    return DecodedVideo(frames, VideoInfo(2.0, tuple(range(count)), count, count / 2))


def test_frames_of_llava_onevision_are_pooled(tmp_path):
    pair = made("llava_onevision", tmp_path)
    clip = clip_of(3)
    item = pair.own_processor.process(clip, {})
    (rows,) = pair.rows([item])
    pixels = pair.processor.image_processor(list(clip.frames), return_tensors="pt")
    whole = pixels["pixel_values"][:, 0]  # of each frame, before its tiles
    with torch.inference_mode():
        wanted = pair.theirs.model.get_video_features(whole[None]).pooler_output
    assert (rows - wanted.flatten(0, 1)).abs().max().item() < 1e-4
    expansion = pair.own_processor.expand(item, 1)
    assert expansion.token_ids == (151,) * (3 * 2 * 2 + 1)
    assert expansion.rows == len(rows) <= pair.ours[0].media_encoder.max_rows("video")


@pytest.mark.parametrize("mode", ["average", "max"])
def test_frames_of_llava_next_video_are_pooled(tmp_path, mode, monkeypatch):
    monkeypatch.setitem(FAMILIES, "pooled", lambda: llava_next_video(spatial_pool_mode=mode))
    pair = made("pooled", tmp_path)
    clips = [clip_of(3), clip_of(2)]
    items = [pair.own_processor.process(clip, {}) for clip in clips]
    (still,) = pair.process([image(120, 90)])
    found = pair.rows([items[0], still, items[1]])
    for clip, item, rows in zip(clips, items, found[::2]):
        pixels = clip_images(56)(list(clip.frames), return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            wanted = pair.theirs.model.get_video_features(pixels[None]).pooler_output
        assert (rows - wanted.flatten(0, 1)).abs().max().item() < 1e-4
        expansion = pair.own_processor.expand(item, 1)
        assert expansion.token_ids == (151,) * (len(clip.frames) * 2 * 2)
        assert expansion.rows == len(rows) <= pair.ours[0].media_encoder.max_rows("video")
    assert (found[1] - pair.rows([still])[0]).abs().max().item() < 1e-5


@torch.inference_mode()
def test_frames_of_internvl_are_numbered_tiles(tmp_path):
    pair = made("internvl", tmp_path)
    own, tokenizer = pair.own_processor, pair.processor.tokenizer
    clips = [clip_of(3), clip_of(1)]
    items = [own.process(clip, {}) for clip in clips]
    (still,) = pair.process([image(300, 120)])
    found = pair.rows([items[0], still, items[1]])
    text = "w3 {} w5 {} w7"
    ready = [
        ReadyItem("video", i, bytes([i]), one, own.expand(one, i)) for i, one in enumerate(items, 1)
    ]
    ours = _ItemTexts(ready, own).write(text.format("<video>", "<video>"))
    placed = place_items(tokenizer.encode(ours), ready, own)
    frames = {"pixel_values_videos": [clip.frames for clip in clips]}
    theirs = [pair.processor.replace_video_token(frames, i) for i in range(2)]
    assert list(placed.ids) == tokenizer.encode(text.format(*theirs))
    rows = sum(one.expansion.rows for one in ready)
    assert sum(token == 150 for token in placed.ids) == rows
    for clip, item, one in zip(clips, placed.items, found[::2], strict=True):
        images = pair.processor.image_processor
        pixels = images(list(clip.frames), crop_to_patches=False, return_tensors="pt")
        wanted = pair.theirs.model.get_image_features(pixels["pixel_values"]).pooler_output
        assert (one - wanted.flatten(0, 1)).abs().max().item() < 1e-4
        assert sum(count for _, count in item.runs) == len(one)
        assert len(one) <= pair.ours[0].media_encoder.max_rows("video")
        assert all(placed.ids[item.start + at] == 150 for at, _ in item.runs)
