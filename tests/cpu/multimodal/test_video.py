"""Video of families whose frames are images: rows and tokens are those of transformers."""

import numpy as np
import torch

from quire.media.processor import DecodedVideo, VideoInfo
from tests.cpu.multimodal.families import image, made


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
