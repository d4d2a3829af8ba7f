"""Which engines of a model are where, by the options of a node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.data_parallel import EngineLayout, check_one_server, engine_layout
from quire.config.facts import DeviceFacts, model_facts
from quire.config.options import Options
from quire.config.resolve import resolve
from quire.errors import ConfigError
from tests.pure.config.test_resolve import GIB, TINY


def layout(**flat):
    names = {"dp": "size", "dpl": "size_local", "dpr": "start_rank", "dpn": "rank"}
    names |= {"dpa": "address", "dpp": "rpc_port", "dph": "hybrid_lb", "dpe": "external_lb"}
    full = {f"data_parallel_{names[k]}" if k in names else k: v for k, v in flat.items()}
    return engine_layout(Options.from_flat(full))


@pytest.mark.parametrize(
    ("flat", "local", "served"),
    [
        ({}, range(1), range(1)),
        ({"dp": 4}, range(4), range(4)),
        ({"dp": 4, "dpl": 4}, range(4), range(4)),
        ({"dp": 4, "dpl": 1}, range(1), range(4)),
        ({"dp": 4, "headless": True, "dpr": 1, "dpa": "h"}, range(1, 4), range(0)),
        ({"dp": 4, "headless": True, "dpr": 2, "dpl": 1, "dpa": "h"}, range(2, 3), range(0)),
        ({"dp": 4, "dpn": 0}, range(1), range(1)),
        ({"dp": 4, "dpn": 3}, range(3, 4), range(3, 4)),
        ({"dp": 4, "dpe": True, "dpr": 3, "dpl": 1}, range(3, 4), range(3, 4)),
        ({"dp": 4, "dph": True, "dpl": 2}, range(2), range(2)),
        ({"dp": 4, "dpr": 2, "dpl": 2}, range(2, 4), range(2, 4)),
    ],
)
def test_layouts(flat, local, served):
    found = layout(**flat)
    assert (found.local, found.served) == (local, served)
    assert (found.address is None) == (set(found.remote) == set() and "headless" not in flat)


def test_the_address_of_the_head():
    assert layout(dp=2, dpl=1) == EngineLayout(range(1), range(2), "127.0.0.1", 29550)
    found = layout(dp=2, dpl=1, dpa="10.0.0.1", dpp=77)
    assert (found.address, found.port, found.remote) == ("10.0.0.1", 77, range(1, 2))


@pytest.mark.parametrize(
    ("flat", "said"),
    [
        ({"dp": 2, "dpl": 3}, "size_local=3 engines from rank 0 on are more than .*size=2"),
        ({"dp": 4, "headless": True, "dpr": 3, "dpl": 2, "dpa": "h"}, "from rank 3 on are more"),
        ({"dp": 4, "headless": True, "dpr": 4, "dpa": "h"}, "more than data_parallel_size=4"),
        ({"dp": 4, "headless": True, "dpr": 1}, "headless needs data_parallel_address"),
        ({"dp": 4, "headless": True, "dpa": "h"}, "needs .* data_parallel_start_rank"),
        ({"dp": 4, "headless": True, "dpr": 1, "dpa": "h", "dph": True}, "cannot be combined"),
        ({"dp": 2, "dpe": True}, "needs data_parallel_rank"),
        ({"dp": 2, "dpn": 2}, "more than data_parallel_size=2"),
        ({"dp": 2, "dpn": 0, "dpl": 2}, "use data_parallel_hybrid_lb"),
        ({"dp": 2, "dpn": 0, "headless": True}, "leave out headless"),
        ({"dp": 2, "dph": True}, "needs data_parallel_size_local"),
        ({"dp": 2, "dpl": 1, "enable_expert_parallel": True}, "an engine with enable_expert_par"),
        ({"dp": 2, "data_parallel_backend": "ray"}, "--headless. on each node"),
    ],
)
def test_what_cannot_be_is_refused(flat, said):
    with pytest.raises(ConfigError, match=said):
        layout(**flat)


@given(st.integers(1, 8), st.data())
def test_nodes_have_each_engine_once(count, data):
    """A head, and headless nodes from the rank on where the node before ends."""
    local = data.draw(st.integers(1, count))
    found = [layout(dp=count, dpl=local)]
    while (first := found[-1].local.stop) < count:
        more = data.draw(st.integers(1, count - first))
        found.append(layout(dp=count, headless=True, dpr=first, dpl=more, dpa="h"))
    assert [rank for one in found for rank in one.local] == list(range(count))
    assert list(found[0].remote) == [rank for one in found[1:] for rank in one.local]


def test_engines_have_no_options_of_nodes():
    options = Options.from_flat(
        {"data_parallel_size": 4, "data_parallel_size_local": 2, "max_num_seqs": 3}
    )
    local = engine_layout(options).local_options(options)
    assert local.non_default() == {"data_parallel_size": 2, "max_num_seqs": 3}
    check_one_server(local, "LLM")
    shared = Options.from_flat({"data_parallel_size": 4, "enable_expert_parallel": True})
    assert engine_layout(shared).local_options(shared) == shared
    with pytest.raises(
        ConfigError, match=r"data_parallel_size_local=2 is for `quire serve` .*; LLM has"
    ):
        check_one_server(options, "LLM")


MOE = TINY | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip


def resolved(count, **options):
    device = DeviceFacts(kind="cuda", total_bytes=8 * GIB, free_bytes=8 * GIB, count=count)
    given = {"data_parallel_size": 2, "enable_expert_parallel": True} | options
    return resolve(Options.from_flat(given), model_facts(MOE), device, server=False).config


def test_ranks_of_gpus_share_experts():
    config = resolved(4, tensor_parallel_size=2)
    assert (config.parallel.data, config.parallel.ranks) == (2, 4)
    assert config.scheduler.steps_in_flight == 2


def test_fewer_gpus_than_ranks_are_refused():
    with pytest.raises(ConfigError, match="needs 4 devices, 2 each; this engine can use 3"):
        resolved(3, tensor_parallel_size=2)
