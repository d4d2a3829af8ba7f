"""Every model of the folder says what transformers' model of the same weights says."""

import functools
import json

import pytest
import torch

from quire.models.build import MODELS, config_of
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import (
    GREEDY,
    LENGTHS,
    VARIANTS,
    continued,
    logprobs,
    ours,
    peer,
    prompt_of,
    tiny,
)

TOLERANCE = 1e-4
BF16_DRIFT = 0.15  # log-probability, 99th percentile over positions and tokens


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """variant -> (transformers' model, our model, our config, folder); the last one is kept."""

    @functools.lru_cache(maxsize=1)
    def pair(variant):
        folder = tmp_path_factory.mktemp(variant)
        theirs = peer(variant, folder)
        return theirs, *ours(variant, folder), folder

    return pair


def prompts(variant, config, which, default):
    return [prompt_of(n, config.vocab) for n in tiny(variant)[1].get(which, default)]


def chunks(ids, sizes):
    """Cut ids in pieces of these sizes, over and over."""
    at = turn = 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        yield ids[at : at + size]
        at, turn = at + size, turn + 1


def drift_of(got, want):
    return torch.quantile((got - want).abs().flatten()[:200_000], 0.99).item()


def in_pieces(model, config, ids, sizes):
    stepper = Stepper(model, config)
    return torch.cat([stepper.logits(piece) for piece in chunks(ids, sizes)]).log_softmax(-1)


def test_every_model_has_a_variant_here():
    assert {tiny(variant)[0]["model_type"] for variant in VARIANTS} == set(MODELS.names())


@pytest.mark.parametrize("variant", VARIANTS, scope="class")
class TestVariant:
    def test_logprobs_equal_those_of_transformers(self, variant, pairs):
        theirs, model, config, _ = pairs(variant)
        for ids in prompts(variant, config, "lengths", LENGTHS):
            want = logprobs(theirs, ids)
            one = max(len(ids) - 40, 1)  # all but 40 at once, then one at a time
            for sizes in ([len(ids)], [7, 130, 1, 64], [one] + [1] * 40):
                got = in_pieces(model, config, ids, sizes)
                worst = (got - want).abs().max().item()
                assert worst < TOLERANCE, f"{len(ids)} tokens in pieces of {sizes[:4]}: {worst}"

    def test_greedy_tokens_equal_those_of_transformers(self, variant, pairs):
        theirs, model, config, _ = pairs(variant)
        for ids in prompts(variant, config, "greedy", GREEDY):
            want = continued(theirs, ids, 64)
            assert len(set(want)) > 1, "a constant answer proves nothing"
            assert Stepper(model, config).greedy(ids, 64) == want

    def test_bfloat16_drifts_little(self, variant, pairs, record_property):
        theirs, _, config, folder = pairs(variant)
        model, _ = ours(variant, folder, torch.bfloat16)
        ids = prompts(variant, config, "lengths", LENGTHS)[-1]
        want = logprobs(theirs, ids)
        got = Stepper(model, config, dtype=torch.bfloat16).logits(ids).log_softmax(-1)
        drift = drift_of(got, want)
        record_property("bf16_drift", drift)
        print(f"bf16 drift {variant}: {drift:.3f}")
        most = BF16_DRIFT
        if hasattr(theirs.config, "num_experts_per_tok"):  # rounding decides near ties of experts
            loaded = type(theirs).from_pretrained(folder, dtype=torch.bfloat16)
            most = max(most, 1.25 * drift_of(logprobs(loaded.eval(), ids), want))
        assert drift < most

    def test_config_reads_alike_in_old_and_new_style(self, variant, pairs):
        _, _, _, folder = pairs(variant)
        saved = json.loads((folder / "config.json").read_text())
        written, _ = tiny(variant)
        written["dtype"] = "float32"
        assert config_of(saved) == config_of(written)
