"""Groups of rows whose tables begin alike."""

import random

import pytest
import torch

from quire.runner.shared_prefixes import (
    LEAST_GROUP,
    PrefixGroup,
    SharedPrefixRows,
    find_groups,
)
from tests import tiers


def table(*parts):
    return [block for part in parts for block in part]


def test_rows_of_one_prompt_are_one_group():
    tables = [table(range(9), [100 + row, 200 + row]) for row in range(5)]
    assert find_groups(tables) == [PrefixGroup([0, 1, 2, 3, 4], 9)]


def test_too_few_rows_are_no_group():
    tables = [table(range(9), [100 + row]) for row in range(LEAST_GROUP - 1)]
    assert find_groups([*tables, [50], [50], [50], [50], []]) == []


def test_a_row_with_one_block_in_common_does_not_spoil_the_group():
    odd = table([0], range(300, 310))
    for tables in ([odd] + [table(range(9), [100 + row]) for row in range(9)],
                   [table(range(9), [100 + row]) for row in range(9)] + [odd]):  # fmt: skip
        (group,) = find_groups(tables)
        assert (len(group.rows), group.blocks) == (9, 9)


def test_the_last_block_of_a_row_is_its_own():
    tables = [[0, 1, 2, 3] for _ in range(4)]
    assert find_groups(tables) == [PrefixGroup([0, 1, 2, 3], 3)]


@pytest.mark.parametrize("seed", range(tiers.amount(20, 2000)))
def test_groups_are_disjoint_and_their_rows_begin_alike(seed):
    draw = random.Random(seed)
    numbers = iter(range(10**6))
    stems = [[next(numbers) for _ in range(draw.randint(1, 20))] for _ in range(3)]
    stems += [stem[: draw.randint(1, len(stem))] + [next(numbers)] * 3 for stem in stems]
    tables = [
        draw.choice(stems) + [next(numbers) for _ in range(draw.randint(0, 4))] for _ in range(40)
    ]
    groups = find_groups(tables)
    rows = [row for group in groups for row in group.rows]
    assert len(rows) == len(set(rows))
    for group in groups:
        assert len(group.rows) >= LEAST_GROUP
        assert {tuple(tables[row][: group.blocks]) for row in group.rows} == {
            tuple(tables[group.rows[0]][: group.blocks])
        }
        assert all(0 < group.blocks < len(tables[row]) for row in group.rows)
    best = max(
        (count - 1) * depth
        for stem in stems
        for depth in range(1, len(stem) + 1)
        if (count := sum(one[:depth] == stem[:depth] and len(one) > depth for one in tables))
        >= LEAST_GROUP
    )
    assert sum(group.saved for group in groups) >= best / 2


def test_groups_are_cut_into_tiles():
    rows = SharedPrefixRows(16, 16, 4, torch.device("cpu"))
    rows.write([PrefixGroup([1, 3, 5, 7, 9, 11], 2), PrefixGroup([0, 2, 4, 6], 5)])
    lengths, members, tiles = torch.from_numpy(rows._written).split([16, 16, 12])
    assert lengths.tolist() == [80, 32, 80, 32, 80, 32, 80, 32, 0, 32, 0, 32, 0, 0, 0, 0]
    assert members[:10].tolist() == [1, 3, 5, 7, 9, 11, 0, 2, 4, 6]
    assert tiles.view(-1, 3).tolist() == [[0, 4, 32], [4, 2, 32], [6, 4, 80], [0, 0, 0]]
    assert torch.equal(rows._on_device, torch.from_numpy(rows._written))
    rows.write([])
    assert not rows._on_device.any()
