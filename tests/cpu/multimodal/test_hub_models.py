"""Families whose code is on the hub alone: rows are those of plain forms, tensors have the hub's
names, and prompts with rows have the logits of the text half in transformers."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config.facts import (
    count_weights_in_headers,
    estimate_weights,
    layer_facts,
    read_hf_config,
)
from quire.config.model_identity import is_tower_tensor, resolve_identity
from quire.errors import ConfigError, WeightError
from quire.models.build import build_model, read_model_config
from quire.weights.files import read_headers
from tests.cpu.models.harness import Stepper
from tests.cpu.models.test_shards import check_ranks
from tests.cpu.multimodal.families import image
from tests.cpu.multimodal.hub_models import FAMILIES, built, hd_image
from tests.cpu.multimodal.hub_prompts import HubPrompts, array

SIZES = [(56, 56), (40, 120), (200, 61), (300, 333)]


@pytest.fixture(scope="module", params=FAMILIES)
def made(request, tmp_path_factory):
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@torch.inference_mode()
def test_rows_are_those_of_the_plain_form(made):
    items = made.prompts.items(*SIZES[:2]) + made.prompts.items(*SIZES[2:])
    got = made.rows(items)
    assert len({len(one) for one in got}) > 1 or made.config["model_type"] in ("qwen", "chatglm")
    for i, (item, own) in enumerate(zip(items, got, strict=True), 1):
        wanted = made.rows_of(item)
        assert len(own) == made.prompts.processor.expand(item, i).rows
        assert len(own) <= made.ours[0].media_encoder.max_rows("image")
        assert (own - wanted).abs().max().item() < 1e-4 * max(1.0, wanted.abs().max().item())
        assert wanted.std().item() > 1e-2


def prompt_with(made, count):
    forms = [made.prompts.processor.placeholder("image", i) for i in range(1, count + 1)]
    return "ab" + "".join(f"{form}\nc" for form in forms)


def test_prompts_with_images_have_the_logits_of_the_text_half(made):
    items = made.prompts.items(*SIZES[:2])
    ids, runs = made.prompts.place(prompt_with(made, 2), items)
    rows = made.rows(items)
    assert [sum(n for _, n in own) for own in runs] == [len(own) for own in rows]
    got, wanted = made.logits(ids, runs, rows)
    assert (got.log_softmax(-1) - wanted.log_softmax(-1)).abs().max().item() < 1e-4


@pytest.mark.parametrize("change", ["lost", "further"])
def test_tensors_of_the_encoder_are_all_required_and_no_others_taken(made, change, tmp_path):
    tensors = load_file(made.folder / "model.safetensors")
    (one, *_) = made.towers
    tensors |= {f"{one}.x": torch.ones(3)} if change == "further" else {}
    save_file(
        {name: x for name, x in tensors.items() if change == "further" or name != one},
        tmp_path / "model.safetensors", {"format": "pt"},
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(made.config))
    with pytest.raises(WeightError, match="1 missing" if change == "lost" else "1 unexpected"):
        built(tmp_path)


def test_the_encoder_works_in_bfloat16_with_random_weights(made):
    hf = read_hf_config(made.folder)
    model = build_model(*read_model_config(hf), load_format="dummy", dtype=torch.bfloat16)
    items = made.prompts.items(*SIZES[:2])
    for item, rows in zip(items, made.encoded(model, items), strict=True):
        assert rows.shape == (
            made.prompts.processor.expand(item, 1).rows,
            model.media_encoder.width,
        )
        assert rows.dtype == torch.bfloat16
        assert rows.isfinite().all()


def test_tensors_of_the_encoder_count_as_such_and_are_in_the_first_stage(made):
    headers = read_headers(made.folder, "auto")
    hf = read_hf_config(made.folder)
    sizes = {name: math.prod(one.shape) for name, one in headers.items()}
    towers = sum(size for name, size in sizes.items() if is_tower_tensor(name))
    assert count_weights_in_headers(headers, hf).media == towers > 0
    found = read_model_config(hf)
    options = {"folder": made.folder, "dtype": torch.float32, "progress": False}
    last = build_model(*found, stage=range(1, found[1].layers), **options)
    assert last.media_encoder is None
    alone = build_model(*read_model_config(hf, language_model_only=True), **options)
    assert alone.media_encoder is None


def test_two_ranks_compute_what_one_does(made):
    check_ranks(made.folder, 2)


@pytest.mark.parametrize("size", [(56, 56), (40, 120), (200, 61), (300, 333), (20, 700)])
@pytest.mark.parametrize("most", [1, 4, 16])
def test_phi_resizes_an_image_to_whole_tiles(size, most, tmp_path):
    made = FAMILIES["phi3_v"](tmp_path)
    (item,) = made.prompts.items(size, num_crops=most)
    assert np.array_equal(array(item, "pixels"), np.asarray(hd_image(image(*size), most, 56)))


def test_phi_tokenizes_each_text_between_images_as_a_prompt(tmp_path):
    made = FAMILIES["phi3_v"](tmp_path)
    prompts = made.prompts
    two, one = prompts.items((56, 56), (40, 120))
    ids, runs = prompts.place("a<|image_2|>\n<|image_1|>b", [one, two])
    image_id = prompts.token("<|image|>")
    assert [len(own) for own in runs] == [1, 1]
    (at, n), (at_1, n_1) = runs[0][0], runs[1][0]
    assert (n, n_1) == tuple(prompts.processor.expand(x, 1).rows for x in (two, one))
    assert ids == [
        *prompts.encode("a"), *[image_id] * n, *prompts.encode("\n"), *[image_id] * n_1,
        *prompts.encode("b"),
    ]  # fmt: skip
    assert (at, at_1) == (1, 1 + n + 1)


@torch.inference_mode()
def test_chatglm_without_a_tower_is_a_model_of_text(tmp_path):
    made = FAMILIES["chatglm"](tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    text = {name: x for name, x in tensors.items() if ".vision." not in name}
    save_file(text, tmp_path / "model.safetensors", {"format": "pt"})
    config = {name: x for name, x in made.config.items() if name != "vision_config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, config = built(tmp_path)
    assert model.media_encoder is None
    ids = [5, 7, 250, 31, 8]
    wanted = made.text(torch.tensor([ids])).logits[0]
    assert (Stepper(model, config).logits(ids) - wanted).abs().max().item() < 1e-4


@pytest.mark.slow("a whole engine")
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 6}])
def test_patches_of_glm_share_a_position(settings, tmp_path):
    """Also in chunks that end inside of an image, and in tokens after it."""
    made = FAMILIES["chatglm"](tmp_path)
    form = made.prompts.processor.placeholder("image", 1)
    prompt = f"abc{form}defgh{form}i"
    llm = LLM(
        str(tmp_path), dtype="float32", max_model_len=512, num_gpu_blocks_override=64,
        enable_prefix_caching=False, **settings,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    given = {"image": [image(56, 56), image(40, 120)]}
    (output,) = llm.generate({"prompt": prompt, "multi_modal_data": given}, sampling)
    items = made.prompts.items((56, 56), (40, 120))
    ids, runs = made.prompts.place(prompt, items)
    assert list(output.prompt_token_ids) == ids
    found = list(output.outputs[0].token_ids)
    patch, positions, steps = made.prompts.token("<|endoftext|>"), [], iter(range(1000))
    for before, token in zip([None, *ids, *found], [*ids, *found], strict=False):
        positions.append(positions[-1] if before == token == patch else next(steps))
    rows = made.rows(items)
    at = torch.cat([torch.arange(start, start + n) for own in runs for start, n in own])
    with torch.inference_mode():
        embeds = made.text.get_input_embeddings()(torch.tensor([[*ids, *found]]))
        embeds[0, at] = torch.cat(rows)
        wanted = made.text(inputs_embeds=embeds, position_ids=torch.tensor([positions])).logits[0]
    assert found == wanted[len(ids) - 1 : -1].argmax(-1).tolist()
    assert positions[-1] == len(ids) + 5 - 2 * 3  # each image has 4 patches


@pytest.mark.slow("a whole engine")
def test_two_images_of_phi_answer_as_its_text_half_does(tmp_path):
    """Two numbered images, as in the guides that users follow."""
    made = FAMILIES["phi3_v"](tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"num_crops": 4}')
    prompt = "<|user|>\n<|image_1|>\n<|image_2|>\nWhat?<|end|>\n<|assistant|>\n"
    given = [image(56, 56), image(40, 120)]
    llm = LLM(
        str(tmp_path), dtype="float32", max_model_len=512, num_gpu_blocks_override=64,
        limit_mm_per_prompt={"image": 2},
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate(
        {"prompt": prompt, "multi_modal_data": {"image": given}}, sampling, use_tqdm=False
    )
    items = made.prompts.items((56, 56), (40, 120))
    ids, runs = made.prompts.place(prompt, items)
    assert list(output.prompt_token_ids) == ids
    found = list(output.outputs[0].token_ids)
    more = [*ids, *found]
    _, wanted = made.logits(more, runs, made.rows(items))
    assert found == wanted[len(ids) - 1 : -1].argmax(-1).tolist()


@pytest.mark.slow("a whole engine")
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}])
@pytest.mark.parametrize("name", ["molmo", "molmo_of_olmo", "molmo_of_experts"])
def test_molmo_answers_as_its_text_half_does(name, settings, tmp_path):
    """Its tokens of images are behind the vocabulary, and rows are added to the embedding of one
    of them. Also in chunks that end inside of them, and with a prompt that the cache has."""
    made = FAMILIES[name](tmp_path)
    prompt, given = " User: What? Assistant:", [image(40, 120), image(200, 61)]
    llm = LLM(
        str(tmp_path), dtype="float32", max_model_len=512, num_gpu_blocks_override=64, **settings
    )
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    request = {"prompt": prompt, "multi_modal_data": {"image": given}}
    (output,), (again,) = (llm.generate(request, sampling, use_tqdm=False) for _ in range(2))
    items = made.prompts.items((40, 120), (200, 61))
    ids, runs = made.prompts.place(prompt, items)
    assert list(output.prompt_token_ids) == ids
    assert again.num_cached_tokens >= 16 > output.num_cached_tokens
    found = list(output.outputs[0].token_ids)
    _, wanted = made.logits([*ids, *found], runs, made.rows(items))
    wanted = wanted[len(ids) - 1 : -1].log_softmax(-1)
    for one in (output.outputs[0], again.outputs[0]):
        assert list(one.token_ids) == found == wanted.argmax(-1).tolist()
        got = [step[token].logprob for step, token in zip(one.logprobs, found, strict=True)]
        assert got == pytest.approx(wanted.amax(-1).tolist(), abs=1e-4)


CHATS = {
    "qwen": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "Picture 1: <img></img>\nPicture 2: <img></img>\nhi<|im_end|>\n<|im_start|>assistant\n",
    "deepseek_vl_v2": "<|User|>: <image>\n<image>\nhi\n\n<|Assistant|>:",
    "molmo": " User: hi Assistant:",  # images are before it
}


def test_molmo_refuses_a_tokenizer_with_its_tokens_elsewhere(tmp_path):
    config = {"model_type": "molmo", "embedding_size": 261}
    tokens = ["<|endoftext|>", "<im_start>", "<im_end>", "<im_patch>", "<im_col>"]
    other = HubPrompts(tmp_path, config, [tokens[0], tokens[3], *tokens[1:3], tokens[4]])
    with pytest.raises(ConfigError, match=r"as \[262, 263, 261, 264\]; .* begin at 261"):
        other.place("a", other.items((56, 56)))


@pytest.mark.parametrize(
    "name", ["qwen", "molmo", "molmo_of_olmo", "molmo_of_experts", "deepseek_vl_v2"]
)
def test_widths_of_mlps_are_counted_right_without_headers(name, tmp_path):
    """Of some families config.json has the width of two matrices together."""
    made = FAMILIES[name](tmp_path)
    text = {name: x for name, x in made.tensors.items() if not is_tower_tensor(name)}
    hf = read_hf_config(tmp_path)
    found = estimate_weights(hf, layer_facts(hf)).matrices
    assert found == pytest.approx(sum(x.numel() for x in text.values()), rel=0.1)


def refused(config, field):
    with pytest.raises(ConfigError, match=f"config.json: {field} is "):
        read_model_config(resolve_identity(config))


@pytest.mark.parametrize(
    ("field", "value"),
    [("moe_shared_expert", True), ("moe_top_k", 9), ("norm_after", True), ("rope", False)],
)
def test_molmo_refuses_experts_of_another_form(field, value, tmp_path):
    config = FAMILIES["molmo_of_experts"](tmp_path).config | {field: value}
    refused(config, "num_experts_per_tok" if field == "moe_top_k" else field)


@torch.inference_mode()
def test_molmo_with_pairs_of_neighbours_turns_them(tmp_path):
    """The rotary form that older configs name "cockatoo": that of halves, of other rows."""
    made = FAMILIES["molmo_of_experts"](tmp_path)
    turned, order = {}, torch.arange(16).view(2, 8).T.flatten()  # of a head: its halves in turn
    for name, one in made.tensors.items():
        if name.endswith("att_proj.weight"):
            q, k, v = one.chunk(3)
            q, k = (x.view(4, 16, -1)[:, order].flatten(0, 1) for x in (q, k))
            turned[name] = torch.cat([q, k, v])
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            turned[name] = one.view(4, 16)[:, order].flatten()
    save_file(
        {name: x.contiguous() for name, x in (made.tensors | turned).items()},
        tmp_path / "model.safetensors", {"format": "pt"},
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(made.config | {"rope_impl": "cockatoo"}))
    ids = [5, 7, 250, 31, 8]
    wanted = made.text(torch.tensor([ids])).logits[0]
    assert (Stepper(*built(tmp_path)).logits(ids) - wanted).abs().max().item() < 1e-4


@pytest.mark.slow("a whole engine")
@pytest.mark.parametrize("name", CHATS)
def test_a_checkpoint_without_a_template_has_that_of_its_family(name, tmp_path):
    made = FAMILIES[name](tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=512, num_gpu_blocks_override=64)
    sizes = [(56, 56), (40, 120)]
    parts = [{"type": "image_pil", "image_pil": image(*size)} for size in sizes]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "hi"}]}
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    (output,) = llm.chat([message], sampling, use_tqdm=False)
    assert (
        list(output.prompt_token_ids)
        == made.prompts.place(CHATS[name], made.prompts.items(*sizes))[0]
    )
