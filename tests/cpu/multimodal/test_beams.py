"""Beam search over prompts with images, against the same search over logits of transformers."""

import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams
from tests.cpu.multimodal import families
from tests.cpu.multimodal.qwen_models import processor_of, saved

OPTIONS = {
    "dtype": "float32",
    "kv_cache_memory_bytes": "32MiB",
    "max_model_len": 512,
    "block_size": 16,
}
WIDTH, ROUNDS = 3, 4


def photo():
    return families.image(60, 80)


@torch.inference_mode()
def search(model, inputs):
    """The best sequences of tokens, with their logprobs: those of a search without an end."""
    beams = [((), 0.0)]
    base = inputs.pop("input_ids")
    kinds = inputs.pop("mm_token_type_ids", None)
    inputs.pop("attention_mask")
    for _ in range(ROUNDS):
        grown = []
        for tokens, total in beams:
            ids = torch.cat([base, torch.tensor([tokens], dtype=base.dtype)], 1)
            if kinds is not None:
                own = torch.nn.functional.pad(kinds, (0, len(tokens)))
                inputs["mm_token_type_ids"], model.model.rope_deltas = own, None
            logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, -1]
            logprobs, best = torch.log_softmax(logits, -1).topk(2 * WIDTH)
            grown += [
                ((*tokens, token), total + value)
                for token, value in zip(best.tolist(), logprobs.tolist())
            ]
        beams = sorted(grown, key=lambda one: -one[1])[:WIDTH]
    return beams


def same(found, want):
    for one, (tokens, total) in zip(found.sequences, want, strict=True):
        assert tuple(one.tokens[-ROUNDS:]) == tokens
        assert one.cum_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.slow("two models of transformers and two engines")
@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_beams_of_an_image_are_those_of_transformers(tmp_path, family):
    if family == "llava":
        made = families.made(family, tmp_path)
        made.processor.save_pretrained(tmp_path)
        theirs, processor, form = made.theirs, made.processor, "w3 <image> w4"
    else:
        theirs = saved(family, tmp_path)
        processor = processor_of(family)
        processor.save_pretrained(tmp_path)
        form = "w3 <|vision_start|> <|image_pad|> <|vision_end|> w4"
    inputs = dict(processor(images=[photo()], text=form, return_tensors="pt"))
    llm = LLM(str(tmp_path), **OPTIONS)
    prompt = {"prompt": form, "multi_modal_data": {"image": photo()}}
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=ROUNDS, ignore_eos=True)
    found = llm.beam_search([prompt, prompt], params)
    want = search(theirs, inputs)
    for one in found:
        same(one, want)
    greedy = SamplingParams(max_tokens=ROUNDS, temperature=0, ignore_eos=True)
    (plain,) = llm.generate(prompt, greedy, use_tqdm=False)
    one = BeamSearchParams(beam_width=1, max_tokens=ROUNDS, ignore_eos=True)
    (single,) = llm.beam_search([prompt], one)
    assert single.sequences[0].tokens[-ROUNDS:] == list(plain.outputs[0].token_ids)
