"""LLM and its prompts with media on tiny checkpoints, against transformers on the same files."""

import asyncio
import base64
import io
import time

import numpy as np
import pytest
import torch
from PIL import Image

from quire import LLM, AsyncLLM, LoRARequest, SamplingParams
from quire.errors import RequestError, Unsupported
from quire.media import objects
from tests.cpu import peft_alone
from tests.cpu.multimodal import families
from tests.cpu.multimodal.qwen_models import processor_of, saved

TEMPLATE = (
    "{% for m in messages %}w5 {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %} <image> {% endif %}"
    "{% endfor %}{% endif %} w6 {% endfor %}{% if add_generation_prompt %}w7{% endif %}"
)
OPTIONS = {
    "dtype": "float32",
    "kv_cache_memory_bytes": "32MiB",
    "max_model_len": 512,
    "block_size": 16,
    "limit_mm_per_prompt": {"image": 5},
    "enable_mm_embeds": True,
}
GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True)


def photo(height=60, width=80, seed=0):
    return families.image(height, width, seed)


def url_of(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    made = families.made("llava", tmp_path_factory.mktemp("llava"))
    made.processor.chat_template = TEMPLATE
    made.processor.save_pretrained(made.folder)
    return made


@pytest.fixture(scope="module")
def llm(pair):
    return LLM(str(pair.folder), **OPTIONS)


def theirs(pair, text, images):
    """Ids and logprobs of transformers' greedy answer."""
    inputs = pair.processor(images=images or None, text=text, return_tensors="pt")
    with torch.inference_mode():
        out = pair.theirs.generate(
            **inputs, max_new_tokens=6, do_sample=False, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    ids = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    scores = [torch.log_softmax(one[0], -1)[i].item() for one, i in zip(out.scores, ids)]
    return ids, scores, inputs["input_ids"].shape[1]


def same(output, expected):
    (one,) = output.outputs
    ids, scores, length = expected
    assert list(one.token_ids) == ids
    found = [step[i].logprob for step, i in zip(one.logprobs, ids)]
    assert np.abs(np.subtract(found, scores)).max() < 1e-4
    assert len(output.prompt_token_ids) == length


PROMPTS = [
    ("w9 w8", []),
    ("w3 <image> w4", [(60, 80)]),
    ("<image> w3 w10 <image>", [(60, 80), (30, 100)]),
    ("w3 <image> <image> w4 <image> w5", [(56, 56), (120, 40), (60, 80)]),
]


@pytest.mark.parametrize("several", [False, True])
def test_images_of_pil_answer_as_transformers_does(pair, llm, several):
    expected, prompts = [], []
    for text, sizes in PROMPTS:
        images = [photo(*size, i) for i, size in enumerate(sizes)]
        expected.append(theirs(pair, text, images))
        data = {"image": images[0] if len(images) == 1 else images}
        prompts.append({"prompt": text} | ({"multi_modal_data": data} if images else {}))
    if several:
        found = llm.generate(prompts * 3, GREEDY, use_tqdm=False)
        expected = expected * 3
    else:
        found = [llm.generate(one, GREEDY, use_tqdm=False)[0] for one in prompts]
    for one, want in zip(found, expected, strict=True):
        same(one, want)


def test_other_forms_of_an_image_are_the_same_image(pair, llm):
    image = photo()
    want = theirs(pair, "w3 <image> w4", [image])
    ids = pair.processor.tokenizer("w3 <image> w4", add_special_tokens=False)["input_ids"]
    for prompt in (
        {"prompt": "w3 <image> w4", "multi_modal_data": {"image": np.asarray(image)}},
        {"prompt": "w3 <image> w4", "multi_modal_data": {"image": torch.tensor(np.asarray(image))}},
        {"prompt_token_ids": ids, "multi_modal_data": {"image": [image]}},
        {"prompt_token_ids": [*ids[:1], *[150] * 16, *ids[2:]],
         "multi_modal_data": {"image": [image]}},
    ):  # fmt: skip
        same(llm.generate(prompt, GREEDY, use_tqdm=False)[0], want)


def test_images_are_read_by_threads_and_each_by_one(pair, llm, monkeypatch):
    read, inside, most = objects.image_pixels, [], 0

    def watched(image, where):
        nonlocal most
        assert id(image) not in inside, "two threads read one image"
        inside.append(id(image))
        most = max(most, len(inside))
        time.sleep(0.01)
        found = read(image, where)
        inside.remove(id(image))
        return found

    monkeypatch.setattr(objects, "image_pixels", watched)
    images = [photo(seed=i) for i in range(3)]
    prompts = [
        {"prompt": "<image> w9", "multi_modal_data": {"image": reopen(image)}} for image in images
    ]
    got = llm.generate(prompts * 4, GREEDY, use_tqdm=False)
    wanted = [theirs(pair, "<image> w9", [image]) for image in images]
    for one, other in zip(got, wanted * 4):
        same(one, other)
    assert most > 1


def reopen(image):
    """An image of PIL that has not read its file yet."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return Image.open(file)


def test_embeddings_take_the_place_of_the_encoder(pair, llm):
    image = photo(40, 90)
    (rows,) = pair.rows(pair.process([image]))
    want = theirs(pair, "w3 <image> w4", [image])
    for given in (rows, rows[None], [rows], {"image_embeds": rows}, {"image_embeds": rows[None]}):
        prompt = {"prompt": "w3 <image> w4", "multi_modal_data": {"image": given}}
        same(llm.generate(prompt, GREEDY, use_tqdm=False)[0], want)
    for given, reason in (
        ({"image_embeds": rows, "rows": [10**9]}, "beside embeddings; this model reads no sizes"),
        (rows[1:], r"has 15 rows; the item takes 16"),
    ):
        prompt = {"prompt": "w3 <image> w4", "multi_modal_data": {"image": given}}
        with pytest.raises(RequestError, match=reason):
            llm.generate(prompt, GREEDY, use_tqdm=False)


def test_a_uuid_stands_for_an_image_that_was_sent(pair, llm):
    image = photo(44, 44)
    prompt = {"prompt": "w3 <image> w4", "multi_modal_uuids": {"image": ["mine"]}}
    with pytest.raises(RequestError, match="'mine' is cached"):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    llm.generate(prompt | {"multi_modal_data": {"image": image}}, GREEDY, use_tqdm=False)
    want = theirs(pair, "w3 <image> w4", [image])
    same(llm.generate(prompt, GREEDY, use_tqdm=False)[0], want)
    none = prompt | {"multi_modal_data": {"image": [None]}}
    same(llm.generate(none, GREEDY, use_tqdm=False)[0], want)


def test_chat_takes_parts_and_keeps_text_of_users(pair, llm):
    one, two = photo(), photo(100, 50)
    content = [
        {"type": "text", "text": "w8 "},
        {"type": "image_url", "image_url": {"url": url_of(one)}},
        {"type": "text", "text": "w9"},
        {"type": "image_pil", "image_pil": two},
    ]
    want = theirs(pair, "w5 w8  <image> w9 <image>  w6 w7", [one, two])
    (found,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    same(found, want)
    typed = [{"type": "text", "text": "w8 <image> w9"}, content[1]]
    (found,) = llm.chat([{"role": "user", "content": typed}], GREEDY, use_tqdm=False)
    assert found.prompt_token_ids.count(150) == 16
    assert "w8 <image> w9" in found.prompt


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"prompt": "w3", "multi_modal_data": {"image": 1}}, "placeholders for image|image of PIL"),
        ({"prompt": "<image> <image>", "multi_modal_data": {"image": photo()}}, "Found more"),
        ({"prompt": "w3", "multi_modal_data": {"image": photo()}}, "has 0 placeholders"),
        ({"prompt": "w3", "multi_modal_data": {"image": [photo()] * 6}}, r"At most 5 image\(s\)"),
        ({"prompt": "w3", "multi_modal_data": {"video": np.zeros((2, 8, 8, 3))}}, "reads no video"),
        ({"prompt": "<image>", "multi_modal_data": {"image": photo()},
          "mm_processor_kwargs": {"max_pixels": 10**12}}, "mm_processor_kwargs"),
        ({"prompt": "w3 " * 600 + "<image>", "multi_modal_data": {"image": photo()}}, "maximum"),
    ],
)  # fmt: skip
def test_prompts_that_do_not_fit_are_refused_and_others_run(pair, llm, prompt, reason):
    with pytest.raises(RequestError, match=reason):
        llm.generate([{"prompt": "w3 w4"}, prompt], GREEDY, use_tqdm=False)
    same(llm.generate("w9 w8", GREEDY, use_tqdm=False)[0], theirs(pair, "w9 w8", []))
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_request_with_several_answers_has_one_encoder_output(pair, llm):
    image = photo(70, 70)
    params = SamplingParams(n=3, max_tokens=6, top_k=1, ignore_eos=True)
    prompt = {"prompt": "w3 <image> w4", "multi_modal_data": {"image": image}}
    (found,) = llm.generate(prompt, params, use_tqdm=False)
    ids, _, _ = theirs(pair, "w3 <image> w4", [image])
    assert [list(one.token_ids) for one in found.outputs] == [ids] * 3


def test_a_text_half_of_8_bits_reads_images(pair, llm):
    eight = LLM(str(pair.folder), quantization="int8", **OPTIONS)
    prompt = {"prompt": "w3 <image> w4", "multi_modal_data": {"image": photo()}}
    want, got = (one.generate([prompt, "w9 w8"], GREEDY, use_tqdm=False) for one in (llm, eight))
    for a, b in zip(want, got, strict=True):
        first = a.outputs[0].token_ids[0]
        logprobs = [one.outputs[0].logprobs[0][first].logprob for one in (a, b)]
        assert logprobs[0] != logprobs[1] == pytest.approx(logprobs[0], abs=0.1)
    other = prompt | {"multi_modal_data": {"image": photo(seed=1)}}
    changed = eight.generate(other, GREEDY, use_tqdm=False)[0].outputs[0]
    assert changed.cumulative_logprob != got[0].outputs[0].cumulative_logprob


def test_the_text_half_alone_refuses_images(pair):
    llm = LLM(
        str(pair.folder), **OPTIONS | {"language_model_only": True, "enable_mm_embeds": False}
    )
    same(llm.generate("w9 w8", GREEDY, use_tqdm=False)[0], theirs(pair, "w9 w8", []))
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": photo()}}
    with pytest.raises(Unsupported, match="reads text only"):
        llm.generate(prompt, GREEDY, use_tqdm=False)


# -- Qwen2-VL: positions of three axes, images of any size, video ----------------------------------


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    model, processor = saved("qwen2_vl", folder), processor_of("qwen2_vl")
    processor.save_pretrained(folder)
    return model, processor, LLM(str(folder), **OPTIONS)


def test_qwen_answers_as_transformers_does(qwen):
    model, processor, llm = qwen
    mark = "<|vision_start|> <|image_pad|> <|vision_end|>"
    images = [photo(60, 90), photo(120, 56, 1)]
    text = f"w4 {mark} w6 {mark} w3"
    inputs = processor(images=images, text=text, return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    prompt = {"prompt": text, "multi_modal_data": {"image": images}}
    (found,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert list(found.prompt_token_ids) == inputs["input_ids"][0].tolist()
    assert list(found.outputs[0].token_ids) == out[0, inputs["input_ids"].shape[1] :].tolist()


def test_rows_of_several_images_in_one_array_are_divided_by_their_grids(qwen):
    model, processor, llm = qwen
    mark = "<|vision_start|> <|image_pad|> <|vision_end|>"
    images = [photo(60, 90), photo(120, 56, 1)]
    prompt = {"prompt": f"w4 {mark} w6 {mark} w3", "multi_modal_data": {"image": images}}
    want = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0]
    pixels = processor.image_processor(images, return_tensors="pt")
    with torch.inference_mode():
        rows = model.model.get_image_features(**pixels).pooler_output
    data = {"image_embeds": torch.cat(rows), "image_grid_thw": pixels["image_grid_thw"]}
    given = prompt | {"multi_modal_data": {"image": data}}
    got = llm.generate(given, GREEDY, use_tqdm=False)[0].outputs[0]
    assert got.token_ids == want.token_ids
    assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-3)
    wrong = data | {"image_embeds": torch.cat(rows)[1:]}
    with pytest.raises(RequestError, match="embeddings of images need image_grid_thw"):
        llm.generate(prompt | {"multi_modal_data": {"image": wrong}}, GREEDY, use_tqdm=False)


def test_options_of_the_processor_change_the_tokens(qwen):
    _, _, llm = qwen
    text = "<|vision_start|> <|image_pad|> <|vision_end|> w3"
    prompt = {"prompt": text, "multi_modal_data": {"image": Image.new("RGB", (112, 112))}}
    many = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    less = {"max_pixels": 56 * 56}
    few = llm.generate(prompt, GREEDY, use_tqdm=False, mm_processor_kwargs=less)[0]
    own = llm.generate(prompt | {"mm_processor_kwargs": less}, GREEDY, use_tqdm=False)[0]
    assert len(few.prompt_token_ids) == len(own.prompt_token_ids) < len(many.prompt_token_ids)


def test_logprobs_of_a_prompt_leave_out_positions_of_images(llm):
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    prompt = {"prompt": "w3 <image> w4", "multi_modal_data": {"image": photo()}}
    (found,) = llm.generate(prompt, params, use_tqdm=False)
    known = [one is not None for one in found.prompt_logprobs]
    ids = found.prompt_token_ids
    first = ids.index(150)
    assert len(known) == len(ids)
    assert known == [0 < i < first or i >= first + 16 for i in range(len(ids))]


def test_the_cache_of_processed_images_can_be_emptied(llm):
    cache = llm.llm_engine.inputs.media.pipeline.cache
    assert cache.num_bytes > 0
    llm.reset_mm_cache()
    assert cache.num_bytes == 0


def test_rows_of_the_encoder_can_be_forgotten(pair, llm):
    def ask():
        prompt = {"prompt": "w3 <image> w4", "multi_modal_data": {"image": photo(50, 70)}}
        (found,) = llm.generate(prompt | {"cache_salt": next(salts)}, GREEDY, use_tqdm=False)
        stats = llm.llm_engine.engine.snapshot().media
        return found.outputs[0].token_ids, stats.misses, stats.cached

    salts = iter("abc")
    first, misses, cached = ask()
    assert cached
    llm.reset_encoder_cache()
    assert llm.llm_engine.engine.snapshot().media.cached == 0
    again, later, _ = ask()
    assert (again, later) == (first, misses + 1)


@pytest.mark.slow("starts an engine in a process of its own")
def test_an_engine_in_another_process_streams_answers_to_images(pair):
    async def run():
        engine = AsyncLLM.from_engine_args(OPTIONS | {"model": str(pair.folder)})
        try:
            prompt = {"prompt": "w3 <image> w4", "multi_modal_data": {"image": photo()}}
            async for one in engine.generate(prompt, GREEDY):
                last = one
            return last
        finally:
            engine.shutdown()

    same(asyncio.run(run()), theirs(pair, "w3 <image> w4", [photo()]))


@pytest.mark.slow("an engine, and peft beside transformers")
def test_adapters_and_images_share_steps(pair, tmp_path):
    """Rows with an adapter, with images, with both and with neither, in one step."""
    folder, prompts = str(tmp_path / "adapter"), PROMPTS[:2]
    images = [[photo(*size) for size in sizes] for _, sizes in prompts]
    plain = [theirs(pair, text, given) for (text, _), given in zip(prompts, images)]
    targets = r".*language_model.*\.(embed_tokens|q_proj|v_proj|gate_proj|down_proj)"
    lora = dict(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(5)
    adapted = peft_alone.get_peft_model(pair.theirs, peft_alone.LoraConfig(**lora))
    try:
        adapted.save_pretrained(folder, save_embedding_layers=False)
        own = [theirs(pair, text, given) for (text, _), given in zip(prompts, images)]
    finally:
        adapted.unload()
    assert own[1][0] != plain[1][0]
    llm = LLM(str(pair.folder), **OPTIONS, enable_lora=True, max_lora_rank=8)
    given = [
        {"prompt": text, "multi_modal_data": {"image": pictures}} if pictures else text
        for (text, _), pictures in zip(prompts, images)
    ]
    adapters = [None, None, *[LoRARequest("a", 1, folder)] * 2]
    outputs = llm.generate(given * 2, GREEDY, lora_request=adapters, use_tqdm=False)
    for output, expected in zip(outputs, [*plain, *own], strict=True):
        same(output, expected)
    options = OPTIONS | {"enable_lora": True, "max_lora_rank": 8}
    llm = LLM(str(pair.folder), **options, default_mm_loras={"image": folder})
    outputs = llm.generate(given, GREEDY, use_tqdm=False)
    for output, expected in zip(outputs, [plain[0], own[1]], strict=True):
        same(output, expected)
