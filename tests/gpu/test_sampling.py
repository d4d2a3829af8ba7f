"""Sampling on a GPU: the host's tokens, exact distributions, equal in any batch, replayable."""

import math
import random
import warnings

import numpy as np
import pytest
import torch

from quire.core.params import SamplingParams
from quire.kernels.framework.op import OPS
from quire.sampling.logprobs import prompt_scores
from quire.sampling.sampler import Sampler
from quire.sampling.slot_join import SlotJoin
from tests.cpu.sampling.cases import exact, normal, sequence
from tests.cpu.sampling.test_independence import company
from tests.op_cases import agree

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")
VOCAB = 151_936


@pytest.fixture
def never_waits():
    with warnings.catch_warnings():  # torch warns once that the mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def filled(vocab, seqs, device=CUDA, **options):
    sampler = Sampler(vocab, max(1, len(seqs)), device, **options)
    for slot, seq in enumerate(seqs):
        sampler.join(SlotJoin.from_sequence(seq, slot))
    return sampler


def choose(sampler, logits, slots, outputs, kind="random"):
    sampler.kind(slots)
    rows = torch.tensor(slots, dtype=torch.int32, device=CUDA)
    return sampler.choose(logits, rows, torch.tensor(outputs, dtype=torch.int32, device=CUDA), kind)


def normals(rows, vocab, seed, scale, dtype=torch.float32):
    g = torch.Generator(CUDA).manual_seed(seed)
    return (torch.randn(rows, vocab, generator=g, device=CUDA) * scale).to(dtype)


@pytest.mark.parametrize(
    "name", ["argmax", "sample", "logprob_ranks", "apply_penalties", "update_token_counts"]
)
def test_each_op_agrees_with_its_reference(name):
    for case in OPS[name].cases(CUDA):
        assert agree(name, case)


def deviates(got, want):
    """How many sigmas chi-square is above its mean, nearly (Wilson and Hilferty)."""
    free = max(1, len(want) - 1)
    per = float(((got - want) ** 2 / want).sum()) / free
    return (per ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


CUTS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top_k": {"top_k": 50},
    "top_k top_p": {"top_k": 50, "top_p": 0.9, "temperature": 0.7},
    "top_p": {"top_p": 0.9},
    "small top_p": {"top_p": 0.02},
    "large top_p": {"top_p": 0.999},
    "min_p": {"min_p": 0.05},
    "long min_p": {"min_p": 1e-4, "top_p": 0.7},
    "large top_k": {"top_k": 3000, "top_p": 0.95},
    "very large top_k": {"top_k": 50_000, "top_p": 0.95, "min_p": 1e-5},
}


