"""Experts that moved between ranks, in every stored form: the bits are the same as before."""

import pytest
import torch

from quire.distributed.mesh import Mesh
from quire.errors import EngineError
from quire.layers import Experts
from quire.runner.expert_balancer import ExpertBalancer
from tests import tiers
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import prompt_of
from tests.cpu.models.test_expert_ranks import run_ranks
from tests.cpu.quant.oracle import build, tiny, tiny_tensors, write_folder
from tests.cpu.quant.stored_formats import ALL, WITH_OUTLIERS
from tests.cpu.quant.test_all_formats import pair_of

EVERYDAY = ["gptq in order of activations", "modelopt fp8"]
FORMATS = [*EVERYDAY, *tiers.long(*sorted({*ALL} - {*WITH_OUTLIERS, *EVERYDAY}))]
PROMPT = prompt_of(30, 96)


def banks_of(model):
    return [one for one in model.modules() if isinstance(one, Experts)]


def logits(model, config):
    stepper = Stepper(model, config)
    return torch.cat([stepper.logits(PROMPT[:20]), *(stepper.logits([one]) for one in PROMPT[20:])])


def check_moves(folder, redundant, **settings):
    """Logits of two ranks are the same bits after each of some moves. Returns them.

    With copies an expert has fewer rows on each rank, and torch's products in float32 may depend on
    how many there are.
    """
    loads = [(9, 9, 0, 0), (0, 7, 9, 1), (5, 0, 0, 0)]  # of the first experts

    def main(rank, comm):
        mesh = Mesh(tp=2, ep=2, rank=rank)
        model, config = build(
            folder, mesh=mesh, comm=comm, experts="linear", redundant_experts=redundant, **settings
        )
        balancer = ExpertBalancer(model)
        found, places = [logits(model, config)], [[one.placement for one in banks_of(model)]]
        for load in loads:
            for bank in banks_of(model):
                assert int(bank.load.sum()) == config.moe.top_k * len(PROMPT)
                bank.load.zero_()[:4] = torch.tensor(load)
            report = balancer.balance(1)
            assert report.after >= report.before
            places.append([bank.placement for bank in banks_of(model)])
            found.append(logits(model, config))
        return found, places

    (first, places), (second, others) = run_ranks(2, main)
    assert places == others
    assert len({str(one) for one in places}) > 1, "nothing moved"
    for one in (*first, *second):
        if redundant:
            torch.testing.assert_close(one, first[0], atol=1e-4, rtol=1e-4)
        else:
            assert torch.equal(one, first[0])
    return first[0]


@pytest.mark.slow("three steps on two ranks for each of two numbers of copies")
@pytest.mark.parametrize("name", FORMATS)
def test_bits_are_those_before_experts_moved(tmp_path, name):
    pair = pair_of(tmp_path, name, "qwen3_moe")
    for redundant in (0, 2):
        check_moves(pair.folder, redundant)


def test_plain_experts_give_the_outputs_of_one_rank(tmp_path):
    """Four of six experts, so that sums of ranks would differ with their order."""
    hf = tiny("qwen3_moe", num_experts=6, num_experts_per_tok=4)
    folder = write_folder(tmp_path / "plain", hf, tiny_tensors(hf))
    want = logits(*build(folder))
    for redundant in (0, 2):
        torch.testing.assert_close(check_moves(folder, redundant), want, atol=1e-4, rtol=1e-4)


def test_copies_of_dummy_weights_are_made_equal(tmp_path):
    hf = tiny("qwen3_moe")
    folder = write_folder(tmp_path / "plain", hf, tiny_tensors(hf))
    check_moves(folder, 2, load_format="dummy")


def test_experts_in_different_forms_are_refused(tmp_path):
    hf = tiny("qwen3_moe")
    folder = write_folder(tmp_path / "plain", hf, tiny_tensors(hf))

    def main(rank, comm):
        mesh = Mesh(tp=2, ep=2, rank=rank)
        model, _ = build(folder, mesh=mesh, comm=comm, experts="linear", redundant_experts=0)
        if rank:
            (bank,) = banks_of(model)
            bank.set_param("gate_up_proj", bank.gate_up_proj.to(torch.float64))
        with pytest.raises(
            EngineError, match=r"layers.1.mlp.experts are stored in different forms"
        ):
            ExpertBalancer(model)

    run_ranks(2, main)
