"""Peer memory of the GPUs of one host: each rank allocates an area and opens the others'.

The handles travel through the store in which the ranks meet. Areas keep their addresses for as long
as the process lives, so CUDA graphs may hold them.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch

from quire.distributed.mesh import Mesh
from quire.errors import QuireError
from quire.kernels.collectives import all_reduce
from quire.kernels.formats.peer_memory import MAX_RANKS, PeerMemory, area_bytes
from quire.kernels.framework import lazy_fusion
from quire.platform import cuda_ipc

log = logging.getLogger(__name__)

PROGRAMS = 128
"""Of a kernel. A GPU must run so many at once; those with NVLink have more multiprocessors."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The same in all containers of a machine, and another on each machine."""
KNOWN_SUM_S = 60.0
"""Seconds for a sum of known numbers: the other ranks may still compile its kernel."""


def connect_peers(mesh: Mesh, store: Any, device: torch.device) -> PeerMemory | None:
    """Return memory that all tensor-parallel ranks share; None: their GPUs share none.

    store: of torch.distributed, of these ranks only; all of them call this. Either all have the
    memory afterwards or none, and a sum of known numbers through it was right on each.
    """
    if len(set(_exchange(store, "host", mesh, BOOT_ID.read_bytes()))) > 1:
        log.info("sums over ranks run through NCCL: the ranks are on several hosts")
        return None
    with torch.cuda.device(device):
        own, problem = _allocate(mesh, device)
        offers = _exchange(
            store, "offer", mesh, b"" if own is None else cuda_ipc.export_handle(own)
        )
        peers = None
        if own is not None and all(offers):
            try:
                peers = _open(own, offers, mesh, device)
            except QuireError as error:
                problem = str(error)
        if not all(_exchange(store, "opened", mesh, b"" if peers is None else b"1")):
            log.info("sums over ranks run through NCCL: %s", problem or "a rank opened no memory")
            return None
        assert peers is not None
        if not all(_exchange(store, "summed", mesh, b"1" if _sums_are_right(peers) else b"")):
            log.warning("sums through the GPUs' shared memory are wrong here: NCCL is used instead")
            return None
    return peers


def _allocate(mesh: Mesh, device: torch.device) -> tuple[int | None, str]:
    """Return (address of this rank's area, ""), or (None, why there is none)."""
    if mesh.tp > MAX_RANKS:
        return None, f"{mesh.tp} ranks are more than {MAX_RANKS}"
    found = torch.cuda.get_device_properties(device).multi_processor_count
    if found < PROGRAMS:
        return None, f"{found} multiprocessors are fewer than {PROGRAMS}"
    try:
        return cuda_ipc.allocate(area_bytes(PROGRAMS, mesh.tp)), ""
    except QuireError as error:
        return None, str(error)


def _open(own: int, offers: list[bytes], mesh: Mesh, device: torch.device) -> PeerMemory:
    rank = mesh.tp_rank
    areas = [
        own if other == rank else cuda_ipc.open_handle(handle)
        for other, handle in enumerate(offers)
    ]
    return PeerMemory(
        areas=torch.tensor(areas, dtype=torch.int64, device=device),
        abort=torch.zeros(1, dtype=torch.int32).pin_memory(),
        rank=rank,
        ranks=mesh.tp,
        programs=PROGRAMS,
    )


def _exchange(store: Any, what: str, mesh: Mesh, value: bytes) -> list[bytes]:
    """Return each rank's value. A store takes no empty one."""
    store.set(f"peers/{what}/{mesh.tp_rank}", b"+" + value)
    return [bytes(store.get(f"peers/{what}/{rank}"))[1:] for rank in range(mesh.tp)]


def _sums_are_right(peers: PeerMemory) -> bool:
    for rows, size in ((1, 4096), (300, 1024)):
        x = torch.arange(rows * size, device=peers.areas.device).view(rows, size) % 64
        given = (x + peers.rank).to(torch.bfloat16)
        all_reduce(given, None, peers)
        lazy_fusion.flush()
        if not _ends(peers):
            return False
        want = x * peers.ranks + peers.ranks * (peers.ranks - 1) // 2
        if not torch.equal(given, want.to(torch.bfloat16)):
            return False
    return True


def _ends(peers: PeerMemory) -> bool:
    """Wait for the kernel. False: it was ended, because another rank's did not come to it."""
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + KNOWN_SUM_S
    while not done.query():
        if time.monotonic() > deadline:
            peers.abort.fill_(1)
            done.synchronize()
            return False
        time.sleep(0.001)
    return True
