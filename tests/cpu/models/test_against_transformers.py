"""Every model of the folder gives the outputs of transformers' model of the same weights.

With experts this holds for equal choices of them: transformers' model is made to choose as ours did,
and no choice may be one that its own scores rule out by more than rounding (see routes.py).
"""

import functools
import json

import pytest
import torch

from quire.models.build import MODELS, read_model_config
from tests import tiers
from tests.cpu.encoder_decoder.seq2seq import VARIANTS as ENCODER_DECODERS
from tests.cpu.encoders.tiny_encoders import VARIANTS as ENCODERS
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import (
    GREEDY,
    LENGTHS,
    VARIANTS,
    logprobs,
    ours,
    peer,
    prompt_of,
    tiny,
)
from tests.cpu.models.routes import alike, forced, recorded
from tests.cpu.models.wrappers import WRAPPERS

TOLERANCE = 1e-4
SINGLE = tiers.amount(6, 40)
"""Tokens that a prompt ends with one at a time."""
BF16_DRIFT = 0.15  # log-probability, 99th percentile over positions and tokens
TIE = {torch.float32: 5e-6, torch.bfloat16: 0.02}
"""Scores of experts that are nearer than this may be ranked either way."""


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
    """Our log-probabilities of every position, and what was chosen on the way."""
    stepper = Stepper(model, config)
    with recorded(model) as chosen:
        said = torch.cat([stepper.logits(piece) for piece in chunks(ids, sizes)])
    return said.log_softmax(-1), chosen


def said_alike(theirs, ids, chosen, dtype=torch.float32):
    """transformers' log-probabilities with our choice of experts, which must be within a tie."""
    with forced(theirs, chosen) as margins:
        said = logprobs(theirs, ids)
    assert max(margins, default=0.0) < TIE[dtype], margins
    return said


def test_every_model_has_a_variant_here():
    halves = {text_type for text_type, _, _ in WRAPPERS.values()}  # see test_wrappers.py
    covered = {tiny(variant)[0]["model_type"] for variant in VARIANTS}
    covered |= {hf["model_type"] for hf in ENCODER_DECODERS.values()}  # see encoder_decoder
    covered |= {hf["model_type"].replace("-", "_") for hf in ENCODERS.values()}  # see encoders
    covered |= {"chatglm", "deepseek", "molmo", "phi4mm", "qwen"}  # cpu/multimodal/test_hub_*
    covered.add("blip_text_model")  # cpu/multimodal/test_unusual
    covered |= {"internlm2", "jina_bert", "whisper"}  # test_converted, test_hub_names, test_whisper
    covered |= {"clip_text_model", "siglip_text_model", "siglip2_text_model"}  # cpu/multimodal
    covered.add("prithvi")  # cpu/multimodal/test_prithvi
    assert covered | halves >= set(MODELS.names())


@pytest.mark.parametrize("variant", VARIANTS, scope="class")
class TestVariant:
    def test_logprobs_equal_those_of_transformers(self, variant, pairs):
        theirs, model, config, _ = pairs(variant)
        for ids in prompts(variant, config, "lengths", LENGTHS):
            one = max(len(ids) - SINGLE, 1)
            want, before = None, None
            ways = [[len(ids)], [7, 130, 1, 64], [one] + [1] * SINGLE]
            cuts = [tuple(map(len, chunks(ids, sizes))) for sizes in ways]
            for sizes in dict.fromkeys(cuts):  # few tokens are cut alike
                got, chosen = in_pieces(model, config, ids, sizes)
                if before is None or not alike(chosen, before):
                    want, before = said_alike(theirs, ids, chosen), chosen
                worst = (got - want).abs().max().item()
                assert worst < TOLERANCE, f"{len(ids)} tokens in pieces of {sizes[:4]}: {worst}"

    @pytest.mark.sampled(5)
    def test_greedy_tokens_equal_those_of_transformers(self, variant, pairs):
        theirs, model, config, _ = pairs(variant)
        for ids in prompts(variant, config, "greedy", GREEDY):
            with recorded(model) as chosen:
                got = Stepper(model, config).greedy(ids, 64)
            assert len(set(got)) > 1, "a constant answer proves nothing"
            whole = said_alike(theirs, [*ids, *got], chosen)
            assert got == whole[len(ids) - 1 : -1].argmax(-1).tolist()

    @pytest.mark.sampled(5)
    def test_bfloat16_drifts_little(self, variant, pairs, record_property):
        theirs, _, config, folder = pairs(variant)
        model, _ = ours(variant, folder, torch.bfloat16)
        ids = prompts(variant, config, "lengths", LENGTHS)[-1]
        with recorded(model) as chosen:
            got = Stepper(model, config, dtype=torch.bfloat16).logits(ids).log_softmax(-1)
        drift = drift_of(got, said_alike(theirs, ids, chosen, torch.bfloat16))
        record_property("bf16_drift", drift)
        print(f"bf16 drift {variant}: {drift:.3f}")
        assert drift < BF16_DRIFT

    def test_config_reads_alike_in_old_and_new_style(self, variant, pairs):
        _, _, _, folder = pairs(variant)
        saved = json.loads((folder / "config.json").read_text())
        written, _ = tiny(variant)
        written["dtype"] = "float32"
        assert read_model_config(saved) == read_model_config(written)
