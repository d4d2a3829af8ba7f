"""Puts a scheduler into the middle of things: what a recording that begins there needs.

A helper of the scheduler's, and the one place besides it that moves sequences; for replays only.
"""

from __future__ import annotations

from quire.core.scheduler import Scheduler
from quire.core.types import Sequence


def seat(scheduler: Scheduler, request_id: str, index: int, computed: int) -> None:
    """Have a sequence run that waits, with so many tokens in the cache."""
    roster, kv = scheduler._roster, scheduler._kv
    family = roster.families[request_id]
    seq = family.sequences[index]
    if seq in family.followers:
        del family.followers[seq]
        roster.followers -= 1
    else:
        roster.order.remove(seq)
    roster.seat(seq)
    if kv.grow(seq, computed):
        seq.computed = seq.planned = computed
        kv.publish(seq, 0)


def sequence(scheduler: Scheduler, request_id: str, index: int) -> Sequence | None:
    """A sequence that lives, or None."""
    family = scheduler._roster.families.get(request_id)
    return None if family is None else family.sequences[index]


def know(scheduler: Scheduler, seq: Sequence, tokens: int) -> None:
    """Have the prefix cache know so many of its first tokens, and if that can be no more.

    What others computed before it is not known here, nor in which order it was used.
    """
    kv = scheduler._kv
    if not kv.prefix_caching or len(kv.specs) > 1 or not seq.request.read_prefix_cache:
        return
    pool, known = kv.pool, tokens // kv.block_size
    keys = kv._keys(seq, len(seq.tokens) // kv.block_size)
    held = []
    for key in keys[:known]:
        block = pool.find(key)
        if block is None and (taken := pool.take(1)):
            (block,) = taken
            pool.publish(block, key)
        if block is not None:
            held.append(block)
    pool.drop(held)
    if known < len(keys) and keys[known] in pool:
        block = pool._block_of[keys[known]]
        if block in pool._cached:
            del pool._cached[block], pool._block_of[pool._key_of.pop(block)]
            pool._free.append(block)


def fill_up(scheduler: Scheduler, available: int) -> int:
    """Take blocks until only so many can be had, for who is not known here. How many it took."""
    surplus = max(scheduler.available - available, 0)
    return surplus if scheduler._kv.pool.take(surplus) is not None else 0
