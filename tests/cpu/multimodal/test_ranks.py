"""A multimodal checkpoint in an engine, of one rank and of several: the tokens of transformers."""

import dataclasses

import pytest
import torch

from quire import LLM
from quire.core.media import item_tensors
from quire.core.types import MediaItem
from quire.executors.step_arrays import StepArrayWriter
from tests.cpu.engine_of import request
from tests.cpu.multimodal.families import image, made

SIZES = [(40, 90), (56, 56), (200, 70)]
COMMON = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 256,
    "skip_tokenizer_init": True,
    "use_tqdm_on_load": False,
    "num_gpu_blocks_override": 60,
}
RANKS = {
    "one rank": {},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2, "steps_in_flight": 2},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return made("llava", tmp_path_factory.mktemp("llava"))


def request_of(pair, name, images, tokens=8):
    """Words, and the images between them."""
    items = pair.process(images)
    ids = [1, *(token for i in range(len(items)) for token in (20 + i, 150)), 30, 31]
    ids, runs = pair.expanded(ids, items)
    media = []
    for i, (item, own) in enumerate(zip(items, runs, strict=True)):
        start, end = own[0][0], sum(own[-1])
        offsets = tuple((at - start, count) for at, count in own)
        digest = bytes([i]) + item.tensors[0].data[:31]
        media.append(MediaItem("image", digest, start, end - start, offsets, item.tensors))
    extra = tuple((one.start, one.digest) for one in media)
    one = request(name, ids, tokens, logprobs=0, ignore_eos=True)
    return dataclasses.replace(one, media=tuple(media), extra_content=extra)


def want_of(pair, images, tokens=8):
    """What transformers generates."""
    text = " ".join(["<s>", *(f"w{20 + i} <image>" for i in range(len(images))), "w30", "w31"])
    inputs = pair.processor(text=text, images=images or None, return_tensors="pt")
    with torch.no_grad():
        out = pair.theirs.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.usefixtures("forked")
@pytest.mark.slow("engines of several processes")
@pytest.mark.parametrize("ranks", RANKS)
def test_the_tokens_are_those_of_transformers(pair, ranks, monkeypatch):
    """Pixels are in memory that ranks share, or in messages if that is full; none are left."""
    monkeypatch.setattr(item_tensors, "BEHIND_BYTES", 1)
    writers, place = [], StepArrayWriter.place

    def counted(self, *args):
        places = None if len(writers) == 1 else place(self, *args)
        writers.append((self, places))
        return places

    monkeypatch.setattr(StepArrayWriter, "place", counted)
    prompts = {f"r{n}": [image(*size) for size in SIZES[:n]] for n in range(4)}
    llm = LLM(str(pair.folder), **COMMON, **RANKS[ranks], max_num_batched_tokens=24)
    engine = llm.llm_engine.engine
    found = {}
    for name, images in prompts.items():
        engine.add(request_of(pair, name, images))
    while not engine.idle:
        for update in engine.step():
            assert update.error is None
            found.setdefault(update.request_id, []).extend(update.token_ids)
    stats = engine.snapshot().media
    assert all(one.held_messages == 0 for one, _ in writers)
    llm.llm_engine.engine.shutdown()
    assert sum(bool(places) for _, places in writers) >= (2 if "two" in ranks else 0)
    assert found == {name: want_of(pair, images) for name, images in prompts.items()}
    assert stats.misses == 3, "an item of several requests is encoded once"
    assert stats.capacity_bytes == 32 * 64 * 4, "the 24 tokens of a step, in pages of 16"
