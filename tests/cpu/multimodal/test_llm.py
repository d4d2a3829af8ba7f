"""Images in prompts of LLM: a folder with a processor's files answers as transformers does."""

import pytest
import torch

from quire import LLM, SamplingParams
from tests import tiers
from tests.cpu.multimodal.families import image, made

TOKENS = 6
PROMPTS = {
    "one": ("w3 w17\n{}\nw5", [(56, 56)]),
    "two": ("w8 {} w9 {} w40 w41", [(40, 120), (200, 61)]),
    "none": ("w3 w4 w5", []),
}


@pytest.fixture(
    params=[
        "llava",
        "idefics2",
        "gemma4_of_31b",
        *tiers.long("internvl", "idefics3", "mistral3", "gemma3", "paligemma"),
        *tiers.long("llama4", "cohere2_vision", "vipllava", "gemma4", "got_ocr2"),
    ]
)
def pair(request, tmp_path):
    found = made(request.param, tmp_path)
    for part in (found.processor.tokenizer, found.processor.image_processor):
        part.save_pretrained(tmp_path)
    return found


def wanted(pair, text, images):
    """Tokens and their log probabilities, of transformers."""
    given = {"text": [text], "return_tensors": "pt"}
    inputs = pair.processor.tokenizer(**given)
    if images:
        flat = pair.hf["model_type"] == "got_ocr2"
        inputs = pair.processor(images=images if flat else [images], **given)
        bfloat16 = {k: v for k, v in inputs.items() if v.dtype == torch.bfloat16}
        inputs |= {name: one.float() for name, one in bfloat16.items()}
    with torch.inference_mode():
        found = pair.theirs.generate(
            **inputs, max_new_tokens=TOKENS, do_sample=False, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    scores = torch.cat(found.scores).log_softmax(-1)
    return found.sequences[0, -TOKENS:].tolist(), scores.max(-1).values.tolist()


@pytest.mark.sampled(2)
def test_prompts_with_images_are_answered_as_by_transformers(pair):
    token = pair.own_processor.placeholder("image", 1)
    llm = LLM(str(pair.folder), dtype="float32", max_model_len=1024, num_gpu_blocks_override=200)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=1)
    asked, expected = [], []
    for text, sizes in PROMPTS.values():
        text, images = text.format(*[token] * len(sizes)), [image(*size) for size in sizes]
        asked.append({"prompt": text, "multi_modal_data": {"image": images}} if images else text)
        expected.append(wanted(pair, text, images))
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    for output, (tokens, logprobs) in zip(outputs, expected, strict=True):
        (made_one,) = output.outputs
        assert list(made_one.token_ids) == tokens
        found = [at[i].logprob for at, i in zip(made_one.logprobs, tokens, strict=True)]
        assert found == pytest.approx(logprobs, abs=1e-4)
