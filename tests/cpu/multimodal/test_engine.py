"""Steps with media: rows of an encoder take their places however an engine divides its work.

The encoder is made up. The oracle of a model without further inputs is a prompt whose embeddings
are given; that of the others the same prompt in one step.
"""

import dataclasses

import numpy as np
import pytest
import torch

from quire.config.engine_config import MediaEncoderSection
from quire.core.types import MediaItem, MediaTensor, PromptEmbeds
from quire.models.build import build_model, read_model_config
from tests.cpu.engine_of import TINY, WINDOWED, engine_of, request, run

SEED = 3
MROPE = TINY | {
    "model_type": "qwen2",
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
}


class FakeEncoder(torch.nn.Module):
    """Rows [n, width] are a function of the item's bytes."""

    makes_results = False
    added_token = None

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.calls = []  # bytes of the items of each call

    def graph_sizes(self):
        return ()

    def encode(self, items):
        self.calls.append([bytes(one.tensors["pixels"].tolist()) for one in items])
        return [rows_of(one.tensors["pixels"].numpy(), self.width) for one in items]


def rows_of(pixels, width):
    made = np.random.default_rng([*pixels]).standard_normal((len(pixels), width)) * 0.4
    return torch.from_numpy(made.astype(np.float32))


def build(hf, levels=0):
    model_type, config = read_model_config(hf)
    model = build_model(
        model_type, config, load_format="dummy", dtype=torch.float32, progress=False, seed=7
    )
    model.media_encoder = FakeEncoder(config.hidden * (1 + levels))
    return model, config


MODELS = {
    "llama": build(TINY),
    "deepstack": build(TINY, levels=2),
    "mrope": build(MROPE),
    "windowed": build(WINDOWED),
}


def section(built, **sizes):
    sizes = {"step_rows": 64, "cache_rows": 96} | sizes
    width = built[0].media_encoder.width
    return MediaEncoderSection(
        modalities=("image",), row_bytes=4 * width, bidirectional=True, **sizes
    )


def engine(kind="llama", sizes=None, **settings):
    built = MODELS[kind]
    built[0].media_encoder.calls.clear()
    hf = {"mrope": MROPE, "windowed": WINDOWED}.get(kind, TINY)
    settings.setdefault("budget", 200)
    return engine_of(hf, built=built, media=section(built, **sizes or {}), **settings)


def item(start, content, *, runs=((1, 7), (9, 4)), length=14, bidirectional=False):
    pixels = bytes([content]) * sum(count for _, count in runs)
    tensor = MediaTensor("pixels", "uint8", (len(pixels),), pixels)
    digest = bytes([content]) * 32
    return MediaItem("image", digest, start, length, runs, (tensor,), bidirectional)


def ask(name, *contents, head=3, tail=5, tokens=8, kind="llama", bidirectional=False, **more):
    """Text, and between it an image of each content."""
    prompt, items = [5, 6, 7][:head], []
    for content in contents:
        items.append(item(len(prompt), content, bidirectional=bidirectional))
        prompt += [1] * 14 + [20 + content, 21]
    prompt += [30 + i for i in range(tail)]
    fields = {}
    if kind == "mrope":
        fields = {
            "rope_positions": positions_of(prompt, items).tobytes(),
            "rope_delta": -8 * len(items),
        }
    made = request(name, prompt, tokens, logprobs=2, **more)
    extra = tuple((one.start, one.digest) for one in items)
    return dataclasses.replace(made, media=tuple(items), extra_content=extra, **fields)


def positions_of(prompt, items):
    """An image of 14 positions takes 6 of each axis."""
    found, at = np.zeros((3, len(prompt)), np.int32), 0
    starts = {one.start for one in items}
    i = 0
    while i < len(prompt):
        if i in starts:
            found[:, i : i + 14] = at + np.stack([np.arange(14) % k for k in (1, 6, 5)])
            i, at = i + 14, at + 6
        else:
            found[:, i] = at
            i, at = i + 1, at + 1
    return found


def with_embeds(one, width):
    """The same request, with rows given as prompt embeddings."""
    spans = []
    for each in one.media:
        rows = rows_of(np.frombuffer(each.tensors[0].data, np.uint8), width).numpy()
        at = 0
        for offset, count in each.runs:
            spans.append(
                PromptEmbeds(each.start + offset, count, "float32", rows[at : at + count].tobytes())
            )
            at += count
    return dataclasses.replace(one, media=(), prompt_embeds=tuple(spans))


def answers(built_engine, requests, **how):
    """(id, index) -> tokens and logprobs."""
    tokens, updates = run(built_engine, requests, **how)
    found = {key: (ids, []) for key, ids in tokens.items()}
    for update in updates:
        found[update.request_id, update.index][1].extend(
            value for one in update.logprobs or () for value in one.values
        )
    return found


def same(found, want):
    assert found.keys() == want.keys()
    for key, (tokens, logprobs) in found.items():
        assert tokens == want[key][0], key
        assert logprobs == pytest.approx(want[key][1], abs=1e-5), key


def alone(kind, requests):
    """The answers of each request in an engine of its own, computed in one step."""
    found = {}
    for one in requests:
        found |= answers(engine(kind, prefix=False, eager=True), [one])
    return found


