"""Models with recurrent layers: the same requests give the same tokens whatever the engine does.

A state that is not set to zeros, taken from another sequence, applied twice or saved at the wrong
token changes tokens at once: each depends on all tokens before it.
"""

import random

import pytest
import torch

from tests.cpu.engine_of import engine_of, request, run

MAMBA2 = {
    "model_type": "mamba2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 8,
    "n_groups": 2,
    "conv_kernel": 4,
    "vocab_size": 97,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
}
MODELS = {"mamba2": MAMBA2, "qwen3_next": QWEN3_NEXT}


def workload(seed=0):
    """Prompts that share beginnings, of 1 to 330 tokens; greedy and sampled; n up to 4."""
    rng = random.Random(seed)
    heads = [[rng.randrange(97) for _ in range(length)] for length in (70, 130, 200)]
    found = []
    for i in range(8):
        prompt = heads[i % 3][: rng.randrange(1, 200)] + heads[(i + 1) % 3][: rng.randrange(130)]
        sampled = i % 3 == 2
        params = dict(temperature=0.9, top_p=0.95) if sampled else {}
        count = 4 if sampled else 1
        found.append(request(str(i), prompt, rng.randrange(4, 40), n=count, seed=100 * i, **params))
    return found


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """(model, the tokens wanted): each request alone, without a cache."""
    hf = MODELS[request.param]
    want = {}
    for one in workload():
        want.update(run(engine_of(hf, prefix=False, budget=4000, checkpoints=0), [one])[0])
    return hf, want


SETTINGS = {
    "together": dict(),
    "staggered": dict(stagger=3),
    "chunks of 7": dict(budget=7),
    "block of 8": dict(block_size=8, num_blocks=800),
    "no prefix cache": dict(prefix=False),
    "no checkpoints": dict(checkpoints=0),
    "two checkpoints": dict(checkpoints=2, stagger=2),
    "two slots": dict(seqs=2),
    "long prompts in parts": dict(threshold=20, budget=64),
    "overlap": dict(depth=2, stagger=1),
    "overlap, small chunks": dict(depth=2, budget=9, seqs=3),
    "little memory": dict(num_blocks=40, expect_preemption=True),
    "overlap, little memory": dict(depth=2, num_blocks=40, expect_preemption=True),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_do_not_depend_on(case, name):
    hf, want = case
    settings = dict(SETTINGS[name])
    stagger, expected = settings.pop("stagger", 0), settings.pop("expect_preemption", False)
    engine = engine_of(hf, **settings)
    got, _ = run(engine, workload(), stagger=stagger)
    assert got == want
    if expected and engine._scheduler._kvs[0].specs:
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("chunk", [1, 63, 64, 65, 997])
def test_tokens_do_not_depend_on_chunks(case, chunk):
    hf, want = case
    works = [one for one in workload() if one.n == 1][:2]
    got, _ = run(engine_of(hf, budget=chunk, seqs=4), works)
    assert got == {key: value for key, value in want.items() if key in got}


def test_a_prompt_that_shares_64_tokens_hits(case):
    hf, _ = case
    rng = random.Random(3)
    head = [rng.randrange(97) for _ in range(300)]
    for shared in (64, 100, 129, 200, 300):
        engine = engine_of(hf)
        prompts = [head, head[:shared] + [5] * 40]
        got, updates = run(engine, [request("0", prompts[0], 3)]), []
        engine = engine_of(hf)
        for i, prompt in enumerate(prompts):
            engine.add(request(str(i), prompt, 3))
            while not engine.idle:
                updates += engine.step()
        cached = max(u.cached_tokens for u in updates if u.request_id == "1")
        assert shared / 2 <= cached <= shared, (shared, cached)
        del got


def test_tokens_do_not_depend_on_aborted_requests(case):
    hf, want = case
    engine = engine_of(hf, seqs=3)
    for one in workload():
        engine.add(one)
    out, gone = {}, set()
    for step in range(5000):
        if engine.idle:
            break
        if step in (3, 6, 9):
            gone.add(str(step - 3))
            engine.abort(str(step - 3))
        for u in engine.step():
            out.setdefault((u.request_id, u.index), []).extend(u.token_ids)
    kept = {key: value for key, value in want.items() if key[0] not in gone}
    assert {key: value for key, value in out.items() if key[0] not in gone} == kept


def test_states_are_float32_and_conv_inputs_in_the_model_dtype():
    engine = engine_of(MAMBA2, dtype=torch.bfloat16)
    got, _ = run(engine, workload()[:2])
    assert all(got.values())
