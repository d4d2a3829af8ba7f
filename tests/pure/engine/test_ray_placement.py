"""Placement of ranks on a Ray cluster, with plain values in place of Ray."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.cluster.ray_placement import (
    BundleHolder,
    RayNode,
    choose_bundles,
    describe_shortage,
    new_bundles,
    plan_nodes,
    share_ranks,
)
from quire.errors import ConfigError

GPU = {"GPU": 1.0}


def holder(bundle, node, *devices):
    return BundleHolder(bundle, node, f"10.0.0.{node[1:]}", f"host-{node}", devices)


def test_the_first_bundles_are_bound_to_nodes():
    bundles, selectors = new_bundles(3, "GPU", 1.0, ["abc"])
    assert bundles == [GPU] * 3
    assert selectors == [{"ray.io/node-id": "abc"}, {}, {}]


def test_an_existing_group_is_used_in_order_without_its_other_bundles():
    group = [{"CPU": 1.0}, GPU, GPU, {"CPU": 1.0, **GPU}]
    assert choose_bundles(group, 2, "GPU", None) == [1, 2]
    assert choose_bundles(group, 3, "GPU", "3,1,2") == [3, 1, 2]


@pytest.mark.parametrize(
    ("bundles", "ranks", "indices", "message"),
    [
        ([GPU], 2, None, r"has 1 bundles with a GPU: 1 are missing"),
        ([{"CPU": 4}], 2, None, r"has 0 bundles with a GPU: 2 are missing"),
        ([{"GPU": 2.0}], 1, None, r"bundle 0 of the placement group has 2 GPUs"),
        ([GPU, GPU], 2, "0,x", "numbers with commas"),
        ([GPU, GPU], 2, "1", "must be 2 different numbers"),
        ([GPU, GPU], 2, "1,1", "must be 2 different numbers"),
        ([GPU, GPU], 2, "1,2", r"no bundle 2 with a GPU; it has \[0, 1\]"),
    ],
)
def test_a_group_that_does_not_fit_is_refused(bundles, ranks, indices, message):
    with pytest.raises(ConfigError, match=message):
        choose_bundles(bundles, ranks, "GPU", indices)


def test_ranks_of_a_node_are_consecutive_and_the_engines_node_is_first():
    holders = [
        holder(0, "n1", "10"),
        holder(1, "n2", "1"),
        holder(2, "n2", "0"),
        holder(3, "n1", "9"),
    ]
    shares = share_ranks(holders, "n2", ordered=False)
    assert [one.devices for one in shares] == [("0", "1"), ("9", "10")]
    assert [one.bundles for one in shares] == [(2, 1), (3, 0)]
    assert shares[0].name == "host-n2 (10.0.0.2)"
    assert [one.bundles for one in share_ranks(holders, "n2", ordered=True)] == [(1, 2), (0, 3)]


def test_an_engine_outside_of_its_bundles_is_refused():
    with pytest.raises(ConfigError, match=r"its bundles are on host-n1 \(10.0.0.1\)"):
        share_ranks([holder(0, "n1")], "n2", ordered=False)


def test_bundles_that_nodes_share_unevenly_are_refused():
    holders = [holder(0, "n1"), holder(1, "n2"), holder(2, "n2")]
    with pytest.raises(ConfigError, match=r"1 on host-n1 \(10.0.0.1\), 2 on host-n2"):
        share_ranks(holders, "n1", ordered=False)


@given(st.permutations([1, 2, 3, 4] * 3), st.booleans())
def test_each_bundle_has_one_rank(nodes, ordered):
    holders = [holder(i, f"n{node}", str(i)) for i, node in enumerate(nodes)]
    engine = holders[-1].node_id
    shares = share_ranks(holders, engine, ordered=ordered)
    assert sorted(b for one in shares for b in one.bundles) == list(range(len(nodes)))
    assert len({one.address for one in shares}) == len(shares)
    assert shares[0].address == holders[-1].address
    for one in shares:
        assert [str(b) for b in one.bundles] == list(one.devices)


def node(name, total, free):
    return RayNode(name, f"10.0.0.{name[1:]}", f"host-{name}", total, free)


@pytest.mark.parametrize(
    ("free", "ranks", "plan"),
    [
        ([8, 8], 8, "1" * 8),
        ([4, 8], 8, "11112222"),  # PACK would take all of the second node
        ([6, 2, 6], 8, "11113333"),
        ([2, 4, 2, 3], 4, "1133"),  # those with the least room first
        ([1, 1, 1], 3, "123"),
        ([1, 8], 3, None),
        ([0, 8], 2, None),
        ([2, 1], 4, None),
    ],
)
def test_nodes_get_the_same_number_of_ranks_and_the_engines_node_some(free, ranks, plan):
    nodes = [node(f"n{i}", 8, n) for i, n in enumerate(free, 1)]
    found = plan_nodes(nodes, ranks, 1.0, "n1")
    assert found == (plan and [f"n{one}" for one in plan])


def test_a_part_of_a_gpu_is_room_for_several_ranks():
    assert plan_nodes([node("n1", 1, 0.6)], 2, 0.3, "n1") == ["n1", "n1"]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 16))
def test_a_plan_takes_no_more_than_there_is(free, ranks):
    nodes = [node(f"n{i}", 9, n) for i, n in enumerate(free)]
    plan = plan_nodes(nodes, ranks, 1.0, "n0")
    if plan is None:
        return
    counts = {one: plan.count(one) for one in plan}
    assert sum(counts.values()) == ranks
    assert len({*counts.values()}) == 1
    assert plan[0] == "n0"
    assert all(counts[one.node_id] <= one.free for one in nodes if one.node_id in counts)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            [node("n1", 1, 1), node("n2", 2, 2)],
            "the cluster has 3 GPUs; add nodes, or use at most 3",
        ),
        ([node("n1", 0, 0), node("n2", 8, 8)], "this node has no GPU, and rank 0"),
        ([node("n1", 4, 0), node("n2", 8, 8)], "all 4 GPUs of this node are in use"),
        ([node("n1", 4, 1), node("n2", 4, 2)], "3 of the cluster's 8 GPUs are free"),
        ([node("n1", 4, 4), node("n2", 4, 4)], "raise --ray-placement-timeout-seconds"),
    ],
)
def test_a_placement_that_is_late_names_the_reason_and_all_nodes(nodes, message):
    text = describe_shortage(nodes, 4, "GPU", "n1", 60)
    assert text.startswith("Ray has not placed 4 ranks, with one GPU each, in 60 s: ")
    assert message in text
    first, second = text.splitlines()[1:]
    assert first.startswith("  host-n1 (10.0.0.1)  ")
    assert first.endswith("free, this node")
    assert second.startswith("  host-n2 (10.0.0.2)  ")
