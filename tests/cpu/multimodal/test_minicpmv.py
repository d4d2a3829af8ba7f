"""Images and videos of MiniCPM-V 4.6 and 4.7: tokens, rows and answers are those of transformers."""

import json

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError
from quire.kernels.framework import lazy_fusion
from quire.media.processor import (
    DecodedImage,
    DecodedVideo,
    ExpandedItem,
    ProcessedMedia,
    ProcessorFiles,
)
from quire.media.processors import minicpmv4_7
from quire.media.processors.minicpmv4_6 import (
    Processor,
    fitting_size,
    nearest_places,
    nested,
    slice_grid,
    tile_size,
)
from quire.models.multimodal import minicpmv4_6 as minicpmv_encoder
from tests import tiers
from tests.cpu.models.peers import scale_weights
from tests.cpu.multimodal.families import Pair, check_answers, image, tokenizer_of, with_pil
from tests.cpu.multimodal.qwen_models import DELTA_NET, TEXT, video_of

pytestmark = [
    pytest.mark.slow("imports transformers, and makes models of it"),
    pytest.mark.sampled(3),
]

STEPS = 6
NAMES = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
    "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
}  # fmt: skip
TOKENS = {name: 160 + i for i, name in enumerate(NAMES.values())} | {"0": 170, "1": 171, "2": 172}
MARKS = {
    "image_start_id": 162, "image_end_id": 163, "slice_start_id": 164, "slice_end_id": 165,
    "newline_id": 101,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "image_size": 112, "patch_size": 14,
}  # fmt: skip
SIZES = {"patch_size": 14, "scale_resolution": 112, "max_slice_nums": 6}
IMAGES = [image(100, 100), image(60, 130), image(300, 200), image(90, 640)]
OWN = {"vision_config": {"patch_size": 14}}
CLIP = video_of(3, 150, 170)
INFO = {"fps": 30.0, "frames_indices": [0, 15, 30], "total_num_frames": 45, "duration": 1.5}
MIXES = [((), False), ((0,), False), ((2, 1), False), ((), True), ((3,), True)]
"""Images of a prompt, and whether it has the video."""


@pytest.fixture(scope="module", params=[("4_6", "16x"), ("4_6", "4x"), ("4_7", "16x")])
def pair(request, tmp_path_factory):
    return made(tmp_path_factory.mktemp("minicpmv"), *request.param)


