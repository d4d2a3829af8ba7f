"""Prompts with images on a GPU answer as on a CPU, beside prompts of text and from graphs."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.startup import scheduler_setup
from quire.kernels.framework import late_work
from quire.runner.gpu.cuda_graphs import CudaGraphCache
from quire.runner.gpu.graph_groups import OwnedGraph
from quire.runner.gpu.mixed_batch_graphs import GraphShape
from quire.runner.media.encoder_pool import EncoderPool
from quire.runner.media.media_rows import find_media_rows
from tests.cpu.multimodal import (
    families,
    hub_models,
    qwen_models,
    test_gemma3n,
    test_minicpmv,
    test_omni,
    unusual,
)

OPTIONS = {
    "dtype": "float32", "num_gpu_blocks_override": 256, "max_model_len": 512, "block_size": 16,
    "max_num_batched_tokens": 160, "max_num_seqs": 8, "use_tqdm_on_load": False,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=8, temperature=0, logprobs=1, ignore_eos=True)
SIZES = [[], [(60, 80)], [(60, 80), (30, 100)], [(120, 40)]]
MARKS = {
    "llava": "<image>",
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "gemma4_of_31b": "<|image|>",
    "idefics2": "<image>",
    "idefics3": "<image>",
    "kimi_vl": "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
    "llama4": "<|image|>",
    "mistral3": "[IMG]",
    "molmo": "",
    "molmo_of_experts": "",
    "phi4_multimodal": "<|image|>",
    "pixtral": "[IMG]",
    "qwen2_vl": "<|vision_start|> <|image_pad|> <|vision_end|>",
    "qwen2_5_vl": "<|vision_start|> <|image_pad|> <|vision_end|>",
    "qwen3_vl": "<|vision_start|> <|image_pad|> <|vision_end|>",
}
IN_PARTS = {"gemma4", "gemma4_of_31b", "internvl", "llava_next_video", "llava_onevision"}
"""Whose processor does not save itself: that of the tests has no video."""
NARROW = {"gemma4", "gemma4_of_31b"}
"""Whose towers have norms of 8 and 32 numbers here: a program has 1 to 64 of such rows, by their
number. Towers of checkpoints are wider, and reach the most rows of a program at 128 patches."""
SINGLE_LAUNCHES = {"gemma3", "gemma4_of_31b", "kimi_vl"}
"""Whose steps with prompts have no graphs: images are spans of attention, or it is MLA."""


def save(name, folder):
    if name in qwen_models.FAMILIES:
        qwen_models.saved(name, folder)
        qwen_models.processor_of(name).save_pretrained(folder)
    elif name in hub_models.FAMILIES:
        hub_models.FAMILIES[name](folder)
    else:
        processor = families.made(name, folder).processor
        if name in IN_PARTS:
            processor.tokenizer.save_pretrained(folder)
            processor.image_processor.save_pretrained(folder)
        else:
            processor.save_pretrained(folder)


def prompts(mark):
    """Text and images; the same image twice; more tokens than a step computes.

    mark: of an image, with {} for its number where the family numbers them.
    """
    made = []
    for i, sizes in enumerate(SIZES * 2):
        images = [families.image(*size, k) for k, size in enumerate(sizes)]
        marks = [f"{mark} w4".format(k) for k in range(1, len(images) + 1)]
        text = " ".join([f"w{i % 4 + 9} w8", *marks])
        made.append({"prompt": text} | ({"multi_modal_data": {"image": images}} if images else {}))
    return made


@pytest.mark.slow("engines on both devices, and kernels that are compiled")
@pytest.mark.parametrize("name", MARKS)
def test_answers_are_those_of_a_cpu(tmp_path, monkeypatch, name):
    ran, run = set(), CudaGraphCache.run
    monkeypatch.setattr(
        CudaGraphCache,
        "run",
        lambda own, key: (
            ran.add(
                (type(key), key[-1] if isinstance(key, OwnedGraph) else key.variant, key in own)
            ),
            run(own, key),
        ),
    )
    save(name, tmp_path)
    given = prompts(MARKS[name])
    answers = []
    for device in ("cpu", "cuda"):
        llm = LLM(str(tmp_path), device=device, **OPTIONS)
        before = late_work.counts()
        answers.append([one.outputs[0] for one in llm.generate(given, GREEDY, use_tqdm=False)])
        if device == "cuda":
            after = late_work.counts()
            if name not in NARROW:
                assert after.kernel_compilations == before.kernel_compilations
    if name not in SINGLE_LAUNCHES:
        assert (GraphShape, "media", True) in ran
    rows = find_media_rows(llm.llm_engine.engine.executor.runner.model)
    if rows.pool.graphs.sizes:  # none if its images have sizes of their own
        assert (OwnedGraph, "media", True) in ran  # of the encoder
    assert not any(variant == "media" and not captured for _, variant, captured in ran)
    for want, got in zip(*answers):
        assert list(got.token_ids) == list(want.token_ids)
        for one, other in zip(got.logprobs, want.logprobs):
            for token, found in one.items():
                assert abs(found.logprob - other[token].logprob) < 1e-3
    torch.cuda.empty_cache()


def omni_prompts(folder):
    test_omni.write_model(folder, "qwen3_omni_moe")
    return [
        test_omni.prompt_of(test_omni.FAMILIES["qwen3_omni_moe"], mix) for mix in test_omni.MIXES
    ]


def gemma3n_prompts(folder):
    test_gemma3n.made(folder)
    return [test_gemma3n.prompt_of(*mix) for mix in test_gemma3n.MIXES]


def minicpmv_prompts(folder):
    test_minicpmv.made(folder, "4_7", "16x")
    return [test_minicpmv.prompt_of(*mix) for mix in test_minicpmv.MIXES]


@pytest.mark.slow("engines on both devices, and kernels that are compiled")
@pytest.mark.parametrize("write", [omni_prompts, gemma3n_prompts, minicpmv_prompts])
def test_mixed_items_are_read_as_on_a_cpu(tmp_path, write):
    options = OPTIONS | {"max_model_len": 1024, "num_gpu_blocks_override": 400}
    with test_gemma3n.tiny_layout():
        given, answers = write(tmp_path), []
        for device in ("cpu", "cuda"):
            llm = LLM(str(tmp_path), device=device, **options)
            answers.append([one.outputs[0] for one in llm.generate(given, GREEDY, use_tqdm=False)])
    for want, got in zip(*answers):
        assert list(got.token_ids) == list(want.token_ids)
        for one, other in zip(got.logprobs, want.logprobs):
            for token, found in one.items():
                assert abs(found.logprob - other[token].logprob) < 1e-3
    torch.cuda.empty_cache()


@pytest.mark.slow("engines on both devices, and kernels that are compiled")
def test_images_that_cross_attention_reads_are_read_as_on_a_cpu(tmp_path):
    pair = unusual.mllama(tmp_path)
    given = []
    for i, sizes in enumerate(SIZES * 2):
        images = [families.image(*size, k) for k, size in enumerate(sizes)]
        prompt = pair.prompt(f"w{i % 4 + 9} w8 w7 w6", images)
        given.append(
            {"prompt": prompt} | ({"multi_modal_data": {"image": images}} if images else {})
        )
    answers = []
    for device in ("cpu", "cuda"):
        llm = LLM(str(tmp_path), device=device, **OPTIONS | {"max_model_len": 256})
        answers.append([one.outputs[0] for one in llm.generate(given, GREEDY, use_tqdm=False)])
    for want, got in zip(*answers):
        assert list(got.token_ids) == list(want.token_ids)
        for one, other in zip(got.logprobs, want.logprobs):
            for token, found in one.items():
                assert abs(found.logprob - other[token].logprob) < 1e-3
    torch.cuda.empty_cache()


@pytest.mark.slow("an engine, and kernels that are compiled")
@pytest.mark.parametrize(("name", "rows"), [("qwen2_5_vl", 3), ("qwen3_vl", 3), ("llava", 1)])
def test_items_that_are_encoded_in_slices_have_the_answers_of_whole_ones(
    tmp_path, monkeypatch, name, rows
):
    """Beside sequences that decode all the while."""
    monkeypatch.setitem(scheduler_setup.SLICES, "cuda", (rows, 0))
    ran, run_slice = [], EncoderPool.encode_slice
    monkeypatch.setattr(
        EncoderPool, "encode_slice", lambda own, *at: (ran.append(at), run_slice(own, *at))
    )
    save(name, tmp_path)
    given, mark = [{"prompt": "w9 w8 w4"}], MARKS[name]
    for i in range(6):
        images = [families.image(40 + 10 * i, 90, i), families.image(60, 60 + 9 * i, 50 + i)]
        text = f"w{i % 4 + 9} {mark} w4 {mark}"
        given.append({"prompt": text, "multi_modal_data": {"image": images}})
    params = [
        SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
        for length in (60, *range(4, 46, 7))
    ]
    answers = []
    for target in (0, 40):
        options = OPTIONS | {"max_num_seqs": 3, "enable_prefix_caching": False}
        llm = LLM(str(tmp_path), device="cuda", inter_token_target_ms=target, **options)
        before = late_work.counts()
        found = llm.generate(given, params, use_tqdm=False)
        answers.append([list(one.outputs[0].token_ids) for one in found])
        assert late_work.counts().kernel_compilations == before.kernel_compilations
        assert bool(ran) == (target > 0)
    assert answers[0] == answers[1]
    torch.cuda.empty_cache()
