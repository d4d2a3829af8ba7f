"""Heads on the paths of an engine: their drafts stay those of the reference, or of a plain engine."""

from dataclasses import replace

import pytest
import torch

from quire.config.engine_config import SpeculationSection
from quire.engine.startup.drafter_setup import describe_drafter
from tests.cpu.drafters.heads import (
    TARGET,
    check_drafts,
    drawn,
    engine_with,
    plain_engine,
    recorded_drafts,
    run_drafting,
    target_tensors,
    write,
)
from tests.cpu.drafters.test_eagle3 import PLAIN, head_tensors, reference_of
from tests.cpu.engine_of import request, run
from tests.cpu.multimodal.qwen_models import TEXT
from tests.cpu.multimodal.test_qwen_engine import Family
from tests.cpu.quant.oracle import tiny, write_pair
from tests.cpu.quant.stored_formats import FORMATS, ROUNDED_ROWS

HEAD = head_tensors("midlayer.")
SHARED = [*range(20, 60)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("paths")
    return write(made / "target", TARGET, target_tensors()), write(made / "head", PLAIN, HEAD)


def reference(**knobs):
    return reference_of(HEAD, target_tensors(), "midlayer.", **knobs)


def prompts():
    """Some are alike to their end, some are cut where a block of 8 is not full."""
    return [
        request("a", SHARED, 30),
        request("b", [5, 6, 7, 8] * 7, 40),
        request("c", SHARED[:37], 30),
        request("d", SHARED, 20, temperature=0.9, seed=4, n=2),
        request("e", [9], 40),
        request("f", [5, 6, 7, 8] * 7, 30, repetition_penalty=1.2),
    ]


PATHS = {
    "preempted and recomputed": {"num_blocks": 22, "block_size": 8, "depth": 2, "prefix": False},
    "prefix hits": {"block_size": 8},
    "preempted, hits on the host": {"num_blocks": 22, "block_size": 8, "host_blocks": 60},
    "chunks": {"budget": 11, "block_size": 8, "depth": 2},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", PATHS)
def test_drafts_of_a_path_are_those_of_the_reference(folders, path):
    want, _ = run(plain_engine(folders[0]), prompts())
    engine = engine_with(folders[0], "eagle3", folders[1], **PATHS[path])
    counters = engine._scheduler._counters
    stagger = 4 if "hits" in path else 0
    got, whole = check_drafts(engine, prompts(), reference(), stagger=stagger)
    assert got == want
    assert whole > 0.5
    if path.startswith("preempted"):
        assert counters.preemptions > 1
    if "hits" in path:
        assert engine.stats().prefix_hit_tokens > 30
    if "host" in path:
        assert engine.stats().host_loaded_blocks > 0, engine.stats()


def test_behind_a_hit_one_key_may_be_that_of_another_text(folders):
    """A key is made of the next token too: the last one of a hit is that of the text before."""
    first, second = request("a", SHARED, 8), request("b", [*SHARED[:24], 3, 4, 5, 3, 4], 30)
    engine = engine_with(folders[0], "eagle3", folders[1], block_size=8)
    known = lambda tokens: {23: SHARED[24]} if tokens[24] == 3 else {}  # noqa: E731
    got, _ = check_drafts(engine, [first, second], reference(follow=known), stagger=8)
    assert engine.stats().prefix_hit_tokens == 24
    assert got == run(plain_engine(folders[0]), [first, second])[0]


def test_requests_without_drafts_leave_keys_for_others(folders):
    quiet = replace(request("a", SHARED, 8), speculates=False)
    engine = engine_with(folders[0], "eagle3", folders[1], block_size=8)
    check_drafts(engine, [quiet, request("b", SHARED, 20)], reference(), stagger=10)
    assert engine.stats().prefix_hit_tokens > 30


def head_of(hf):
    """An EAGLE head for a model of these sizes."""
    draw, e, f = drawn(6), hf["hidden_size"], hf["intermediate_size"]
    heads, kv, size = hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"]
    shapes = {
        "fc": (e, 2 * e),
        "layers.0.self_attn.q_proj": (heads * size, e),
        "layers.0.self_attn.k_proj": (kv * size, e),
        "layers.0.self_attn.v_proj": (kv * size, e),
        "layers.0.self_attn.o_proj": (e, heads * size),
        "layers.0.mlp.gate_proj": (f, e),
        "layers.0.mlp.up_proj": (f, e),
        "layers.0.mlp.down_proj": (e, f),
    }
    found = {f"{name}.weight": draw(*shape) for name, shape in shapes.items()}
    found["layers.0.post_attention_layernorm.weight"] = draw(e, around=1.0)
    keep = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    own = {key: hf[key] for key in (*keep, "head_dim", "vocab_size")}
    return {**own, "architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}, found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["awq", "gptq", "hqq", "fp8"])
def test_plain_heads_draft_for_quantized_models(tmp_path, name):
    quantize, config = (FORMATS | ROUNDED_ROWS)[name]()
    hf = tiny("llama")
    pair = write_pair(tmp_path, hf, quantize, config)
    head = write(tmp_path / "head", *head_of(hf))
    work = [request("a", range(5, 45), 12), request("b", [7, 8] * 9, 12)]
    other = pair.folder if name in ROUNDED_ROWS else pair.dense  # whose rows are not rounded
    paths = ((pair.folder, {}), (other, {"budget": 9}))
    coded, dense = (
        recorded_drafts(engine_with(folder, "eagle", head, max_len=120, **knobs), work)
        for folder, knobs in paths
    )
    assert len(dense) > 10
    assert coded == dense


def test_heads_read_the_rows_of_media(tmp_path):
    """The embedding behind a state is that which the model reads one token later."""
    family = Family("qwen2_5_vl", tmp_path / "target")
    head = write(tmp_path / "head", *head_of(TEXT))
    model, config = family.built
    found = describe_drafter("eagle", head, family.hf["model_type"], config, family.hf)
    section = SpeculationSection(method="eagle", max_drafts=3, adaptive=False)
    want = run(family.engine(), [family.request("bc"), family.request("a")])[0]
    engine = family.engine(speculation=section, drafter=found, prefix=False)
    drafter = engine._executor.runner.worker._drafter
    read, embed = [], drafter._embed_media

    def seen(step):
        read.append((step.positions.clone(), embed(step).inputs_embeds.clone()))
        return embed(step)

    drafter._embed_media = seen
    for mix in ("bc", "a"):
        ids, _, _ = family.asked(mix)
        got = run_drafting(engine, [family.request(mix)], lambda seq: None, close=False)
        assert got[mix, 0] == want[mix, 0]
        positions, embeds = read[0]
        assert positions.tolist() == [*range(len(ids))]
        rows = torch.cat(model.media_encoder.encode(family.inputs(mix)))
        vectors = model.embed_tokens(torch.tensor(ids, dtype=torch.int32)).clone()
        is_media = torch.tensor([one in (192, 193) for one in ids])
        vectors[is_media] = rows
        assert torch.allclose(embeds[:-1], vectors[1:], atol=1e-5)
        read.clear()
    engine.shutdown()
