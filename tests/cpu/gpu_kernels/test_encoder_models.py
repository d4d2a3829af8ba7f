"""Encoders on the kernels of a GPU, in the interpreter, have the states that they have on a CPU."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from quire.config.model_identity import resolve_identity
from quire.kernels.framework import lazy_fusion, op
from quire.kernels.native import library
from quire.models.build import build_model, read_model_config
from tests import tiers
from tests.cpu.encoders.tiny_encoders import LABELS, VARIANTS, hidden_of, texts_of
from tests.cpu.gpu_kernels.test_pending_reads import ReadGuard

pytestmark = pytest.mark.sampled(2)

EVERYDAY = [("bert", "classify"), ("mpnet", "lm"), ("electra", "classify")]
ALL = [(variant, head) for head in ("classify", "lm") for variant in sorted(VARIANTS)]
HEADS = ("none", "lm", "classify", "token_classify")
LENGTHS = (1, 19, 5)


def built(variant, head, dtype=torch.float32):
    hf = resolve_identity(VARIANTS[variant])
    labels = LABELS if "classify" in head else 0
    model_type, config = read_model_config(hf, head=head, labels=labels)
    return build_model(model_type, config, load_format="dummy", dtype=dtype), config


def results_of(model, config, head):
    texts = texts_of(LENGTHS, config.vocab)
    types = [[at % 2 for at in range(len(text))] for text in texts]
    states = torch.cat(hidden_of(model, texts, types))
    if head == "none":
        return states
    found = model.logits(states) if head == "lm" else model.classify(states.float())
    lazy_fusion.flush()
    return found


@pytest.fixture
def plain_weights(monkeypatch):
    """Weights are not packed for the CPU's kernels."""
    monkeypatch.setattr(library, "load_library", lambda: None)


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.usefixtures("plain_weights")
@pytest.mark.parametrize(
    ("variant", "head"), [*EVERYDAY, *tiers.long(*(one for one in ALL if one not in EVERYDAY))]
)
def test_states_and_heads_are_those_of_the_cpu(variant, head, monkeypatch):
    model, config = built(variant, head)
    with torch.inference_mode():
        want = results_of(model, config, head)
        monkeypatch.setattr(op, "_device_type", lambda first: "cuda")
        got = results_of(model, config, head)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("plain_weights")
@pytest.mark.parametrize("head", HEADS)
def test_pending_results_are_read_by_ops_alone(head, monkeypatch):
    from quire.kernels.gpu.runtime.fast_launch import TritonKernel

    some = slice(HEADS.index(head), None, len(HEADS))  # each model with one head, or with all
    for variant in tiers.amount(list(VARIANTS)[some], VARIANTS):
        model, config = built(variant, head, torch.bfloat16)
        with monkeypatch.context() as patch, torch.inference_mode(), ReadGuard():
            patch.setattr(op, "_device_type", lambda first: "cuda")
            patch.setattr(TritonKernel, "__call__", lambda *args, **how: None)
            results_of(model, config, head)
