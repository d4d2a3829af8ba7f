"""Whole experts on each rank give the outputs of one rank, whatever rank has which."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.distributed.mesh import Mesh
from quire.errors import WeightError
from quire.layers import Experts
from quire.models.build import build_model, read_model_config
from quire.weights.gguf.folder import folder_of
from tests import tiers
from tests.cpu.gguf_files.test_models import edit_config
from tests.cpu.gguf_files.writer import write_gguf
from tests.cpu.models.harness import Stepper, Together
from tests.cpu.models.peers import peer, prompt_of

VARIANTS = [
    "deepseek_v3", "qwen2_moe",
    *tiers.long("qwen3_moe", "mixtral", "glm4_moe_qk_norm_groups", "minimax_m2", "gpt_oss",
                "gemma4_text_experts", "deepseek_v2_lite"),
]  # fmt: skip


def run_ranks(size, main):
    """Return the results of main(rank, its collectives) in a thread for each rank."""
    together = Together(size)

    def run(rank):
        try:
            return main(rank, together.of(rank))
        except Exception:
            together.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        done = [pool.submit(run, rank) for rank in range(size)]
    for one in done:  # what others raise follows from it
        if one.exception() and not isinstance(one.exception(), threading.BrokenBarrierError):
            raise one.exception()
    return [one.result() for one in done]


@pytest.fixture
def model(request, tmp_path):
    """(model type, config, settings) of a variant with weights."""
    peer(request.param, tmp_path)
    found = read_model_config(json.loads((tmp_path / "config.json").read_text()))
    return *found, {"folder": tmp_path, "dtype": torch.float32, "progress": False}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", VARIANTS, indirect=True)
@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_ranks_with_whole_experts_give_the_outputs_of_one(model, placement):
    model_type, config, settings = model
    ids = prompt_of(40, config.vocab)
    want = Stepper(build_model(model_type, config, **settings), config).logits(ids)

    def main(rank, comm):
        mesh = Mesh(tp=2, ep=2, rank=rank)
        made = build_model(model_type, config, mesh=mesh, comm=comm, experts=placement, **settings)
        stepper = Stepper(made, config)
        return torch.cat([stepper.logits(ids[:30]), *(stepper.logits([one]) for one in ids[30:])])

    for got in run_ranks(2, main):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.long("transformers makes a model of each architecture")
@pytest.mark.parametrize("variant", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["Q4_0", "MXFP4"])
def test_experts_of_a_gguf_file_are_spread_too(variant, kind, tmp_path):
    peer(variant, tmp_path / "source")
    edit_config(tmp_path / "source")
    write_gguf(
        tmp_path / "m.gguf",
        tmp_path / "source",
        lambda name: kind if "exps" in name else "Q8_0",
        split_kv=variant == "deepseek_v3",
    )
    folder = folder_of(tmp_path / "m.gguf", tmp_path / "cache")
    model_type, config = read_model_config(json.loads((folder / "config.json").read_text()))
    build = partial(
        build_model, model_type, config, folder=folder, dtype=torch.float32, progress=False
    )
    ids = prompt_of(30, config.vocab)
    want = Stepper(build(), config).logits(ids)

    def main(rank, comm):
        mesh = Mesh(tp=2, ep=2, rank=rank)
        return Stepper(build(mesh=mesh, comm=comm, experts="linear"), config).logits(ids)

    for got in run_ranks(2, main):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", ["qwen2_moe"], indirect=True)
def test_a_rank_keeps_the_weights_of_its_experts_alone(model):
    """Ranks that share a number of experts that does not divide have one more or less."""
    model_type, config, settings = model
    whole = build_model(model_type, config, **settings)
    banks = [m for m in whole.modules() if isinstance(m, Experts)]
    count = banks[0].experts
    assert count % 4
    for rank in range(4):
        local = tuple(range(rank, count, 4))
        made = build_model(
            model_type,
            config,
            mesh=Mesh(dp=4, ep=4, rank=rank),
            comm=Together(1).of(0),
            experts="round_robin",
            **settings,
        )
        for bank, own in zip(banks, (m for m in made.modules() if isinstance(m, Experts))):
            assert own.local == local
            assert torch.equal(own.gate_up_proj, bank.gate_up_proj[list(local)])
            assert torch.equal(own.down_proj, bank.down_proj[list(local)])


@pytest.mark.parametrize("model", ["qwen2_moe"], indirect=True)
def test_a_missing_expert_is_named_by_the_rank_that_needs_it(model, tmp_path):
    model_type, config, settings = model
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(one for one in tensors if ".experts.3.up_proj" in one)
    del tensors[name]
    save_file(tensors, file)
    build = partial(build_model, model_type, config, comm=Together(1).of(0), experts="linear")
    build(mesh=Mesh(dp=2, ep=2, rank=0), **settings)
    with pytest.raises(WeightError, match=name.removeprefix("model.")):
        build(mesh=Mesh(dp=2, ep=2, rank=1), **settings)
