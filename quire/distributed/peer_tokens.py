"""Peer tokens: the transport of stage tokens over the memory of GPUs of one host.

The area is in the memory of a GPU of the first stage; the last stage's rank of the same
tensor-parallel number opens it, and writes into it. A message is one small kernel on either side,
on the streams of the steps: it waits for no other stream.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor

from quire.distributed.mesh import Mesh
from quire.distributed.peer_memory import BOOT_ID, KNOWN_SUM_S
from quire.errors import QuireError
from quire.kernels.gpu import stage_tokens
from quire.platform import cuda_ipc

log = logging.getLogger(__name__)

MAX_SLOTS = 1 << 16
"""Of an area: more sequences than an engine runs at once."""


class PeerTokens:
    """One end of an area."""

    def __init__(self, area: Tensor, abort: Tensor) -> None:
        """area: int64 [1] on this rank's GPU, the address of the area in this process. abort: int32
        [1] in pinned host memory; not 0: kernels wait no longer."""
        self._area, self._abort, self._number = area, abort, 0

    def send(self, last_tokens: Tensor) -> None:
        assert len(last_tokens) <= MAX_SLOTS, len(last_tokens)
        stage_tokens.send(last_tokens, self._area)

    def expect(self, last_tokens: Tensor) -> int:
        self._number += 1
        return self._number

    def receive(self, number: int, last_tokens: Tensor) -> None:
        wrapped = (number + (1 << 31)) % (1 << 32) - (1 << 31)
        stage_tokens.receive(wrapped, last_tokens, self._area, self._abort)

    def abort(self) -> None:
        self._abort.fill_(1)


def connect(mesh: Mesh, store: Any, device: torch.device) -> PeerTokens | None:
    """Return this rank's end, of the first or the last stage; None: tokens go through the host.

    store: of torch.distributed; all ranks of these stages call this. Either all have an end
    afterwards or none, and known tokens have come through each.
    """
    made, problem = None, "the other end is on another host, or cannot reach the memory"
    with torch.cuda.device(device):
        try:
            made = _open(mesh, store, device)
        except QuireError as error:
            problem = str(error)
        both_open = _exchange_open(mesh, store, made is not None)
        works = made is not None and both_open and _tokens_arrive(mesh, made, device)
    store.set(f"works/{mesh.rank}", b"1" if works else b"0")
    ends = [rank for rank in range(mesh.size) if rank // mesh.tp % mesh.pp in (0, mesh.pp - 1)]
    found = [bytes(store.get(f"works/{rank}")) for rank in ends]
    if found == [b"1"] * len(ends):
        return made
    log.info("tokens go to the first stage through the host: %s", problem)
    return None


def _open(mesh: Mesh, store: Any, device: torch.device) -> PeerTokens | None:
    """Return this rank's end. None: the other has none. The first stage has the area."""
    pair, host = f"{mesh.dp_rank}/{mesh.tp_rank}", BOOT_ID.read_bytes()
    if mesh.pp_rank == 0:
        offer = b""
        try:
            address = cuda_ipc.allocate(stage_tokens.area_bytes(MAX_SLOTS))
            offer = cuda_ipc.export_handle(address) + host
        finally:
            store.set(f"offer/{pair}", b"+" + offer)
    else:
        offer = bytes(store.get(f"offer/{pair}"))[1:]
        if offer[cuda_ipc.HANDLE_BYTES :] != host:
            return None
        address = cuda_ipc.open_handle(offer[: cuda_ipc.HANDLE_BYTES])
    area = torch.tensor([address], dtype=torch.int64, device=device)
    return PeerTokens(area, torch.zeros(1, dtype=torch.int32).pin_memory())


def _exchange_open(mesh: Mesh, store: Any, is_open: bool) -> bool:
    """Tell the other end whether this one is open; return whether that one is."""
    pair = f"{mesh.dp_rank}/{mesh.tp_rank}"
    own, other = ("first", "last") if mesh.pp_rank == 0 else ("last", "first")
    store.set(f"open/{own}/{pair}", b"1" if is_open else b"0")
    return bytes(store.get(f"open/{other}/{pair}")) == b"1"


def _tokens_arrive(mesh: Mesh, made: PeerTokens, device: torch.device) -> bool:
    """Send known tokens through the area. False: they did not come."""
    known = torch.arange(7, 1007, dtype=torch.int32, device=device)
    if mesh.pp_rank:
        made.send(known)
        torch.cuda.synchronize(device)
        return True
    found = torch.zeros_like(known)
    made.receive(made.expect(found), found)
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + KNOWN_SUM_S
    while not done.query():
        if time.monotonic() > deadline:
            made.abort()
            done.synchronize()
            return False
        time.sleep(0.001)
    return torch.equal(found, known)
