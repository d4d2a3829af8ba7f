"""Small real objects for tests of the core."""

from __future__ import annotations

from quire.core.types import Request, Sequence, State, Stop


def request(id="r", prompt=(1, 2, 3), max_tokens=4, **fields):
    stop = fields.pop("stop", None) or Stop(max_tokens)
    return Request(id, tuple(prompt), stop, **fields)


def sequence(prompt=(1, 2, 3), *, tables=1, index=0, output=(), **fields):
    asked = {
        k: fields.pop(k)
        for k in ("id", "salt", "priority", "arrived_at", "read_prefix_cache", "stop")
        if k in fields
    }
    made = request(prompt=prompt, **asked)
    seq = Sequence(made, index, [*prompt, *output], tuple([] for _ in range(tables)))
    seq.end = len(prompt) + made.stop.max_tokens
    seq.stop_ids = made.stop.eos_ids | made.stop.token_ids
    seq.state = fields.pop("state", State.WAITING)
    for name, value in fields.items():
        setattr(seq, name, value)
    return seq