def workload(kind, **more):
    return [
        ask("two", 1, 2, kind=kind, **more),
        ask("text", kind=kind),
        ask("same", 2, kind=kind, head=1, n=2, seed=4, **more),
        ask("first", 3, kind=kind, head=0, tokens=12, **more),
    ]


def test_rows_take_the_places_of_embeddings():
    requests = workload("llama")
    want = {}
    for one in requests:
        given = with_embeds(one, 32)
        want |= answers(engine_of(built=MODELS["llama"], prefix=False), [given])
    same(alone("llama", requests), want)


def test_generated_tokens_go_on_behind_the_axes_of_an_image():
    one = ask("one", 1, 2, kind="mrope", tokens=5)
    ((key, (tokens, logprobs)),) = alone("mrope", [one]).items()
    for n in range(1, 5):
        prompt = [*one.prompt, *tokens[:n]]
        given = dataclasses.replace(
            one, prompt=tuple(prompt), rope_positions=positions_of(prompt, one.media).tobytes()
        )
        found = alone("mrope", [given])[key]
        assert found[0][: 5 - n] == tokens[n:]
        assert found[1][:3] == pytest.approx(logprobs[3 * n : 3 * n + 3], abs=1e-5)


SETTINGS = {
    "as it comes": {},
    "steps in flight": {"depth": 2},
    "no tape": {"eager": True},
    "chunks of 7": {"budget": 7, "seqs": 4},
    "few blocks": {"num_blocks": 14, "block_size": 8, "depth": 2},
    "without a prefix cache": {"prefix": False, "sizes": {"step_rows": 1, "cache_rows": 16}},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_answers_are_the_same_in_any_engine(kind, name):
    requests, built_engine = workload(kind), engine(kind, **SETTINGS[name])
    same(answers(built_engine, requests), alone(kind, requests))
    assert (built_engine.stats().preemptions > 0) == (name == "few blocks")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["deepstack", "mrope"])
def test_a_chunk_may_end_at_every_offset_inside_an_item(kind):
    one = ask("one", 1, 2, kind=kind, tokens=4)
    want = alone(kind, [one])
    for budget in range(1, 20):
        same(answers(engine(kind, budget=budget), [one]), want)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["llama", "windowed"])
@pytest.mark.parametrize(
    "settings", [{}, {"budget": 13, "seqs": 3}, {"num_blocks": 26, "block_size": 4}]
)
def test_tokens_of_a_run_see_each_other_in_any_engine(kind, settings):
    requests = workload(kind, bidirectional=True)
    want = alone(kind, requests)
    assert want["two", 0] != alone(kind, workload(kind))["two", 0]
    same(answers(engine(kind, **settings), requests), want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [{}, {"budget": 50, "seqs": 3, "block_size": 4}])
def test_all_tokens_of_a_prompt_see_each_other(settings):
    requests = [
        dataclasses.replace(one, bidirectional_tokens=len(one.prompt))
        for one in (ask("a", 1, tail=5), ask("b", 1, 2, n=2), ask("c", 1, tail=4))
    ]
    want = alone("llama", requests)
    runs = alone("llama", [ask("c", 1, tail=4, bidirectional=True)])
    assert want["c", 0] != runs["c", 0]
    built_engine = engine(**settings)
    same(
        answers(built_engine, [*requests, ask("text"), ask("d", 1, tail=9)], stagger=4),
        want | alone("llama", [ask("text"), ask("d", 1, tail=9)]),
    )


def test_an_item_is_encoded_once_and_its_prefix_found_again():
    built_engine = engine(block_size=4)
    encoder = MODELS["llama"][0].media_encoder
    for one in (ask("a", 1), ask("b", 1, tokens=2)):
        built_engine.add(one)
    while not built_engine.idle:
        built_engine.step()
    assert len(encoder.calls) == 1
    assert built_engine.snapshot().media.hits == 1
    cached = {}
    for one in (ask("same", 1), ask("other", 2)):
        built_engine.add(one)
        while not built_engine.idle:
            cached |= {u.request_id: u.cached_tokens for u in built_engine.step()}
    assert cached == {"same": 20, "other": 0}
    assert len(encoder.calls) == 2
    assert built_engine.release_kv_memory()
    assert built_engine.snapshot().media.cached == 0
    same(answers(built_engine, [ask("again", 1)]), alone("llama", [ask("again", 1)]))


def test_an_aborted_request_frees_its_slot_and_its_item():
    built_engine = engine(budget=6, seqs=2)
    built_engine.add(ask("gone", 1, 2))
    built_engine.step()
    built_engine.step()
    built_engine.abort("gone")
    requests = workload("llama")
    same(answers(built_engine, requests), alone("llama", requests))


def test_rows_of_another_number_end_only_their_request():
    built_engine = engine()
    wrong = ask("wrong", 1)
    (one,) = wrong.media
    short = dataclasses.replace(one.tensors[0], shape=(3,), data=b"abc")
    wrong = dataclasses.replace(wrong, media=(dataclasses.replace(one, tensors=(short,)),))
    _, updates = run(built_engine, [wrong, ask("right", 2)])
    errors = {u.request_id: u.error for u in updates if u.finish}
    assert errors["right"] is None
    assert "made [3, 32] of an item (image) that takes 11 positions" in errors["wrong"]


def test_an_engine_without_an_encoder_refuses_items():
    with pytest.raises(Exception, match="this engine reads text only; the prompt has image"):
        engine_of().add(ask("a", 1))
