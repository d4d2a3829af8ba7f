"""Models with recurrent layers: the same requests give the same tokens whatever the engine does.

A state that is not set to zeros, taken from another sequence, applied twice or saved at the wrong
token changes tokens at once: each depends on all tokens before it.
"""

import random
from dataclasses import replace

import pytest
import torch

from quire.config.facts import DeviceFacts, model_facts
from quire.config.options import (
    CacheOptions,
    ModelOptions,
    Options,
    ParallelOptions,
    SchedulerOptions,
)
from quire.config.recurrent import check_recurrent
from quire.config.resolve import resolve
from quire.errors import ConfigError
from quire.kernels.native import library
from quire.kernels.native.op_tape import OpTape
from quire.models.build import read_model_config
from quire.runner.state_tensors import StateTensors
from tests import tiers
from tests.cpu.engine_of import engine_of, request, run
from tests.cpu.models.peers import tiny

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
FURTHER = ("falcon_h1", "granitemoehybrid", "nemotron_h_experts_biases")


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


@pytest.fixture(scope="module", params=[*MODELS, *tiers.long(*FURTHER)])
def case(request):
    """(model, the tokens wanted): each request alone, without a cache."""
    hf = MODELS[request.param] if request.param in MODELS else tiny(request.param)[0]
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
    "host memory": dict(num_blocks=40, host_blocks=60, expect_preemption=True),
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
        assert bool(engine.stats().host_loaded_blocks) == ("host_blocks" in settings)


def proposing(want):
    """What proposes the answer, with errors: of one place and another between 0 and 5 tokens."""

    def propose(seq):
        at = len(seq.tokens) - seq.prompt_len
        draw = random.Random(f"{seq.request.id} {seq.index} {at}")
        answer = want[seq.request.id, seq.index][at : at + draw.randrange(6)]
        return tuple(token if draw.random() < 0.8 else 5 for token in answer)

    return propose


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_with_drafts_are_those_without(case, name):
    hf, want = case
    settings = dict(SETTINGS[name])
    expected = settings.pop("expect_preemption", False)
    settings.pop("stagger", 0)
    engine = engine_of(hf, drafts=5, propose=proposing(want), **settings)
    for _ in range(2):  # the second time with prefix hits
        for one in workload():
            engine.add(one)
        got, updates = {}, []
        while not engine.idle:
            for update in engine.step():
                updates.append(update)
                got.setdefault(update[:2], []).extend(update.token_ids)
        assert got == want
    counts = engine._scheduler.draft_counts
    assert sum(counts.accepted) > 100
    assert counts.tokens > sum(counts.accepted) + 20, "and many are rejected"
    if expected and engine._scheduler._kvs[0].specs:
        assert engine.stats().preemptions > 0
    engine.shutdown()


def test_a_checkpoint_within_accepted_drafts_is_taken(case):
    """Its state is that after the draft: a sequence that starts from it has the same tokens."""
    hf, _ = case
    prompt = [random.Random(7).randrange(97) for _ in range(100)]
    answer = run(engine_of(hf, prefix=False, checkpoints=0), [request("0", prompt, 90)])[0]
    engine = engine_of(
        hf, drafts=5, propose=lambda seq: tuple(answer["0", 0][len(seq.tokens) - 100 :][:5])
    )
    longer, updates = prompt + answer["0", 0][:88], []
    for one in (request("0", prompt, 90), request("1", longer, 2)):
        engine.add(one)
        while not engine.idle:
            updates += engine.step()
    tokens = [token for u in updates if u.request_id == "1" for token in u.token_ids]
    assert max(u.cached_tokens for u in updates if u.request_id == "1") == 128
    assert tokens == answer["0", 0][88:]


