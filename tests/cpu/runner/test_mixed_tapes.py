"""Steps with prompts replayed from one tape, with the bits of steps that run op by op."""

import logging

import pytest
import torch

from quire.kernels.native import library
from quire.kernels.native.op_tape import SizedTape
from quire.models.base import StepInputs
from quire.runner.cpu import tape_cache
from quire.runner.cpu.cpu_worker import CpuWorker
from quire.runner.cpu.tape_cache import StepForward, TapeCache
from tests.cpu.engine_of import TINY, WINDOWED, engine_of, request, run
from tests.cpu.lora_steps import counted
from tests.cpu.runner.test_graphs import graphs_over, step_of

pytestmark = pytest.mark.skipif(not library.available(), reason="tapes need the native kernels")


def works():
    return [request(str(i), range(3 + i, 9 + 17 * i), 4 + i, seed=i) for i in range(5)]


@pytest.fixture
def checked(monkeypatch):
    """Have each replay compared with the same step run op by op; the sizes that were compared."""
    sizes, replay = [], TapeCache.run_mixed

    def run_mixed(cache, inputs, batch, variant=tape_cache.PLAIN, carried=None, *, selects):
        found = replay(cache, inputs, batch, variant, carried, selects=selects)
        assert found is not None
        forward = cache._forward
        step = StepInputs(
            torch.from_numpy(inputs.token_ids),
            torch.from_numpy(inputs.positions),
            forward._backend.plan(batch),
            needed=torch.from_numpy(inputs.q_starts[1:] - 1) if selects else None,
        )
        hidden = found.hidden.clone()
        assert torch.equal(hidden, forward._model(step))
        sizes.append((len(inputs.token_ids), len(inputs.slots)))
        return found._replace(hidden=hidden)

    monkeypatch.setattr(TapeCache, "run_mixed", run_mixed)
    return sizes


@pytest.mark.parametrize(
    ("hf", "settings"),
    [
        (TINY, {"budget": 33, "dtype": torch.bfloat16}),
        (WINDOWED, {"budget": 29}),
        (TINY, {"budget": 41, "drafts": 3, "propose": lambda seq: tuple(seq.tokens[-3:])}),
    ],
    ids=["chunks in bfloat16", "windows", "drafts"],
)
def test_one_tape_has_the_bits_of_every_step_with_prompts(hf, settings, checked):
    want, _ = run(engine_of(hf, eager=True, **settings), works())
    assert not checked
    with counted(TapeCache, "_record_mixed") as records:
        got, _ = run(engine_of(hf, **settings), works())
    assert got == want
    assert len(records) == 1
    assert len(set(checked)) >= 2


def test_steps_that_are_mixed_run_no_python_of_the_model():
    with counted(CpuWorker, "_run_eagerly") as eager, counted(SizedTape, "replay") as replays:
        run(engine_of(), works())
    assert replays
    assert not eager


def test_large_steps_run_eagerly(monkeypatch):
    monkeypatch.setattr(tape_cache, "MAX_MIXED_TOKENS", 100)
    prompts = [request(str(i), [7 + i, *range(90)] * n, 3) for i, n in enumerate((4, 1))]
    want, _ = run(engine_of(eager=True, seqs=4), prompts)
    with (
        counted(CpuWorker, "_run_eagerly") as eager,
        counted(SizedTape, "replay") as replays,
    ):
        assert run(engine_of(seqs=4, budget=364), prompts)[0] == want
    assert [len(inputs.token_ids) for inputs, *_ in eager] == [364]
    assert [sizes for ((sizes, *_),) in replays] == [92]


@pytest.mark.parametrize("lacks", ["recurrent layers", "sources of an encoder", "of the host"])
@torch.inference_mode()
def test_what_a_tape_lacks_is_named_once(lacks, monkeypatch, caplog):
    graphs, model, backend, _ = graphs_over()
    if lacks == "recurrent layers":
        monkeypatch.setattr(tape_cache, "find_states", lambda model: object())
    if lacks == "of the host":
        backend.supports_prefill_graphs = False
    graphs._forward = StepForward(
        model, backend, max_rows=16, max_tokens=64, width=32, groups=1,
        has_cross=lacks == "sources of an encoder",
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "quire.runner.cpu.tape_cache"):
        for _ in range(2):
            assert graphs.run_mixed(*step_of(2, context=1)) is None
    (record,) = caplog.records
    assert record.message.startswith("mixed steps run eagerly: ")
    assert lacks in record.message


WITH_LOGPROBS = [*works(), request("scored", range(20, 45), 3, prompt_logprobs=2)]


def test_steps_that_leave_out_tokens_have_a_tape_of_their_own():
    want, _ = run(engine_of(eager=True, budget=400), WITH_LOGPROBS)
    with counted(TapeCache, "_record_mixed") as records:
        assert run(engine_of(budget=33), WITH_LOGPROBS)[0] == want
    assert len(records) == 2


def test_the_last_layer_leaves_out_tokens_that_are_not_sampled(monkeypatch):
    engine, rows = engine_of(eager=True, budget=33), {}
    layers = engine.executor.runner.model.layers
    for layer in (layers[0], layers[-1]):
        rows[layer] = []
        mlp = layer.mlp.forward

        def note(x, mlp=mlp, found=rows[layer]):
            found.append(len(x))
            return mlp(x)

        monkeypatch.setattr(layer.mlp, "forward", note)
    run(engine, WITH_LOGPROBS)
    counts = list(zip(rows[layers[0]], rows[layers[-1]], strict=True))
    assert all(0 < some <= whole for whole, some in counts)
    assert any(some < whole for whole, some in counts)
    assert any(whole > 6 and some == whole for whole, some in counts), "with logprobs"