@pytest.mark.parametrize(
    ("scale", "dtype"), [(0.5, torch.float32), (0.5, torch.bfloat16), (3.0, torch.float16)]
)
@pytest.mark.parametrize("kind", CUTS)
def test_rows_get_the_tokens_of_the_host(kind, scale, dtype):
    """But for rounding: e**x differs in its last digit, so a share may fall on the neighbour."""
    params, rows = SamplingParams(**CUTS[kind]), 12
    seqs = [sequence(params, seed=i) for i in range(rows)]
    logits = normals(rows, VOCAB, 3, scale, dtype)
    if dtype == torch.float32 and scale == 0.5:
        logits[: rows // 2] = (logits[: rows // 2] * 16).round() / 16  # many ties
    ids, _ = choose(filled(VOCAB, seqs), logits, range(rows), [5] * rows)
    host = filled(VOCAB, seqs, "cpu").sample(logits.float().cpu(), range(rows), [5] * rows)
    different = (ids.cpu() != host.token_ids).sum()
    assert different <= (0 if kind in ("greedy", "top_k") else 1)


@pytest.mark.parametrize("kind", [k for k in CUTS if k != "greedy"])
def test_draws_follow_the_exact_distribution(kind):
    vocab, rows, steps = 9001, 512, 60
    params = SamplingParams(**CUTS[kind])
    logits = normal(1, vocab, seed=4, scale=2.0)[0]
    sampler = filled(vocab, [sequence(params, seed=1000 + i) for i in range(rows)])
    batch = logits.to(CUDA).expand(rows, -1).contiguous()
    total = torch.zeros(vocab, dtype=torch.int64, device=CUDA)
    for step in range(steps):
        ids, _ = choose(sampler, batch, range(rows), [step] * rows)
        total += torch.bincount(ids, minlength=vocab)
    got, p = total.cpu().numpy(), exact(logits, params).numpy()
    assert got[p == 0].sum() == 0
    want = p * got.sum()
    rare = want < 8
    got, want = np.append(got[~rare], got[rare].sum()), np.append(want[~rare], want[rare].sum())
    if want[-1] == 0:
        got, want = got[:-1], want[:-1]
    assert deviates(got, want * got.sum() / want.sum()) < 4.0


def mixed(rows, rng):
    kinds = [SamplingParams(**rng.choice(list(CUTS.values()))) for _ in range(rows)]
    return [sequence(p, seed=rng.randrange(10**6)) for p in kinds]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_in_a_batch_in_any_dtype_and_on_any_path(dtype):
    rng = random.Random(2)
    seqs = mixed(96, rng)
    sampler = filled(VOCAB, seqs)
    logits = normals(96, VOCAB, 1, 2.0, torch.bfloat16).to(dtype)
    ids, tops = choose(sampler, logits, range(96), [7] * 96)
    order = rng.sample(range(96), 96)
    again, _ = choose(sampler, logits[order], order, [7] * 96)
    assert torch.equal(again, ids[order])
    path = sampler.sample(logits.clone(), order, [7] * 96)
    assert torch.equal(sampler.sample(logits[order], order, [7] * 96).token_ids, ids[order])
    assert len(path.token_ids) == 96
    wide = choose(sampler, logits.float(), range(96), [7] * 96)
    assert torch.equal(wide[0], ids)
    for row in range(0, 96, 7):
        alone = choose(sampler, logits[row : row + 1], [row], [7])
        assert alone[0].item() == ids[row].item()
        assert alone[1].item() == tops[row].item()


@pytest.mark.parametrize("kind", ["greedy", "random"])
def test_a_captured_sampling_replays_for_any_slots(kind, never_waits):
    rng = random.Random(5)
    params = [SamplingParams(temperature=0.0)] if kind == "greedy" else None
    seqs = [sequence(params[0]) for _ in range(8)] if params else mixed(8, rng)
    sampler = filled(VOCAB, seqs)
    logits = normals(10, VOCAB, 1, 2.0, torch.bfloat16)
    slots = torch.arange(10, dtype=torch.int32, device=CUDA)
    slots[8:].fill_(-1)
    outputs = torch.zeros(10, dtype=torch.int32, device=CUDA)
    sampler.kind(range(8))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sampler.choose(logits, slots, outputs, kind)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_sync_debug_mode("default")  # capturing itself may wait
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            ids, _ = sampler.choose(logits, slots, outputs, kind)
    torch.cuda.current_stream().wait_stream(stream)
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error")
        if step == 2 and kind == "random":
            for slot, seq in enumerate(mixed(8, rng)):
                sampler.leave(slot)
                sampler.join(SlotJoin.from_sequence(seq, slot))
        logits.copy_(normals(10, VOCAB, 10 + step, 2.0, torch.bfloat16))
        outputs.fill_(step)
        sampler.kind(range(8))
        graph.replay()
        want = sampler.sample(logits[:8].clone(), range(8), [step] * 8)
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(ids[:8], want.token_ids)
        assert ((ids >= 0) & (ids < VOCAB)).all()


MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


@pytest.mark.parametrize("vocab", [333, 20_011])
@pytest.mark.parametrize("mode", MODES)
def test_the_general_path_gives_what_the_host_gives_and_never_waits(vocab, mode, never_waits):
    seqs = company(random.Random(vocab), 48)
    device = filled(vocab, seqs, logprobs_mode=mode)
    fetched = []
    for step in range(4):
        logits = normal(48, vocab, seed=step).pin_memory().to(CUDA, non_blocking=True)
        fetched.append(device.sample(logits, range(48), [step] * 48).copy_to_host())
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    host = filled(vocab, seqs, "cpu", logprobs_mode=mode)
    different = 0
    for step, found in enumerate(fetched):
        want = host.sample(normal(48, vocab, seed=step), range(48), [step] * 48)
        ids = want.token_ids.tolist()
        different += sum(a != b for a, b in zip(found.token_ids(), ids))
        assert found.all_errors == {}
        for row, one in want.logprobs().items():
            mine = found.logprobs()[row]
            if mine.ids[0] == one.ids[0]:
                assert mine.ids == one.ids
                assert mine.ranks == one.ranks
                assert mine.values == pytest.approx(one.values, abs=2e-5)
    assert different <= 1


@pytest.mark.parametrize("spoil", ["nan", "inf", "-inf"])
def test_spoilt_rows_are_reported_and_leave_the_others_alone(spoil):
    kinds = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.2}]
    for kw in kinds:
        seqs = [sequence(SamplingParams(**kw), seed=i) for i in range(5)]
        sampler = filled(8000, seqs)
        good = normals(5, 8000, 0, 3.0, torch.bfloat16)
        bad = good.clone()
        bad[2, slice(None) if spoil == "-inf" else 500] = float(spoil)
        clean = sampler.sample(good, range(5), [0] * 5)
        found = sampler.sample(bad, range(5), [0] * 5)
        assert list(found.all_errors) == [2]
        assert clean.all_errors == {}
        assert 0 <= int(found.token_ids[2]) < 8000
        others = [0, 1, 3, 4]
        assert found.token_ids[others].tolist() == clean.token_ids[others].tolist()


