"""Video of families whose frames are images: rows and tokens are those of transformers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.media.expand import ReadyItem, place_items
from quire.media.processor import DecodedVideo, ProcessorFiles, VideoInfo
from quire.media.processors.smolvlm import Processor, number_in_words
from quire.text.media_prompt import MediaInputs, _ItemTexts, tokenize_prompt
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


@torch.inference_mode()
def test_frames_of_smolvlm_are_images_with_times(tmp_path, monkeypatch):
    from transformers.models.smolvlm import processing_smolvlm as peer

    numbers = {1: "one", 3: "three"}  # of a package that transformers imports
    monkeypatch.setattr(peer, "num2words", numbers.__getitem__)
    pair = made("smolvlm", tmp_path)
    own, tokenizer = pair.own_processor, pair.processor.tokenizer
    clips = [clip_of(3), clip_of(1)]
    clips[1] = DecodedVideo(clips[1].frames, VideoInfo(2.0, (180,), 8000, 4000.5))
    items = [own.process(clip, {}) for clip in clips]
    (still,) = pair.process([image(200, 61)])
    found = pair.rows([items[0], still, items[1]])
    ready = [
        ReadyItem(item.modality, i, bytes([n]), item, own.expand(item, i))
        for n, (item, i) in enumerate([(items[0], 1), (still, 1), (items[1], 2)])
    ]
    text = "w3\n{}\nw5 {} w6 {}w7"
    coded = SimpleNamespace(
        encode=lambda text, special: tokenizer.encode(text, add_special_tokens=special),
        special_token_layout=lambda: SimpleNamespace(join=lambda ids: ids),
    )
    ids, ready = tokenize_prompt(
        coded, text.format("<video>", "<image>", "<video>"), MediaInputs(ready), own,
        add_special_tokens=False,
    )  # fmt: skip
    placed = place_items(ids, ready, own)
    theirs = [peer_frames(peer, clip, pair.processor) for clip in clips]
    rows, columns = still.sizes["grid"]
    middle = peer.get_image_prompt_string(
        rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>"
    )
    assert list(placed.ids) == tokenizer.encode(text.format(theirs[0], middle, theirs[1]))
    assert all(placed.ids[i.start + at] == 150 for i in placed.items for at, _ in i.runs)
    assert [one.modality for one in placed.items] == ["video", "image", "video"]
    for clip, item, one in zip(clips, placed.items[::2], found[::2], strict=True):
        pixels = pair.processor.image_processor(
            [list(clip.frames)], do_image_splitting=False, return_tensors="pt"
        )
        wanted = pair.theirs.model.get_image_features(pixels["pixel_values"]).pooler_output
        wanted = torch.cat([*wanted])  # transformers 5.23 has a list of the images
        assert (one - wanted).abs().max().item() < 1e-4
        assert sum(count for _, count in item.runs) == len(one)
        assert len(one) <= pair.ours[0].media_encoder.max_rows("video")


def peer_frames(peer, clip, processor):
    """What SmolVLM's processor of transformers writes for a video."""
    from transformers.video_utils import VideoMetadata

    info = clip.info
    meta = VideoMetadata(
        info.total_num_frames, info.fps, duration=info.duration,
        frames_indices=list(info.frames_indices),
    )  # fmt: skip
    names = SimpleNamespace(
        image_seq_len=4, image_token="<image>", fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
    )  # fmt: skip
    given = {"pixel_values": clip.frames[None], "video_metadata": [meta]}
    return peer.SmolVLMProcessor.replace_video_token(names, given, 0)


@pytest.mark.parametrize(
    ("total", "fps"), [(1, 30), (90, 30), (1920, 30), (2041, 30), (18000, 24), (5, 0.01)]
)
@pytest.mark.parametrize("wanted", [{}, {"num_frames": 8}, {"fps": 2, "num_frames": 12}])
def test_frames_of_smolvlm_are_those_of_transformers(total, fps, wanted):
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
    from transformers.video_utils import VideoMetadata

    files = ProcessorFiles(
        {"vision_config": {"image_size": 56, "patch_size": 14}},
        {"image": {"max_image_size": {"longest_edge": 56}}},
    )
    meta = VideoMetadata(total, fps, duration=total / fps)
    peer = SimpleNamespace(num_frames=64, fps=1)
    theirs = SmolVLMVideoProcessor.sample_frames(peer, meta, **wanted)
    assert Processor(files).frame_indices(total, fps, wanted) == theirs.tolist()


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (13, "thirteen"), (40, "forty"), (64, "sixty-four"), (100, "one hundred"),
     (768, "seven hundred and sixty-eight")],
)  # fmt: skip
def test_numbers_of_frames_are_words(number, words):
    assert number_in_words(number) == words
