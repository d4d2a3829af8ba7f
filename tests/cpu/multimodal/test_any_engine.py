"""Answers of each family do not depend on chunks, on preemption and on what the caches have."""

import numpy as np
import pytest

from quire import LLM, SamplingParams
from tests.cpu.multimodal.families import image
from tests.gpu.test_media import MARKS, prompts, save

MORE = {
    "aya_vision": "<image>",
    "chatglm": "<|begin_of_image|><|endoftext|><|end_of_image|>",
    "cohere2_vision": "<|IMG_PATCH|>",
    "deepseek_vl": "<image_placeholder>",
    "deepseek_vl_v2": "<image>",
    "got_ocr2": "<imgpad>",
    "internvl": "<IMG_CONTEXT>",
    "lfm2_vl": "<image>",
    "lighton_ocr": "<|image_pad|>",
    "llava_next": "<image>",
    "llava_next_video": "<image>",
    "llava_onevision": "<image>",
    "paligemma": "<image>",
    "qwen": "Picture {}: <img></img>",
    "phi3_v": "<|image_{}|>",
    "smolvlm": "<image>",
    "vipllava": "<image>",
}
"""Families beside those that run on a GPU."""
SPANS = {"gemma3", "gemma4_of_31b", "paligemma"}
"""Whose images no step may divide."""
WITHOUT_HITS = {"paligemma", "lfm2_vl"}
"""Whose prompts are found again not at all, as all tokens see each other, or where a state is."""
WINDOWED = {"gemma4", "gemma4_of_31b"}
"""Whose layers with windows give blocks back: there is room for all."""
PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def answers(llm, given):
    found = llm.generate(given, PARAMS, use_tqdm=False)
    return found, [list(one.outputs[0].token_ids) for one in found]


VIDEOS = ("internvl", "llava_next_video", "llava_onevision", "smolvlm")
"""Families whose videos are frames like images."""


@pytest.mark.long("two engines of each family")
@pytest.mark.parametrize("name", VIDEOS)
def test_videos_are_the_same_in_chunks_and_beside_images(tmp_path, name):
    save(name, tmp_path)
    frames = [np.stack([np.asarray(image(60, 80, k + i)) for k in range(3)]) for i in range(2)]
    mark, still = "<video>", (MARKS | MORE)[name]
    given = [
        {"prompt": "w8 " * k + text, "multi_modal_data": media}
        for k in range(7)
        for text, media in (
            (f"w3 {mark} w4", {"video": frames[0]}),
            (f"w3 {mark} w4", {"video": frames[1]}),
            (f"w3 {mark} w4 {still} w5", {"video": frames[0], "image": image(60, 80)}),
        )
    ]
    common = {"dtype": "float32", "max_model_len": 512, "block_size": 4, "max_num_seqs": 8}
    whole = LLM(str(tmp_path), num_gpu_blocks_override=1000, **common)
    want = answers(whole, given)[1]
    assert want[0] != want[1]
    found, got = answers(whole, given)
    assert got == want
    assert all(one.num_cached_tokens for one in found)
    chunked = LLM(str(tmp_path), num_gpu_blocks_override=1000, max_num_batched_tokens=7, **common)
    assert answers(chunked, given)[1] == want


@pytest.mark.long("three engines of each family")
@pytest.mark.parametrize("name", MARKS | MORE)
def test_chunks_few_blocks_and_prefixes_change_no_answer(tmp_path, name):
    save(name, tmp_path)
    given = prompts((MARKS | MORE)[name])
    common = {"dtype": "float32", "max_model_len": 512, "block_size": 4, "max_num_seqs": 8}
    whole = LLM(str(tmp_path), num_gpu_blocks_override=1000, **common)
    found, want = answers(whole, given)
    assert len(set(map(tuple, want))) > 2
    again, got = answers(whole, given)
    assert got == want
    hits = [one.num_cached_tokens for one, its in zip(again, given) if "multi_modal_data" in its]
    if name not in WITHOUT_HITS:
        assert any(hits) if name in SPANS else all(hits)  # no hit ends within a span
    step = 160 if name in SPANS else 7
    ahead = [one | {"prompt": "w8 " * k + one["prompt"]} for one in given[2:3] for k in range(7)]
    given += ahead  # so that a chunk ends at each offset inside an image
    want = answers(whole, given)[1]
    chunked = LLM(
        str(tmp_path), num_gpu_blocks_override=1000, max_num_batched_tokens=step,
        enable_prefix_caching=False, **common,
    )  # fmt: skip
    assert answers(chunked, given)[1] == want
    longest = max(len(one.prompt_token_ids) for one in found) + 24
    tight = LLM(str(tmp_path), num_gpu_blocks_override=longest // 4 + 24, **common)
    assert answers(tight, given)[1] == want
    if name not in WINDOWED:
        assert tight.llm_engine.engine.stats().preemptions > 0