@pytest.mark.skipif(not library.available(), reason="tapes need the native kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_steps_are_replayed_from_tapes_with_the_same_tokens(case, dtype, monkeypatch):
    hf, _ = case
    replays, replay = [], OpTape.replay
    monkeypatch.setattr(OpTape, "replay", lambda tape: replays.append(tape) or replay(tape))
    works = [request(str(i), range(3 + i, 20 + 2 * i), 5 + 3 * i) for i in range(5)]
    want, _ = run(engine_of(hf, dtype=dtype, eager=True), works)
    assert not replays
    got, _ = run(engine_of(hf, dtype=dtype), works)
    assert got == want
    assert len(replays) >= 12
    assert len(set(replays)) >= 4, "the number of rows went from five to one"


@pytest.mark.skipif(not library.available(), reason="tapes need the native kernels")
def test_steps_with_drafts_replay_no_tape_of_steps_without(case, monkeypatch):
    """A tape of so many rows moves the state of each slot behind the drafts."""
    hf, _ = case
    replays, replay = [], OpTape.replay
    monkeypatch.setattr(OpTape, "replay", lambda tape: replays.append(tape) or replay(tape))
    works = [request(str(i), range(3 + i, 20 + 2 * i), 5 + 3 * i) for i in range(5)]
    want, _ = run(engine_of(hf, eager=True), works)
    wrong: list[int] = []
    engine = engine_of(hf, drafts=2, propose=lambda seq: tuple(wrong))
    assert run(engine, works)[0] == want
    before = len(replays)
    wrong += [5, 5]
    assert run(engine, works)[0] == want
    assert engine._scheduler.draft_counts.tokens > 20
    wrong.clear()
    assert run(engine, works)[0] == want
    assert len(replays) >= 2 * before, "steps without drafts have their tapes still"


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


def test_a_chat_of_ten_turns_computes_less_than_one_distance_again(case):
    hf, _ = case
    rng = random.Random(5)
    distance, reply = 128, 12
    engine = engine_of(hf, checkpoint_tokens=distance, num_blocks=400, max_len=800)
    chat = [rng.randrange(97) for _ in range(90)]
    for turn in range(10):
        before = len(chat)
        chat += [rng.randrange(97) for _ in range(rng.randrange(5, 60))]
        engine.add(request(str(turn), chat, reply))
        updates = []
        while not engine.idle:
            updates += engine.step()
        cached = max(u.cached_tokens for u in updates)
        if turn:
            assert before - cached < distance, (turn, before, cached)
            assert cached >= before - reply - 16 - 60, "the end of the last prompt was not saved"
        chat += [token for u in updates for token in u.token_ids]
    assert engine.stats().held_blocks == 0


def test_beams_start_from_checkpoints(case):
    hf, _ = case
    prompt = [random.Random(7).randrange(97) for _ in range(100)]
    want, _ = run(engine_of(hf, prefix=False, checkpoints=0), [request("w", prompt, 6)])
    engine = engine_of(hf)
    tokens, parent = list(prompt), None
    for i in range(6):
        one = replace(request(f"b{i}", tokens, 1), hold=True, parent=parent)
        engine.add(one)
        updates = []
        while not engine.idle:
            updates += engine.step()
        if parent is not None:
            engine.release(parent)
            assert max(u.cached_tokens for u in updates) >= 64
        parent = one.id
        tokens += [token for u in updates for token in u.token_ids]
    engine.release(parent)
    assert tokens[100:] == want["w", 0]


@pytest.mark.parametrize(
    ("hf", "ranks", "message"),
    [
        (MAMBA2, 3, "they have 4 heads in 2 groups; sizes that work: 1, 2, 4"),
        (MAMBA2 | {"num_heads": 6, "n_groups": 3}, 2, "6 heads in 3 groups; .* work: 1, 3, 6"),
        (QWEN3_NEXT, 4, "they have 2 key heads; sizes that work: 1, 2"),
    ],
)
def test_ranks_that_cannot_share_the_layers_are_refused_with_sizes_that_work(hf, ranks, message):
    parallel = ParallelOptions(tensor_parallel_size=ranks)
    options = Options(model=ModelOptions(model="x"), parallel=parallel)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={ranks} cannot cut .*{message}"):
        check_recurrent(options, model_facts(hf))


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_counts_the_bytes_of_states_exactly(name):
    facts = model_facts(MODELS[name] | {"max_position_embeddings": 512})
    options = Options(
        model=ModelOptions(model="x", dtype="bfloat16"),
        scheduler=SchedulerOptions(max_num_seqs=3),
        cache=CacheOptions(state_checkpoints=5),
    )
    device = DeviceFacts(kind="cpu", total_bytes=8 << 30, free_bytes=8 << 30)
    config, plan, _ = resolve(options, facts, device)
    section = config.cache
    assert (section.state_checkpoints, config.scheduler.max_num_seqs) == (5, 3)
    _, model_config = read_model_config(MODELS[name])
    assert section.states == model_config.states
    assert section.layers == model_config.attention_layers()
    assert section.draft_states == 24, "predictions make up to so many drafts of a row"
    made = StateTensors(section.states, 3, 5 + 24, torch.bfloat16, torch.device("cpu"))
    assert plan.state_bytes == made.nbytes > 0
    assert section.prefix_caching


def test_convolutions_that_gpu_kernels_do_not_take_are_refused():
    options = Options(model=ModelOptions(model="x", dtype="bfloat16"))
    device = DeviceFacts(
        kind="cuda", total_bytes=80 << 30, free_bytes=79 << 30, capability=(9, 0), count=1
    )
    facts = model_facts(MAMBA2 | {"max_position_embeddings": 512, "conv_kernel": 5})
    with pytest.raises(ConfigError, match="convolutions of 5 tokens are not supported on a GPU"):
        resolve(options, facts, device)
