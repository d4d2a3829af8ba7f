"""Stage tokens: which messages stages send, and which of them a step waits for."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from quire.distributed.mesh import Mesh
from quire.distributed.stage_tokens import GroupTokens, StageTokens


class Transport:
    """Notes what is asked of it."""

    def __init__(self):
        self.sent, self.expected, self.received = [], 0, []

    def send(self, last_tokens):
        self.sent.append(last_tokens.tolist())

    def expect(self, last_tokens):
        self.expected += 1
        return self.expected

    def receive(self, number, last_tokens):
        self.received.append(number)


def stage(rank, transport):
    return StageTokens(Mesh(pp=3, rank=rank), transport, torch.zeros(4, dtype=torch.int32))


def test_the_first_stage_waits_for_the_newest_message_that_a_step_reads():
    first = stage(0, transport := Transport())
    for unknown, sampled in (
        ([], [0, 1]),  # message 1
        ([], []),  # a chunk of a prompt: no message
        ([2], [2]),  # 2; slot 2 was sampled before any message that is kept
        ([0], [0]),  # 3, waits for 1
        ([1, 0], [3]),  # 4, waits for 3
        ([3, 2], []),  # waits for 4, which has slot 2 of 2
    ):
        with first.step(unknown, sampled):
            pass
    assert transport.expected == 4
    assert transport.received == [1, 3, 4]
    assert not transport.sent


def test_the_last_stage_sends_after_each_step_that_samples_also_if_it_raises():
    last = stage(2, transport := Transport())
    with last.step([0], [0]):
        last._last_tokens[0] = 5
    with last.step([], []):
        pass
    with pytest.raises(RuntimeError), last.step([0], [0]):
        raise RuntimeError
    assert transport.sent == [[5, 0, 0, 0]] * 2
    assert not transport.received


def test_a_failed_step_of_the_first_stage_expects_its_message():
    first = stage(0, transport := Transport())
    with pytest.raises(RuntimeError), first.step([], [1]):
        raise RuntimeError
    with first.step([1], [1]):
        pass
    assert transport.received == [1]


def test_messages_between_cpus_come_in_order_and_none_need_be_received(tmp_path):
    store, made, names = dist.FileStore(str(tmp_path / "store"), 2), {}, []

    def join(rank):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        group = dist.ProcessGroupGloo(dist.PrefixStore("a", store), rank, 2, options)
        made[rank] = GroupTokens(group, 3, names.append)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, last, tokens = made[0], made[1], torch.zeros(5, dtype=torch.int32)
    for message in range(1, 10):  # more than are kept
        assert first.expect(tokens) == message
        last.send(torch.full((5,), message, dtype=torch.int32))
    first.receive(8, tokens)
    assert tokens.tolist() == [8] * 5
    first.receive(9, tokens)
    first.receive(2, tokens)
    assert tokens.tolist() == [9] * 5, "it has come before"
    assert names == ["receive", "received"] * 3
