"""Tokens through the first stage's memory, by processes that share memory of the host: real waits.

The kernels run in Triton's interpreter, a process for each stage.
"""

import multiprocessing
import os
import time
import traceback

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from quire.distributed.peer_tokens import PeerTokens
from quire.kernels.gpu import stage_tokens

SLOTS = 600  # several blocks
DEADLINE_S = 60


def run_stages(first, last, *, count=0):
    """Run first(tokens, results) and last(tokens) in a process each; return the results. count: of
    messages before."""
    area = torch.zeros(stage_tokens.area_bytes(SLOTS) // 4, dtype=torch.int32).share_memory_()
    area[0] = count
    abort = torch.zeros(1, dtype=torch.int32).share_memory_()
    results = torch.zeros(4, SLOTS, dtype=torch.int32).share_memory_()
    context = multiprocessing.get_context("fork")  # the addresses are those of the parent

    def main(work):
        try:
            work(PeerTokens(torch.tensor([area.data_ptr()]), abort))
        except Exception:  # noqa: BLE001 - the border of the process
            traceback.print_exc()
            abort.fill_(1)  # the other waits
            os._exit(1)
        os._exit(0)

    works = (lambda tokens: first(tokens, results)), last
    processes = [context.Process(target=main, args=(work,)) for work in works]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    abort.fill_(1)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0]
    return results


def tokens_of(message):
    return torch.arange(SLOTS, dtype=torch.int32) + 1000 * message


@pytest.mark.parametrize("before", [0, 2**31 - 2], ids=["begin", "wrap"])
def test_a_step_waits_for_its_message(before):
    """Each message is sent when the first stage has the one before. The count may wrap."""

    def first(tokens, results):
        tokens._number = before
        for message in range(1, 5):
            number = tokens.expect(results[0])
            assert number == before + message
            tokens.receive(number, results[message - 1])

    def last(tokens):
        for message in range(1, 5):
            time.sleep(0.02)
            tokens.send(tokens_of(message))

    found = run_stages(first, last, count=before)
    for message, own in enumerate(found, 1):  # the last stage does not wait: a later may have come
        later = (own - tokens_of(0)) // 1000
        assert (later >= message).all()
        assert torch.equal(own, tokens_of(later))


def test_a_message_that_came_is_not_waited_for():
    def first(tokens, results):
        numbers = [tokens.expect(results[0]) for _ in range(3)]
        tokens.receive(numbers[2], results[0])
        tokens.receive(numbers[0], results[1])

    found = run_stages(first, lambda tokens: [tokens.send(tokens_of(m)) for m in (1, 2, 3)])
    assert torch.equal(found[0], tokens_of(3))
    assert torch.equal(found[1], tokens_of(3)), "a later one has the tokens of all before"


def test_an_abort_ends_a_wait_for_a_rank_that_is_gone(monkeypatch):
    monkeypatch.setattr(stage_tokens, "_POLL", stage_tokens.tl.constexpr(4))

    def first(tokens, results):
        tokens.receive(tokens.expect(results[0]), results[0])

    def last(tokens):
        time.sleep(0.05)
        tokens.abort()

    run_stages(first, last)
