"""Synthetic acceptance, for benchmarks: drafts count as accepted as often as the options say."""

import pytest

from quire import LLM, SamplingParams
from tests.cpu.drafters.heads import TARGET, E, V, drawn, target_tensors, write
from tests.cpu.drafters.test_draft_model import SMALL
from tests.cpu.drafters.test_eagle3 import PLAIN, head_tensors

SETTINGS = {"dtype": "float32", "skip_tokenizer_init": True, "device": "cpu", "max_model_len": 256}
DRAFTS = 4


def medusa_tensors():
    draw, found = drawn(7), {}
    for i in range(DRAFTS):
        found[f"{i}.0.linear.weight"], found[f"{i}.0.linear.bias"] = draw(E, E), draw(E)
        found[f"{i}.1.weight"] = draw(V, E)
    return found


FOLDERS = {
    "draft_model": (SMALL, lambda: target_tensors(SMALL, seed=2)),
    "eagle3": (PLAIN, lambda: head_tensors("midlayer.")),
    "medusa": ({"medusa_num_heads": DRAFTS, "medusa_num_layers": 1}, medusa_tensors),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write(tmp_path_factory.mktemp("target"), TARGET, target_tensors())


def histogram(target, folder, prompts, params, drafts=DRAFTS, **options):
    """How many rows accepted 0, 1, 2, ... drafts, and the lengths of the texts."""
    keys = {k: options.pop(k) for k in list(options) if k.startswith("synthetic_")}
    given = {
        "model": str(folder),
        "num_speculative_tokens": drafts,
        "rejection_sample_method": "synthetic",
        "adaptive": False,
        **keys,
    }
    llm = LLM(str(target), **SETTINGS, **options, speculative_config=given)
    outs = [one for out in llm.generate(prompts, params, use_tqdm=False) for one in out.outputs]
    found = [one.spec_decode_metrics.acceptance_histogram for one in outs]
    return [sum(one) for one in zip(*found)], [len(one.token_ids) for one in outs]


PROMPTS = [{"prompt_token_ids": [*range(3, 9 + 3 * i)]} for i in range(8)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("rates", "length"), [((0.9, 0.5, 0.5, 0.1), None), (None, 3.0), (None, 1.0), (None, 5.0)]
)
@pytest.mark.parametrize("method", FOLDERS)
def test_acceptance_is_what_was_asked_for(target, tmp_path, method, rates, length, eager):
    hf, tensors = FOLDERS[method]
    folder = write(tmp_path / method, hf, tensors())
    keys = {"synthetic_acceptance_length": length, "synthetic_acceptance_rates": rates}
    keys = {name: value for name, value in keys.items() if value is not None}
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=150, ignore_eos=True, logprobs=1)
    counts, lengths = histogram(target, folder, PROMPTS, params, **keys, enforce_eager=eager)
    assert lengths == [150] * len(PROMPTS)
    rows, mean = sum(counts), sum(i * n for i, n in enumerate(counts)) / sum(counts)
    if length is not None:
        assert 1 + mean == pytest.approx(length, abs=0.15 if 1 < length < 5 else 0.06)
    else:
        reached = [sum(counts[i:]) / rows for i in range(1, DRAFTS + 1)]
        assert reached == pytest.approx(rates, abs=0.08)


def test_rows_with_state_and_chunks_have_it_too(target, tmp_path):
    """Penalties are sampled draft by draft; prompts come in pieces and from the prefix cache."""
    folder = write(tmp_path / "head", PLAIN, head_tensors("midlayer."))
    whole = {"max_tokens": 60, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, repetition_penalty=1.2, **whole),
        SamplingParams(temperature=1, seed=3, n=2, frequency_penalty=0.5, logprobs=2, **whole),
        SamplingParams(temperature=0, **whole),
    ]
    prompts = [{"prompt_token_ids": [*range(5, 60)]}] * 3
    counts, lengths = histogram(
        target, folder, prompts, params, synthetic_acceptance_length=5.0, max_num_batched_tokens=24
    )
    assert lengths == [60] * 4
    assert counts[DRAFTS] >= 40, counts
    assert sum(counts[:DRAFTS]) <= 8, counts


@pytest.mark.usefixtures("forked")
@pytest.mark.slow("an engine of two processes")
def test_ranks_accept_the_same_drafts(target, tmp_path):
    folder = write(tmp_path / "head", PLAIN, head_tensors("midlayer."))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    found = [
        histogram(target, folder, PROMPTS, params, synthetic_acceptance_length=3.0, **ranks)
        for ranks in ({}, {"tensor_parallel_size": 2})
    ]
    assert found[0] == found[1]
    assert sum(found[0][0][1:]) > 50
