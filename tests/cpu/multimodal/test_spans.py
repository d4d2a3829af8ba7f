"""Images whose tokens see each other in both directions: an engine answers as transformers does."""

import pytest
import torch

from quire import LLM, SamplingParams
from tests.cpu.multimodal.families import check_answers, image, made

PARAMS = SamplingParams(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True)
OPTIONS = {"dtype": "float32", "max_model_len": 256, "use_tqdm_on_load": False,
           "num_gpu_blocks_override": 64, "mm_processor_workers": 1}  # fmt: skip
PROMPTS = {
    "gemma3": ["w3 <start_of_image> w4 <start_of_image> w5 w6", "w9 <start_of_image> w7", "w8 w3"],
    "paligemma": ["<image> w3 w4", "<image> <image> w5"],
}


@pytest.mark.slow("an engine, and a model of transformers")
@pytest.mark.parametrize("name", PROMPTS)
def test_answers_are_those_of_transformers(tmp_path, name):
    pair = made(name, tmp_path)
    pair.processor.save_pretrained(tmp_path)
    prompts, wants = [], []
    for text in PROMPTS[name]:
        images = [image(40, 90, k) for k in range(text.count("image>"))]
        media = {"multi_modal_data": {"image": images}} if images else {}
        prompts.append({"prompt": text} | media)
        given = [images] if images else None
        wants.append(answer(pair, pair.processor(images=given, text=[text], return_tensors="pt")))
    check_answers(LLM(str(tmp_path), **OPTIONS), prompts, wants, PARAMS, 1e-4)


@torch.inference_mode()
def answer(pair, inputs):
    """Ids of the prompt and of the greedy answer, and its log-probabilities."""
    out = pair.theirs.generate(
        **inputs, max_new_tokens=6, do_sample=False, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    prompt = inputs["input_ids"][0].tolist()
    ids = out.sequences[0, len(prompt) :].tolist()
    scores = [torch.log_softmax(one[0], -1)[i].item() for one, i in zip(out.scores, ids)]
    return prompt, ids, scores