def test_listed_ids_whole_vocabularies_and_prompts_are_scored_without_waiting(never_waits):
    vocab = 5003
    params = [{"logprob_token_ids": [9, 120, 3]}, {"logprobs": -1}, {"logprobs": 40}]
    seqs = [sequence(SamplingParams(temperature=0.0, **p)) for p in params]
    sampler = filled(vocab, seqs)
    x = normal(3, vocab).bfloat16()
    sent = x.pin_memory().to(CUDA, non_blocking=True)
    found = sampler.sample(sent, range(3), [0] * 3).copy_to_host()
    targets = torch.arange(3, device=CUDA)
    prompt = [prompt_scores(sent, targets, k).copy_to_host() for k in (0, 3, -1)]
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    want = filled(vocab, seqs, "cpu").sample(x, range(3), [0] * 3)
    pairs = [(found.logprobs()[row], want.logprobs()[row]) for row in range(3)]
    for scores, k in zip(prompt, (0, 3, -1)):
        pairs += zip(
            scores.to_lists([k] * 3), prompt_scores(x, torch.arange(3), k).to_lists([k] * 3)
        )
    for mine, one in pairs:
        assert mine.ids == one.ids
        assert mine.ranks == one.ranks
        assert mine.values == pytest.approx(one.values, abs=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalised_rows_choose_alike_in_a_graph_on_the_general_path_and_on_the_host(
    dtype, never_waits
):
    vocab, rng = 20_011, random.Random(4)
    seqs = []
    for i in range(24):
        kw = dict(rng.choice(list(CUTS.values())))
        if i % 4:
            kw |= {"repetition_penalty": rng.uniform(0.7, 1.5), "presence_penalty": 0.5}
            kw |= {"frequency_penalty": rng.uniform(-0.5, 1.0)}
        prompt = [rng.randrange(vocab) for _ in range(200)]
        seqs.append(sequence(SamplingParams(**kw), seed=i, prompt=prompt, outputs=[5, 5, 9]))
    one, two = filled(vocab, seqs), filled(vocab, seqs)
    torch.cuda.set_sync_debug_mode("default")
    host = filled(vocab, seqs, "cpu")
    logits = torch.zeros(26, vocab, dtype=dtype, device=CUDA)
    slots = torch.tensor([*range(24), -1, -1], dtype=torch.int32, device=CUDA)
    outputs = torch.zeros(26, dtype=torch.int32, device=CUDA)
    graph, different = None, 0
    for step in range(6):
        logits.copy_(normals(26, vocab, step, 1.5, dtype))
        outputs.fill_(3 + step)
        assert one.kind(range(24)) == "penalised"
        if graph is None:
            ids, _ = one.choose(logits, slots, outputs, "penalised")
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                static, _ = one.choose(logits, slots, outputs, "penalised")
        else:
            graph.replay()
            ids = static
        general = two.sample(logits[:24].clone(), range(24), [3 + step] * 24).token_ids
        want = host.sample(logits[:24].float().cpu(), range(24), [3 + step] * 24).token_ids
        assert torch.equal(ids[:24], general)
        different += (general.cpu() != want).sum().item()
    assert different <= 1
