"""Messages to ranks, and answers of them, that do not fit in their rings."""

import contextlib
import threading

from quire.executors.rank_group import CallWorker

PATIENCE_S = 20.0


@contextlib.contextmanager
def large_answer(group):
    """Within, ranks wait for room for an answer: their error has the name of the method."""
    limit = threading.Timer(PATIENCE_S, group.fail, ["both wait for each other"])
    limit.start()
    number = group.send(CallWorker("n" * (1 << 20), []), "a call whose error is long")
    yield
    assert all(len(one.message) > 1 << 20 for one in group.wait(number))
    limit.cancel()


def send_large(group, ranks=()):
    """Send a large message beside large answers. ranks: processes that begin when it is there."""
    for one in ranks:
        one.suspend()
        threading.Timer(0.5, one.resume).start()
    with large_answer(group):
        number = group.send(CallWorker("nothing", [bytes(5 << 20)]), "a long call")
    assert all("nothing" in one.message for one in group.wait(number))
