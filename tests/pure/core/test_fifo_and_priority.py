"""FIFO and priority queues: each sequence is popped once, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.order.priority import Priority, rank
from tests.pure.core.builders import sequence

entries = st.lists(
    st.tuples(st.integers(-2, 2), st.integers(0, 3), st.integers(0, 2)), unique=True, max_size=12
)


def seqs_of(entries):
    return [
        sequence(id=f"r{i}", priority=p, arrived_at=float(at), index=index)
        for i, (p, at, index) in enumerate(entries)
    ]


@pytest.mark.parametrize("order", [Fifo, Priority])
@given(entries=entries, data=st.data())
def test_each_sequence_is_popped_once(order, entries, data):
    queue, inside = order(), []
    for seq in seqs_of(entries):
        (queue.push if data.draw(st.booleans()) else queue.requeue)(seq)
        inside.append(seq)
        if data.draw(st.booleans()):
            seq = data.draw(st.sampled_from(inside))
            queue.remove(seq)
            inside.remove(seq)
        assert len(queue) == len(inside)
        assert set(queue) == set(inside)
    listed = list(queue)
    popped = [queue.pop() for _ in range(len(queue))]
    assert popped == listed
    assert set(popped) == set(inside)
    assert len(popped) == len(inside)
    assert not len(queue)


@given(entries)
def test_priority_orders_by_number_then_arrival(entries):
    queue, seqs = Priority(), seqs_of(entries)
    for seq in seqs:
        queue.push(seq)
    assert [queue.pop() for _ in seqs] == sorted(seqs, key=rank)


@given(entries)
def test_the_priority_victim_is_last_in_rank(entries):
    seqs = seqs_of(entries)
    if seqs:
        assert Priority().choose_victim(dict.fromkeys(seqs)) is max(seqs, key=rank)


def test_fifo_keeps_arrival_order_with_requeued_ones_first():
    queue, (a, b, c) = Fifo(), seqs_of([(0, 0, 0), (0, 1, 0), (0, 2, 0)])
    queue.push(a)
    queue.push(b)
    queue.requeue(c)
    assert list(queue) == [c, a, b]


def test_the_fifo_victim_is_the_youngest():
    a, b = seqs_of([(0, 0, 0), (0, 1, 0)])
    assert Fifo().choose_victim({a: None, b: None}) is b
