"""What Gluon kernels need whose warps have parts of their own, as Python: see gluon_on_torch.py.

Each partition is a thread. Copies of tiles arrive at once, products of a warpgroup when they are
waited for, so that a stage which is written too early shows. A barrier that nobody completes is an
error after some seconds.
"""

import threading
from types import SimpleNamespace

import torch

PATIENCE_S = 10.0


class Barriers:
    """mbarriers, by the place of the shared memory that holds them."""

    MBarrierLayout = staticmethod(lambda: None)

    def __init__(self):
        self._changed = threading.Condition()
        self._held = {}

    def init(self, at, count):
        self._held[at.data.data_ptr()] = SimpleNamespace(
            count=count, missing=count, bytes=0, phase=0
        )

    def expect(self, at, size, pred=True):
        if pred:
            self.change(at, arrived=1, size=size)

    def arrive(self, at, count=1, pred=True):
        if pred:
            self.change(at, arrived=count)

    def change(self, at, arrived=0, size=0):
        with self._changed:
            one = self._held[at.data.data_ptr()]
            one.missing -= arrived
            one.bytes += size
            assert one.missing >= 0, "more arrive than the barrier counts"
            if not one.missing and not one.bytes:
                one.missing, one.phase = one.count, one.phase + 1
                self._changed.notify_all()

    def wait(self, at, parity):
        one = self._held[at.data.data_ptr()]
        with self._changed:
            done = self._changed.wait_for(lambda: one.phase & 1 != int(parity), PATIENCE_S)
        assert done, "nobody completes the barrier"


class Tiles:
    """Copies of tiles of a tensor, zeros beyond its ends."""

    def __init__(self, barriers):
        self._barriers = barriers

    def async_copy_global_to_shared(self, tiles, at, barrier, smem, pred=True):
        if not pred:
            return
        rows, columns = (
            slice(int(a), min(int(a) + size, end))
            for a, size, end in zip(at, tiles.block_shape, tiles.shape, strict=True)
        )
        found = tiles.base[rows, columns]
        smem.data.zero_()
        smem.data[: found.shape[0], : found.shape[1]] = found
        self._barriers.change(barrier, size=-smem.data.nbytes)


class _Pending:
    def __init__(self, a, b, acc):
        self.a, self.b, self.acc = a, b, acc

    def result(self):
        acc = self.acc.result() if isinstance(self.acc, _Pending) else self.acc
        return acc + self.a.float() @ self.b.data.float()


def _wait(outstanding, deps):
    assert not outstanding
    found = tuple(one.result() for one in deps)
    return found[0] if len(found) == 1 else found


def _specialize(parts, warps, registers):
    failed = []

    def run(function, args):
        try:
            function(*args)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if failed:
        raise failed[0]


def _atomic_add(pointer, value, sem):
    before = pointer.data[pointer.at].clone()
    pointer.data[pointer.at] += value
    return before


def _store(pointer, value, mask=True):
    at, value, mask = torch.broadcast_tensors(
        torch.as_tensor(pointer.at), torch.as_tensor(value), torch.as_tensor(mask)
    )
    pointer.data[at[mask]] = value[mask].to(pointer.data.dtype)


def language(gl, programs):
    """(more of `gl`, other names of a kernel's module), for gluon_on_torch.run."""
    barriers = Barriers()
    gl.NVMMASharedLayout = lambda *args: None
    gl.expand_dims = torch.unsqueeze
    gl.where = lambda c, a, b: torch.where(*map(torch.as_tensor, (c, a, b)))
    gl.minimum = lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b))
    gl.convert_layout = lambda x, layout: x
    gl.num_programs = lambda axis: programs[axis]
    gl.warp_specialize = _specialize
    gl.atomic_add = _atomic_add
    gl.store = _store
    gl.load = lambda pointer, cache_modifier="": pointer.data[torch.as_tensor(pointer.at)]
    gl.int16, gl.bfloat16 = torch.int16, torch.bfloat16
    return {
        "mbarrier": barriers,
        "tma": Tiles(barriers),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": lambda a, b, acc, is_async: _Pending(a, b, acc),
        "warpgroup_mma_wait": _wait,
    }
