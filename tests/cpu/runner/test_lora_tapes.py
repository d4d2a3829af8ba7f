"""Steps with adapters are replayed from tapes, with the bits of steps that run op by op."""

import pytest

from quire import LLM
from quire.kernels.native import library
from quire.kernels.native.op_tape import OpTape, SizedTape
from quire.runner.cpu.cpu_worker import CpuWorker
from quire.runner.cpu.tape_cache import TapeCache
from tests import tiers
from tests.cpu.lora_steps import PATHS, SETTINGS, counted, run, write_adapters

pytestmark = [
    pytest.mark.skipif(not library.available(), reason="tapes need the native kernels"),
    pytest.mark.slow("two engines a case"),
]
EVERYDAY = ["one slot", "preempted"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return write_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", [*EVERYDAY, *tiers.long(*(p for p in PATHS if p not in EVERYDAY))])
def test_tapes_give_the_bits_of_eager_steps(adapters, path):
    settings = SETTINGS | PATHS[path]
    want = run(LLM("embedded", enforce_eager=True, **settings), adapters, 2)
    llm = LLM("embedded", **settings)
    with (
        counted(OpTape, "replay") as replays,
        counted(SizedTape, "replay") as mixed,
        counted(CpuWorker, "_compute") as steps,
    ):
        assert run(llm, adapters, 2) == want
    decodes = [parts for batch, parts in steps if batch.decode_only]
    assert any(decodes)
    assert len(replays) == len(decodes)
    assert len(mixed) == len(steps) - len(decodes) > 0
    if path == "preempted":
        assert llm.llm_engine.engine.stats().preemptions


def test_a_tape_reads_the_slots_of_each_step(adapters):
    """Other mixes of the same size replay the tapes of the first, which recorded other slots."""
    llm = LLM("embedded", **SETTINGS | {"max_loras": 4})
    first = run(llm, adapters)
    again = run(llm, [*adapters[1:4], adapters[0], adapters[4]])
    assert again != first
    with counted(TapeCache, "_record") as records:
        assert run(llm, adapters) == first
    assert records == []


@pytest.mark.long("processes of two ranks")
def test_two_ranks_record_tapes_too(adapters):
    alike = [*adapters[:4], adapters[1]]  # biases are of one rank
    want = run(LLM("embedded", **SETTINGS), alike)
    llm = LLM("embedded", tensor_parallel_size=2, **SETTINGS)
    try:
        found = run(llm, alike)
    finally:
        llm.llm_engine.engine.shutdown()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in want]
