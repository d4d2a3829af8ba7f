"""Prompts with images and videos of Qwen's families in an engine answer as in transformers."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.engine_config import MediaEncoderSection
from quire.config.facts import read_hf_config
from quire.core.types import MediaItem, StopConditions
from quire.engine.startup import scheduler_setup
from quire.errors import RequestError
from quire.media.image_ops import from_tensor
from quire.media.processor import DecodedImage
from quire.models.base import EncoderInput
from quire.models.build import build_model, read_model_config
from quire.runner.media.encoder_pool import EncoderPool
from tests import tiers
from tests.cpu.engine_of import engine_of, request, run
from tests.cpu.multimodal.families import image
from tests.cpu.multimodal.qwen_models import (
    expanded,
    own_processor,
    patches_in,
    processor_of,
    saved,
    video_of,
)

MEDIA = {
    "a": lambda: image(56, 56),
    "b": lambda: image(40, 120),
    "c": lambda: image(100, 61),
    "v": lambda: video_of(3, 60, 90, step=2),
    "w": lambda: video_of(4, 90, 60, step=3),
}
LONG = "bcawcabvwc"
PROMPTS = ["", "a", "bc", "abv", "wc", "cab"]
TOKENS = 6


class Family:
    """A family's models, transformers' and ours, and requests to both."""

    def __init__(self, family, folder):
        self.theirs, self.name, self.folder = saved(family, folder), family, folder
        processor_of(family).save_pretrained(folder)
        # transformers' GLM takes images or videos in one prompt.
        self.prompts = ["", "a", "bc", "v", "w", "cab"] if family.startswith("glm") else PROMPTS
        hf = read_hf_config(folder)
        model_type, config = read_model_config(hf)
        model = build_model(model_type, config, folder=folder, dtype=torch.float32, progress=False)
        self.hf, self.built = hf, (model, config)
        self.tokenizer = processor_of(family).tokenizer
        self.processor = own_processor(processor_of(family), self.theirs.config.to_dict())

    @functools.cache  # noqa: B019 - families live as long as the tests
    def asked(self, mix):
        """(ids, processed items, their places) of a prompt."""
        given = [(kind, MEDIA[kind]()) for kind in mix]
        items = []
        for kind, one in given:
            modality = "video" if kind in "vw" else "image"
            media = one if modality == "video" else DecodedImage(np.asarray(one))
            items.append(self.processor.process(media, {}))
        return *expanded(self.processor, self.text(mix), items, self.tokenizer), items

    def text(self, mix):
        """Words, and a placeholder for each item."""
        marks = [
            self.processor.placeholder("video" if kind in "vw" else "image", 1) for kind in mix
        ]
        return " ".join([*(f"w{i + 9} w11 {mark}" for i, mark in enumerate(marks)), "w40 w41 w7"])

    def request(self, mix, name=None, **more):
        ids, placed, items = self.asked(mix)
        rope = self.processor.rope(ids, placed)
        made = request(name or mix or "text", ids, TOKENS, logprobs=2, **more)
        media = tuple(
            MediaItem(
                place.modality, (kind * 32).encode(), place.start, len(place.expansion.token_ids),
                place.expansion.runs, item.tensors,
            )
            for kind, place, item in zip(mix, placed, items, strict=True)
        )  # fmt: skip
        fields = (
            {} if rope is None else {"rope_positions": rope[0].tobytes(), "rope_delta": rope[1]}
        )
        extra = tuple((one.start, one.digest) for one in media)
        return dataclasses.replace(made, media=media, extra_content=extra, **fields)

    def inputs(self, mix):
        """What the encoder reads."""
        return [
            EncoderInput(
                item.modality,
                {one.name: torch.from_numpy(from_tensor(one).copy()) for one in item.tensors},
            )
            for item in self.asked(mix)[2]
        ]

    @functools.cache  # noqa: B019 - families live as long as the tests
    def wanted(self, mix):
        """(tokens, log probabilities of them and of the second best) of transformers."""
        ids, placed, items = self.asked(mix)
        given = {"input_ids": torch.tensor([ids])}
        kinds = torch.zeros(1, len(ids), dtype=torch.int32)
        for place in placed:
            for start, count in place.expansion.runs:
                start += place.start
                kinds[0, start : start + count] = 1 if place.modality == "image" else 2
        for modality, pixels, grids in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            own = [patches_in(one, self.processor) for one in items if one.modality == modality]
            if own:
                given[pixels] = torch.cat([one for one, _ in own])
                given[grids] = torch.tensor([grid for _, grid in own])
        seconds = [one.sizes["seconds"] for one in items if "seconds" in one.sizes]
        if seconds:
            given["second_per_grid_ts"] = seconds
        if items:
            given["mm_token_type_ids"] = kinds
        self.theirs.model.rope_deltas = None
        with torch.inference_mode():
            found = self.theirs.generate(
                **given, max_new_tokens=TOKENS, do_sample=False, output_scores=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        scores = torch.cat(found.scores).log_softmax(-1)
        return found.sequences[0, len(ids) :].tolist(), scores.topk(2).values.flatten().tolist()

    def engine(self, **settings):
        width = self.built[0].media_encoder.width
        media = MediaEncoderSection(
            modalities=("image", "video"), row_bytes=4 * width, bidirectional=False,
            step_rows=64, cache_rows=96, slices=self.built[0].media_encoder.slices,
        )  # fmt: skip
        settings.setdefault("budget", 200)
        return engine_of(self.hf, built=self.built, media=media, **settings)


@pytest.fixture(
    scope="module",
    params=[
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_5",
        *tiers.long("qwen2_vl", "qwen3_vl_moe", "qwen3_5_moe", "glm4v", "glm4v_moe", "glm_ocr"),
    ],
)
def family(request, tmp_path_factory):
    return Family(request.param, tmp_path_factory.mktemp("model"))


def answers(built, requests):
    """Name -> tokens and log probabilities."""
    tokens, updates = run(built, requests)
    found = {key: (ids, []) for key, ids in tokens.items()}
    for update in updates:
        assert update.error is None
        for one in update.logprobs or ():
            found[update.request_id, update.index][1].extend(one.values[1:])
    return found


def check(family, found):
    for (name, _), (tokens, logprobs) in found.items():
        wanted = family.wanted("" if name == "text" else name.split()[0])
        assert tokens == wanted[0], name
        assert logprobs == pytest.approx(wanted[1], abs=1e-4), name


SETTINGS = {
    "as it comes": {},
    "chunks of 5, steps in flight": {"budget": 5, "seqs": 4, "depth": 2},
    "preempted": {"block_size": 4},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_batch_of_prompts_is_answered_as_by_transformers(family, name):
    requests, settings = [family.request(mix) for mix in family.prompts], {}
    if name == "preempted":
        longest = max(len(one.prompt) for one in requests) + TOKENS
        settings = {"num_blocks": longest // 4 + 2}
    built = family.engine(**SETTINGS[name], **settings)
    check(family, answers(built, requests))
    assert (built.stats().preemptions > 0) == (name == "preempted")


def test_prompts_whose_items_are_encoded_in_slices_are_answered_the_same(family, monkeypatch):
    """Beside a text that decodes all the while, and while other items are encoded."""
    monkeypatch.setitem(scheduler_setup.SLICES, "cpu", (1, 0))
    ran, run_slice = [], EncoderPool.encode_slice
    monkeypatch.setattr(
        EncoderPool, "encode_slice", lambda own, *at: (ran.append(at), run_slice(own, *at))
    )
    built = family.engine(target_s=0.04, depth=2)
    text = dataclasses.replace(family.request("", "first"), stop=StopConditions(60))
    built.add(text)
    for _ in range(4):
        built.step()
    found = answers(built, [family.request(mix) for mix in family.prompts])
    found.pop(("first", 0))
    check(family, found)
    assert len(ran) > 5


def test_a_prefix_with_an_image_is_found_again_and_answers_the_same(family):
    built = family.engine(block_size=4)
    long = LONG if family.name.startswith("qwen3_5") else "bc"  # states are kept from 64 tokens on
    answers(built, [family.request(long)])
    cached = {}
    for mix in (long, "cab"):
        built.add(family.request(mix, f"{mix} again"))
        while not built.idle:
            cached |= {one.request_id: one.cached_tokens for one in built.step()}
    ids = family.asked(long)[0]
    assert cached[f"{long} again"] == (len(ids) - 1) // 4 * 4
    assert cached["cab again"] == 0
    again = [family.request(long, f"{long} {i}") for i in (2, 3)]
    check(family, answers(built, again))


def given(mix, make=lambda kind: MEDIA[kind]()):
    """multi_modal_data of a prompt."""
    videos = [make(kind) for kind in mix if kind in "vw"]
    found = {"image": [make(kind) for kind in mix if kind not in "vw"]}
    found["video"] = [(one.frames, dataclasses.asdict(one.info)) for one in videos]
    return {key: value for key, value in found.items() if value}


@pytest.mark.sampled(2)
def test_an_llm_answers_prompts_with_images_and_videos_as_transformers_does(family):
    llm = LLM(
        str(family.folder), dtype="float32", kv_cache_memory_bytes="32MiB", max_model_len=512,
        max_num_batched_tokens=32, enable_mm_embeds=True,
    )  # fmt: skip
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=2, ignore_eos=True)
    prompts = [
        {"prompt": family.text(mix), "multi_modal_data": given(mix)} for mix in family.prompts
    ]
    found = llm.generate(prompts, greedy, use_tqdm=False)
    rows = family.built[0].media_encoder.encode(family.inputs("a"))[0]
    grid = torch.tensor([[1, *(2 * side for side in family.asked("a")[2][0].sizes["grid"][1:])]])
    embeds = {"image_embeds": rows, "image_grid_thw": grid}
    prompt = {"prompt": family.text("a"), "multi_modal_data": {"image": embeds}}
    found += llm.generate(prompt, greedy, use_tqdm=False)
    for mix, output in zip([*family.prompts, "a"], found, strict=True):
        assert list(output.prompt_token_ids) == family.asked(mix)[0]
        (one,) = output.outputs
        tokens, logprobs = family.wanted(mix)
        assert list(one.token_ids) == tokens
        best = [sorted((x.logprob for x in step.values()), reverse=True) for step in one.logprobs]
        assert np.ravel(best) == pytest.approx(logprobs, abs=1e-4)
    if family.name == "qwen2_5_vl":  # 2 frames in 400 s: 4 positions a second
        slow = {"fps": 0.01, "frames_indices": [0, 1, 2, 3], "total_num_frames": 4}
        video = (MEDIA["w"]().frames, slow)
        prompt = {"prompt": family.text("v"), "multi_modal_data": {"video": video}}
        with pytest.raises(RequestError, match=r"tokens with positions up to 8\d\d"):
            llm.generate(prompt, greedy, use_tqdm=False)
