"""Block tables: prefix hits, windows, forks and loads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.cache_spec import FullAttentionSpec, SlidingWindowSpec
from quire.core.kv.kv_cache import KVCache
from quire.core.kv.tiers.host import HostTier
from quire.core.types import NO_BLOCK
from tests.pure.core.builders import sequence

SPECS = {
    "full": (FullAttentionSpec(),),
    "window": (SlidingWindowSpec(5),),
    "both": (FullAttentionSpec(), SlidingWindowSpec(5)),
    "three": (SlidingWindowSpec(3), FullAttentionSpec(), SlidingWindowSpec(9)),
}


def cache(blocks=40, size=4, specs=SPECS["full"], **options):
    return KVCache(BlockPool(blocks), size, specs, **options)


def compute(kv, seq, n):
    """Do what the scheduler does with a sequence in a successful step."""
    kv.free_out_of_window(seq, 0)
    assert kv.allocate(seq, n)
    since = seq.computed
    seq.planned += n
    seq.computed += n
    kv.cache_full_blocks(seq, since)


def done(kv, prompt, **fields):
    """Return a sequence whose whole prompt is computed."""
    seq = sequence(prompt=prompt, tables=len(kv.specs), **fields)
    compute(kv, seq, len(prompt))
    return seq


def matched(kv, prompt, **fields):
    seq = sequence(prompt=prompt, tables=len(kv.specs), **fields)
    kv.match_prefix(seq)
    return seq


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=24).map(tuple)


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
@given(prompts=st.lists(tokens, min_size=1, max_size=4), wanted=tokens, size=st.integers(1, 5))
def test_a_hit_is_the_longest_known_prefix_of_full_blocks(specs, prompts, wanted, size):
    kv = cache(400, size, specs)
    owner = {}  # (group, tokens up to the end of a block) -> block
    seqs = [done(kv, prompt) for prompt in prompts]
    for seq, prompt in zip(seqs, prompts):
        for g in range(len(specs)):
            for i in range(len(prompt) // size):
                owner.setdefault((g, prompt[: (i + 1) * size]), seq.tables[g][i])
    hit = matched(kv, wanted)
    most = max(
        i
        for i in range((len(wanted) - 1) // size + 1)
        if i == 0 or (0, wanted[: i * size]) in owner
    )
    assert hit.computed == hit.planned == most * size
    for g, spec in enumerate(specs):
        first = spec.first_needed(hit.computed) // size
        for i, block in enumerate(hit.tables[g]):
            want = owner[g, wanted[: (i + 1) * size]] if i >= first else NO_BLOCK
            assert block == want
    kv.check([*seqs, hit])


def test_at_least_one_token_is_left_to_compute():
    kv = cache()
    done(kv, range(8))
    assert matched(kv, range(8)).computed == 4
    assert matched(kv, range(9)).computed == 8


@pytest.mark.parametrize(
    ("fields", "hit"), [({}, 4), ({"salt": b"x"}, 0), ({"read_prefix_cache": False}, 0)]
)
def test_a_hit_needs_the_same_salt_and_read_prefix_cache(fields, hit):
    kv = cache()
    done(kv, range(8))
    assert matched(kv, range(8), **fields).computed == hit


@pytest.mark.parametrize(
    ("mine", "hit"),
    [
        (((5, b"cat"),), 8),  # the same
        (((5, b"dog"),), 4),  # another image, in the second block
        (((6, b"cat"),), 4),  # the same at another place of the block
        ((), 4),
        (((5, b"cat"), (9, b"dog")), 8),  # one more, behind what is cached
        (((1, b"cat"), (5, b"cat")), 0),
    ],
)
def test_a_hit_ends_before_the_first_different_extra_content(mine, hit):
    kv = cache()
    done(kv, range(8), extra_content=((5, b"cat"),))
    assert matched(kv, range(12), extra_content=mine).computed == hit


def test_blocks_after_different_extra_content_are_not_hit():
    kv = cache()
    done(kv, range(16), extra_content=((5, b"cat"),))
    assert matched(kv, range(20), extra_content=((5, b"dog"),)).computed == 4
    assert matched(kv, range(20), extra_content=((5, b"cat"),)).computed == 16


def test_content_of_a_block_is_found_among_that_of_many():
    content = tuple((at, b"%d" % at) for at in range(0, 400, 2))
    kv = cache(blocks=200)
    done(kv, range(400), extra_content=content)
    assert matched(kv, range(401), extra_content=content).computed == 400
    for at in (0, 8, 398):
        other = tuple((n, d if n != at else b"?") for n, d in content)
        assert matched(kv, range(401), extra_content=other).computed == at // 4 * 4


def test_a_block_after_a_different_prefix_is_not_hit():
    kv = cache()
    done(kv, (1, 1, 1, 1, 2, 2, 2, 2))
    assert matched(kv, (2, 2, 2, 2, 9)).computed == 0
    assert matched(kv, (3, 3, 3, 3, 2, 2, 2, 2, 9)).computed == 0


def test_a_window_group_needs_only_its_last_blocks_for_a_hit():
    kv = cache(specs=(FullAttentionSpec(), SlidingWindowSpec(5)))
    seq = done(kv, range(16))
    kv.free_out_of_window(seq, 0)
    assert seq.tables[1][:3] == [NO_BLOCK] * 3
    hit = matched(kv, range(20))
    assert hit.computed == 16
    assert hit.tables[1] == [NO_BLOCK] * 3 + [seq.tables[1][3]]
    assert hit.tables[0] == seq.tables[0]


def test_a_tenant_that_fills_the_cache_evicts_its_own_blocks():
    kv = cache(blocks=16)
    regular = {"tenant": b"regular", "salt": b"regular"}
    kv.release(done(kv, range(21), **regular), 0)
    for at in range(8):
        for part in range(3):
            kv.release(done(kv, [at, part] * 16, tenant=b"other", salt=b"other"), 0)
        again = matched(kv, range(30), **regular)
        assert again.computed == 20
        kv.release(again, 0)
    kv.pool.check()


def test_a_hit_needs_blocks_in_every_group():
    kv = cache(blocks=12, specs=(FullAttentionSpec(), SlidingWindowSpec(5)))
    seq = done(kv, range(16))
    last = seq.tables[1][3]
    kv.release(seq, 0)
    kv.pool.uncache([last])  # of the window; the other group has all of it
    assert matched(kv, range(20)).computed == 12


@given(st.integers(1, 9), st.integers(1, 5), st.lists(st.integers(1, 7), max_size=12))
def test_a_window_frees_only_blocks_outside_of_it(window, size, chunks):
    kv = cache(200, size, (SlidingWindowSpec(window),))
    seq = sequence(prompt=range(100))
    for n in chunks:
        compute(kv, seq, n)
        kv.free_out_of_window(seq, 0)
        kv.check([seq])
        first = max(0, seq.computed - window + 1) // size
        assert [b == NO_BLOCK for b in seq.tables[0]] == [
            i < first for i in range(len(seq.tables[0]))
        ]


def test_allocate_takes_all_blocks_or_none():
    kv = cache(blocks=3, specs=(FullAttentionSpec(), FullAttentionSpec()))
    seq = sequence(prompt=range(20), tables=2)
    assert not kv.allocate(seq, 5)
    assert seq.tables == ([], [])
    assert kv.token_capacity(seq) == 4
    assert kv.blocks_to_allocate(seq, 5) == 4
    assert kv.allocate(seq, 4)
    assert [len(t) for t in seq.tables] == [1, 1]


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
@given(prompt=st.integers(2, 24), length=st.integers(1, 23), size=st.integers(1, 5))
def test_a_fork_shares_blocks_and_copies_the_partial_one(specs, prompt, length, size):
    kv = cache(400, size, specs)
    parent = sequence(prompt=range(prompt), tables=len(specs))
    compute(kv, parent, prompt)
    length = min(length, prompt - 1)
    child = sequence(prompt=range(length + 1), tables=len(specs))
    kv.fork(parent, child, length)
    assert child.computed == child.planned == length
    kv.check([parent, child])
    shared = [list(table) for table in child.tables]
    copies = kv.copy_on_write(child, after=1)
    assert [c.src for c in copies] == ([t[-1] for t in shared] if length % size else [])
    for copy, table, before in zip(copies, child.tables, shared):
        assert table[:-1] == before[:-1]
        assert table[-1] == copy.dst not in before
    kv.check([parent, child])
    kv.release(child, 0)
    kv.step_finished(1)
    kv.release(parent, 0)
    assert kv.pool.available == 400


def test_a_fork_shares_nothing_if_the_window_freed_needed_blocks():
    kv = cache(specs=(SlidingWindowSpec(5),))
    parent = done(kv, range(20))
    kv.free_out_of_window(parent, 0)
    child = sequence(prompt=range(9))
    kv.fork(parent, child, 8)
    assert (child.computed, child.tables) == (0, ([],))


def test_a_shared_block_is_held_until_it_is_copied():
    kv = cache(blocks=4)
    parent, child = done(kv, range(6)), sequence(prompt=range(6))
    kv.fork(parent, child, 5)
    kv.release(parent, 0)
    [copy] = kv.copy_on_write(child, after=7)
    assert kv.pool.allocate(2) is None, (
        "the source must not be allocated before step 7 has finished"
    )
    kv.step_finished(7)
    assert copy.src in kv.pool.allocate(2)


def test_copy_on_write_without_free_blocks_changes_nothing():
    kv = cache(blocks=2)
    parent, child = done(kv, range(6)), sequence(prompt=range(6))
    kv.fork(parent, child, 5)
    assert kv.copy_on_write(child, 1) is None
    assert child.tables == parent.tables
    kv.check([parent, child])


def evicted(specs=SPECS["full"], blocks=60, prompt=22, host=60, tenant=b""):
    """Return a cache with a computed prompt in the host tier only."""
    kv = cache(blocks, 4, specs, host=HostTier(host))
    kv.release(done(kv, range(prompt), tenant=tenant), 0)
    kv.pool.free(kv.pool.allocate(blocks))
    kv.take_copies(1)
    kv.step_finished(1)
    assert not kv.pool.cached
    return kv


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
@given(length=st.integers(1, 30), missing=st.sets(st.integers(0, 14), max_size=3))
def test_a_hit_uses_blocks_of_the_device_and_the_host(specs, length, missing):
    """A hit is as long as if all blocks were on the device."""
    kv, plain = evicted(specs), cache(60, 4, specs)
    plain.release(done(plain, range(22)), 0)
    back = matched(kv, range(18))  # part of it is on the device again
    kv.load_prefix(back, 1)
    kv.take_copies(2)
    kv.step_finished(2)
    kv.release(back, 0)
    keys = [key + bytes([g] if g else []) for key in back.keys for g in range(len(specs))]
    lost = [keys[i] for i in missing if i < len(keys)]
    kv.pool.forget(lost)
    plain.pool.forget(lost)
    seq, want = matched(kv, range(length)), matched(plain, range(length))
    assert seq.computed == want.computed
    kv.load_prefix(seq, 1)
    assert [[b == NO_BLOCK for b in t] for t in seq.tables] == [
        [b == NO_BLOCK for b in t] for t in want.tables
    ]
    kv.check([seq])


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_host_contents_are_loaded_into_blocks_of_the_sequence(specs):
    kv = evicted(specs)
    seq = matched(kv, range(22))
    assert seq.computed == 20
    needed = kv.blocks_needed(seq)
    tokens = kv.load_prefix(seq, 1)
    loads = kv.take_copies(2).loads
    assert sorted(c.dst for c in loads) == sorted(b for t in seq.tables for b in t if b != NO_BLOCK)
    assert kv.blocks_needed(seq) == needed - len(loads), "they were counted before"
    first = min(spec.first_needed(20) // 4 for spec in specs)
    assert tokens == 20 - 4 * first
    assert kv.host.pool.available == 60 - len(loads), "read by step 2, so not replaced before"
    again = matched(kv, range(22))
    assert again.tables == seq.tables, "found on the device"
    assert not kv.load_prefix(again, 1)
    kv.check([seq, again])
    kv.step_finished(2)
    assert kv.host.pool.available == 60


def test_loading_into_a_full_device_keeps_the_loaded_contents():
    kv = evicted(
        blocks=5, prompt=20, host=5
    )  # both are full: the block evicted for the load would replace its content
    kv.release(done(kv, range(50, 70)), 0)
    kv.take_copies(2)
    kv.step_finished(2)
    seq = matched(kv, range(18))
    assert seq.computed == 16
    kv.load_prefix(seq, 1)
    copies = kv.take_copies(3)
    assert not {c.dst for c in copies.stores} & {c.src for c in copies.loads}
    kv.check([seq])


def test_a_loaded_block_is_charged_to_the_tenant():
    kv = evicted()
    seq = matched(kv, range(22), tenant=b"somebody")
    kv.load_prefix(seq, 1)
    assert kv.pool._eviction_queue.blocks_per_tenant == {b"somebody": 5}


def test_other_salts_and_requests_without_cache_reads_miss_the_host():
    kv = evicted()
    assert matched(kv, range(22), salt=b"x").computed == 0
    assert matched(kv, range(22), read_prefix_cache=False).computed == 0
    assert matched(kv, range(22)).computed == 20


def test_copies_of_a_failed_step_are_forgotten():
    kv = evicted(blocks=5, prompt=20)
    seq = matched(kv, range(18))
    kv.load_prefix(seq, 1)
    kv.take_copies(2)
    assert kv.step_failed()
    kv.step_finished(2)
    kv.release(seq, 0)
    assert not kv.pool.cached
    assert matched(kv, range(18)).computed == 16, "it is still in the host tier"
    kv.release(done(kv, range(50, 70)), 0)
    kv.pool.free(kv.pool.allocate(5))
    kv.take_copies(3)
    assert not kv.step_failed()
    kv.step_finished(3)
    assert matched(kv, range(50, 70)).computed == 0


def test_invalidated_contents_are_removed_from_all_tiers():
    kv = cache(blocks=12, specs=SPECS["both"], host=HostTier(40))
    seq = done(kv, range(22))
    kv.free_out_of_window(seq, 0)  # blocks outside of the window are cached, and evicted
    kv.pool.free(kv.pool.allocate(kv.pool.available))
    kv.take_copies(1)
    kv.step_finished(1)
    assert kv.host.pool.cached
    kv.invalidate(seq)
    kv.release(seq, 0)
    assert not kv.pool.cached
    assert not kv.host.pool.cached


def test_without_prefix_caching_no_block_is_cached():
    kv = cache(prefix_caching=False)
    seq = done(kv, range(8))
    assert not seq.keys
    kv.release(seq, 0)
    assert kv.pool.cached == 0


def test_keys_are_chained_sha256_of_parent_and_token_ids():
    from array import array
    from hashlib import sha256

    kv = cache()
    seq = done(kv, range(8), salt=b"adapter")
    root = sha256(b"adapter").digest()
    first = sha256(root + array("i", [0, 1, 2, 3]).tobytes()).digest()
    second = sha256(first + array("i", [4, 5, 6, 7]).tobytes()).digest()
    assert seq.keys == [first, second]
    assert second in kv.pool
