"""Videos and recordings of Gemma 4: tokens, rows and answers are those of transformers."""

import json

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.media.image_ops import from_tensor
from quire.media.processor import DecodedAudio, DecodedImage, DecodedVideo, VideoInfo
from quire.media.processors.gemma4 import FlooredMel, whole_squares
from tests.cpu.encoder_decoder.speech import RATE, recording
from tests.cpu.multimodal.families import check_answers, image, made, with_pil

pytestmark = pytest.mark.slow("imports transformers, and makes models of it")

AUDIOS = [recording(seconds, i) for i, seconds in enumerate((1.0, 0.111, 3.33, 0.05))]
CLIPS = [(3, 90, 120), (2, 200, 61)]


def clip_of(frames, height, width):
    pixels = np.stack([np.asarray(image(height, width, seed)) for seed in range(frames)])
    return DecodedVideo(pixels, VideoInfo(2.0, tuple(3 * i for i in range(frames)), 9, 4.5))


@pytest.fixture(scope="module", params=["gemma4", "gemma4_of_31b"])
def pair(request, tmp_path_factory):
    from transformers import Gemma4VideoProcessor
    from transformers.image_utils import SizeDict

    class Videos(with_pil(Gemma4VideoProcessor)):
        def aspect_ratio_preserving_resize(
            self, video, patch_size, max_patches, pooling_kernel_size, **_
        ):
            pool = pooling_kernel_size
            height, width = whole_squares(
                *video.shape[-2:], patch_size, pool, max_patches // pool**2
            )
            return self.resize(video, SizeDict(height=height, width=width), 3)

    Videos.__name__ = "Gemma4VideoProcessor"
    folder = tmp_path_factory.mktemp(request.param)
    found = made(request.param, folder)
    found.processor.video_processor = Videos(patch_size=14, do_sample_frames=False)
    found.processor.tokenizer.save_pretrained(folder)
    for part, name in (
        (found.processor.image_processor, "preprocessor_config.json"),
        (found.processor.video_processor, "video_preprocessor_config.json"),
    ):
        (folder / name).write_text(json.dumps(part.to_dict(), default=str))
    return found


def inputs_of(pair, images=(), videos=(), audios=()):
    """A prompt, and what transformers' processor makes of it."""
    text = " ".join([
        "<s>", *["w3 w4 <|image|> w5"] * len(images), *["w6 <|video|> w7"] * len(videos),
        *["w8 <|audio|> w9"] * len(audios), "w40 w41",
    ])  # fmt: skip
    given = {"videos": [torch.from_numpy(one.frames).permute(0, 3, 1, 2) for one in videos]}
    given["video_metadata"] = [
        {"fps": one.info.fps, "frames_indices": list(one.info.frames_indices),
         "total_num_frames": one.info.total_num_frames}
        for one in videos
    ]  # fmt: skip
    given |= {"images": [list(images)] if images else [], "audio": list(audios)}
    given = {key: one for key, one in given.items() if one}
    return text, pair.processor(text=[text], return_tensors="pt", **given)


def mixes(pair):
    images = [image(60, 80), image(300, 40)]
    clips = [clip_of(*one) for one in CLIPS]
    found = [(images, clips[:1], []), ([], clips, [])]
    if "audio" in pair.own_processor.modalities:
        found += [([], [], AUDIOS[:1]), (images[:1], clips[1:], AUDIOS[1:])]
    return found


@pytest.mark.sampled(2)
def test_answers_with_videos_and_recordings_are_those_of_transformers(pair):
    llm = LLM(
        str(pair.folder), dtype="float32", num_gpu_blocks_override=400, max_model_len=1024,
        max_num_batched_tokens=256, limit_mm_per_prompt={"image": 4, "video": 2, "audio": 3},
        media_io_kwargs={"video": {"num_frames": 8}},
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
    asked, expected = [], []
    for images, videos, audios in mixes(pair):
        text, inputs = inputs_of(pair, images, videos, audios)
        with torch.inference_mode():
            found = pair.theirs.generate(
                **inputs, max_new_tokens=6, do_sample=False, output_scores=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        scores = torch.cat(found.scores).log_softmax(-1).max(-1).values.tolist()
        expected.append((inputs["input_ids"][0].tolist(), found.sequences[0, -6:].tolist(), scores))
        info = [
            {"fps": 2.0, "frames_indices": list(one.info.frames_indices), "total_num_frames": 9}
            for one in videos
        ]
        data = {
            "image": images,
            "video": [(one.frames, facts) for one, facts in zip(videos, info)],
            "audio": [(one, RATE) for one in audios],
        }
        data = {key: one for key, one in data.items() if one}
        asked.append({"prompt": text, "multi_modal_data": data})
    check_answers(llm, asked, expected, sampling, 1e-4)
    if "audio" not in pair.own_processor.modalities:
        data = {"audio": [(AUDIOS[0], RATE)]}
        with pytest.raises(RequestError, match="reads no audio"):
            llm.generate({"prompt": "<|audio|>", "multi_modal_data": data}, sampling)


@pytest.mark.parametrize("samples", [162, 321, 1000, 16000, 16161, 480000])
def test_features_of_recordings_are_those_of_transformers(samples):
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    audio = recording(30, 3)[:samples]
    want = Gemma4AudioFeatureExtractor()([audio], return_tensors="np")
    want = want["input_features"][0][want["input_features_mask"][0]]
    got = FlooredMel({})(audio)
    assert got.shape == want.shape
    assert np.abs(got - want).max() < 1e-4
    assert (
        len(FlooredMel({})(audio[: FlooredMel({}).least - 1]))
        == 0
        < len(FlooredMel({})(audio[:161]))
    )


def test_sizes_are_those_of_transformers():
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size,
    )

    drawn = np.random.default_rng(5)
    for _ in range(500):
        height, width = (int(one) for one in drawn.integers(1, 3000, 2))
        most = int(drawn.choice([70, 280, 1120]))
        want = get_aspect_ratio_preserving_size(height, width, 16, most * 9, 3)
        assert whole_squares(height, width, 16, 3, most) == want


def test_items_that_are_refused(tmp_path):
    own = made("gemma4", tmp_path).own_processor
    for media, kwargs, words in (
        (DecodedAudio(np.zeros(160, np.float32), RATE), {}, r"0\.01\d* s at least"),
        (DecodedAudio(np.zeros(31 * RATE, np.float32), RATE), {}, "reads 30 s at once"),
        (DecodedImage(np.zeros((9, 9, 3), np.uint8)), {"max_soft_tokens": 71}, "one of 70, 140"),
        (clip_of(9, 60, 60), {"max_soft_tokens": 1120}, "9 frames of 1089 tokens"),
    ):
        with pytest.raises(RequestError, match=words):
            own.process(media, kwargs)
    item = own.process(DecodedImage(np.zeros((90, 60, 3), np.uint8)), {"max_soft_tokens": 280})
    assert from_tensor(item.tensors[0]).shape[1] % 42 == 0