def made(folder, version, mode):
    import transformers

    settings = SIZES | {"downsample_mode": mode}
    config = transformers.AutoConfig.for_model(
        f"minicpmv{version}", text_config=TEXT | DELTA_NET | {"model_type": "qwen3_5_text"},
        vision_config=VISION, image_token_id=160, video_token_id=161, downsample_mode=mode,
        insert_layer_id=1, **(MARKS if version == "4_7" else {}),
    )  # fmt: skip
    torch.manual_seed(5)
    kind = getattr(transformers, f"MiniCPMV{version}ForConditionalGeneration")
    model = kind._from_config(config, attn_implementation="eager").eval()
    scale_weights(model, 2.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer = tokenizer_of(TOKENS, **NAMES)
    tokenizer.save_pretrained(folder)
    videos = with_pil(transformers.MiniCPMV4_6VideoProcessor)
    videos.__name__ = "MiniCPMV4_6VideoProcessor"
    parts = {
        "preprocessor_config.json": transformers.MiniCPMV4_6ImageProcessorPil(**settings),
        "video_preprocessor_config.json": videos(do_sample_frames=False, **settings),
    }
    for name, part in parts.items():
        (folder / name).write_text(json.dumps(part.to_dict(), default=str))
    processor = getattr(transformers, f"MiniCPMV{version}Processor")(*parts.values(), tokenizer)
    return Pair(model, processor, folder)


def prompt_of(images, video):
    """A prompt for an engine; images: indexes."""
    words = ["w3 w4 <|image_pad|> w5"] * len(images) + ["w6 <|video_pad|>"] * video
    data = {"image": [IMAGES[i] for i in images]} if images else {}
    data |= {"video": [(CLIP.frames, INFO)]} if video else {}
    text = " ".join([*words, "w40 w41"])
    return {"prompt": text} | ({"multi_modal_data": data} if data else {})


def asked(pair, images, video):
    """What transformers' processor makes of a prompt."""
    text = prompt_of(images, video)["prompt"]
    given = {"images": [[IMAGES[i] for i in images]]} if images else {}
    if video:
        given["videos"] = [torch.from_numpy(CLIP.frames).permute(0, 3, 1, 2)]
    return pair.processor(text=[text], return_tensors="pt", **given)


def test_answers_are_those_of_transformers(pair):
    llm = LLM(
        str(pair.folder), dtype="float32", num_gpu_blocks_override=400, max_model_len=1024,
        max_num_batched_tokens=64,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True, logprobs=0)
    prompts, wants = [], []
    for images, video in MIXES:
        inputs = asked(pair, images, video)
        with torch.inference_mode():
            found = pair.theirs.generate(
                **inputs, max_new_tokens=STEPS, do_sample=False, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        ids = found.sequences[0, -STEPS:]
        best = torch.cat(found.logits).log_softmax(-1).gather(1, ids[:, None])[:, 0].tolist()
        wants.append((inputs["input_ids"][0].tolist(), ids.tolist(), best))
        prompts.append(prompt_of(images, video))
    assert len({tuple(ids) for _, ids, _ in wants}) > 2
    check_answers(llm, prompts, wants, sampling, 1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("most", [16384, 100])
def test_rows_in_slices_are_those_of_transformers(pair, monkeypatch, most):
    monkeypatch.setattr(minicpmv_encoder, "PATCHES_AT_ONCE", most)
    encoder = pair.ours[0].media_encoder
    items = pair.encoder_inputs(pair.process(IMAGES))
    slices = encoder.encode_in_slices(items)
    for _ in range(encoder.slices):
        next(slices)
        lazy_fusion.flush()
    with pytest.raises(StopIteration) as ended:
        next(slices)
    found = pair.processor.image_processor(IMAGES, return_tensors="pt")
    wants = pair.theirs.model.get_image_features(found["pixel_values"], found["target_sizes"])
    got = torch.cat(ended.value.value)
    assert (got - torch.cat(wants.pooler_output)).abs().max().item() < 1e-4


def test_sizes_and_slices_are_those_of_transformers():
    from transformers import MiniCPMV4_6ImageProcessorPil

    theirs, drawn = MiniCPMV4_6ImageProcessorPil(), np.random.default_rng(7)
    for _ in range(400):
        size = tuple(int(one) for one in drawn.integers(1, 3000, 2))
        mode = str(drawn.choice(["4x", "16x"]))
        unit, most = 14 * (2 if mode == "4x" else 4), int(drawn.choice([1, 4, 9, 36]))
        grid = theirs.get_sliced_grid(size, most, 448)
        assert slice_grid(*size, most, 448) == (None if grid is None else tuple(grid))
        want = theirs.find_best_resize(size, 448, 14, mode, grid is None)
        assert fitting_size(*size, 448, unit, grows=grid is None) == want
        if grid is not None:
            whole = theirs.get_refine_size(size, grid, 448, 14, mode, True)
            tile = tile_size(*size, tuple(grid), 448, unit)
            assert (tile[0] * grid[0], tile[1] * grid[1]) == whole


def test_places_are_those_of_transformers():
    from transformers.vision_utils import get_vision_nearest_position_ids

    for side in (8, 16, 27, 70):
        sizes = torch.tensor([[n, 1] for n in range(1, 200)])
        want = get_vision_nearest_position_ids(sizes, side).numpy() // side
        got = np.concatenate([nearest_places(n, side) for n in range(1, 200)])
        on_border = np.concatenate([np.arange(n) * side % n == 0 for n in range(1, 200)])
        assert (got == want)[~on_border].all()
        assert ((got - want)[on_border] >= 0).all()
        assert (got - want).max() <= 1


def drawn_prompt(own, rng):
    """Token ids of a prompt with frames in many neighbourhoods, and its items at their places."""
    ids, items, seen = [], [], {"image": 0, "video": 0}
    for _ in range(rng.integers(1, 5)):
        ids += [int(one) for one in rng.choice([5, 6, 101, 162, 165], rng.integers(0, 4))]
        modality = str(rng.choice(["image", "video"]))
        grid = (0, 0) if rng.random() < 0.4 else tuple(int(one) for one in rng.integers(1, 4, 2))
        shapes = tuple(tuple(int(n) for n in rng.integers(1, 9, 2)) for _ in range(1 + any(grid)))
        frames = 1 if modality == "image" else int(rng.integers(1, 4))
        sizes = {"grid": grid, "shapes": shapes, "frames": frames, "marked": rng.random() < 0.5}
        seen[modality] += 1
        made = own.expand(ProcessedMedia(modality, (), sizes), seen[modality])
        items.append(ExpandedItem(modality, len(ids), made, sizes))
        ids += made.token_ids
    return ids + [int(one) for one in rng.choice([5, 101], rng.integers(0, 4))], items


def test_positions_of_a_canvas_are_those_of_transformers():
    from transformers import AutoConfig
    from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

    theirs = object.__new__(MiniCPMV4_7Model)
    theirs.__dict__["config"] = AutoConfig.for_model("minicpmv4_7", **MARKS)
    tokenizer = tokenizer_of(TOKENS, **NAMES)
    config = OWN | MARKS | {"image_token_id": 160, "video_token_id": 161}
    files = ProcessorFiles(
        config, encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        vocabulary=tokenizer.get_vocab().get,
    )  # fmt: skip
    own, rng = minicpmv4_7.Processor(files), np.random.default_rng(11)
    for _ in range(tiers.amount(50, 3000)):
        ids, items = drawn_prompt(own, rng)
        kinds = np.zeros(len(ids), np.int64)
        grids = {"image": [], "video": []}
        for item in items:
            tall, wide = item.sizes["grid"]
            whole, *tile = item.sizes["shapes"]
            each = [whole, *tile * (tall * wide)] * item.sizes["frames"]
            grids[item.modality] += [(4 * h, 4 * w) for h, w in each]
            for offset, count in item.expansion.runs:
                at = item.start + offset
                kinds[at : at + count] = 1 if item.modality == "image" else 2
        sizes = {k: torch.tensor(one) if one else None for k, one in grids.items()}
        want, delta = theirs.get_rope_index(
            torch.tensor([ids]), torch.from_numpy(kinds)[None], sizes["image"], sizes["video"]
        )
        got, own_delta = own.rope(ids, items)
        assert got.tolist() == want[:, 0].tolist()
        assert own_delta == int(delta)


def test_squares_have_their_squares_one_after_another():
    cells = np.arange(8 * 12).reshape(8, 12)
    assert nested(cells, 1)[0, 1].tolist() == [2, 3, 14, 15]
    whole = nested(cells, 2)
    assert whole.shape == (2, 3, 16)
    assert whole[0, 1].tolist() == [
        *(4, 5, 16, 17, 6, 7, 18, 19),
        *(28, 29, 40, 41, 30, 31, 42, 43),
    ]


def test_frames_are_those_that_transformers_samples():
    from transformers import MiniCPMV4_6VideoProcessor
    from transformers.video_utils import VideoMetadata

    own, theirs = Processor(ProcessorFiles(OWN)), MiniCPMV4_6VideoProcessor()
    for total, fps in ((45, 30.0), (900, 29.97), (1, 25.0), (9000, 24.0)):
        facts = VideoMetadata(total, fps=fps, duration=total / fps)
        want = sorted(set(theirs.sample_frames(facts)))
        assert own.frame_indices(total, fps, {}) == [one for one in want if one < total]
    assert len(own.frame_indices(900, 30.0, {"num_frames": 4})) == 4


def test_items_and_files_that_are_refused():
    own = Processor(ProcessorFiles(OWN))
    image = own.process(DecodedImage(np.zeros((900, 900, 3), np.uint8)), {})
    assert image.sizes["grid"] == (2, 2)
    assert image.sizes["shapes"] == ((8, 8), (8, 8))
    frames = np.broadcast_to(np.zeros((1, 32, 300, 3), np.uint8), (300, 32, 300, 3))
    with pytest.raises(RequestError, match="300 frames of"):
        own.process(DecodedVideo(frames, CLIP.info), {})
    for images, words in (
        ({"downsample_mode": "4x"}, "downsample_mode"),
        ({"patch_size": 16}, "patch_size"),
        ({"stack_frames": 2}, "stack_frames"),
    ):
        files = ProcessorFiles(OWN, {"image": images})
        with pytest.raises(ConfigError, match=words):
            Processor(files)
