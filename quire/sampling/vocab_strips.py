"""Strips of the vocabulary: ranks choose tokens from their own logits, and exchange a few numbers.

    greatest logit    each rank's best one and its id                        16 bytes a row
    draw              the sums of its chunks of weights, then the id         a byte per token

A draw has the same bits as one from all logits (quire.sampling.numpy_ops): sums are of the same
chunks, and strips consist of whole chunks. So it does not matter whether another row of the batch
needs all logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.distributed.collectives import Collectives
from quire.distributed.mesh import STRIP_GRAIN, Mesh, strip_size, vocab_range
from quire.sampling import numpy_ops
from quire.sampling.numpy_ops import CHUNK
from quire.sampling.row_ops import ScratchBuffers, argmax_rows
from quire.sampling.top_k_top_p_batch import TopKTopPBatch

assert STRIP_GRAIN % CHUNK == 0


class VocabStrips:
    """This rank's strip, and the exchange with the other ranks."""

    def __init__(self, mesh: Mesh, comm: Collectives, vocab: int, max_rows: int) -> None:
        self._mesh, self._comm, self._vocab = mesh, comm, vocab
        self._size = strip_size(vocab, mesh.tp)
        self._start = vocab_range(vocab, mesh).start
        self._scratch = ScratchBuffers(len(vocab_range(vocab, mesh)), max_rows)

    @staticmethod
    def exist(mesh: Mesh, vocab: int) -> bool:
        """Whether strips of this vocabulary are of whole chunks; small ones are not."""
        return mesh.tp > 1 and strip_size(vocab, mesh.tp) % STRIP_GRAIN == 0

    def gather(self, strip: Tensor) -> Tensor:
        """All logits [R, V] of strips [R, v]."""
        return self._comm.all_gather(strip, self._vocab, self._size)

    def argmax(self, strip: Tensor) -> tuple[Tensor, Tensor]:
        """As quire.sampling.row_ops.argmax_rows, of all logits."""
        ids, tops = argmax_rows(strip, self._scratch)
        found = self._exchange(torch.stack((tops.double(), (ids + self._start).double()), 1))
        best = torch.from_numpy(found[..., 0].numpy().argmax(1))[:, None]  # NaN first, then the
        return (  # lowest rank, which has the lowest ids
            found[..., 1].gather(1, best)[:, 0].long(),
            found[..., 0].gather(1, best)[:, 0].float(),
        )

    def draw(self, strip: Tensor, tops: Tensor, cuts: TopKTopPBatch, shares: Tensor) -> Tensor:
        """A token for each row of `cuts`, which is unfiltered. tops: [R], of all logits."""
        rows = torch.tensor(cuts.row_indices)
        tops, temperatures = tops[rows, None], cuts.temperature[:, None]
        sums = []
        for block in self._scratch.blocks(len(rows)):
            buffer = self._scratch.buffer(0, block.stop - block.start)
            weights = buffer[:, : self._scratch.vocab]
            torch.sub(strip[rows[block]], tops[block], out=weights)
            if cuts.has_temperature:
                weights.div_(temperatures[block])
            numpy_ops.exp_(weights)
            sums.append(buffer.view(len(buffer), -1, CHUNK).sum(-1))
        own = torch.cat(sums)
        chunks = self._size // CHUNK
        every = self._comm.all_gather(own, self._mesh.tp * chunks, chunks)
        first = self._start // CHUNK
        ids = torch.zeros(len(rows), 1, dtype=torch.int64)
        places = numpy_ops.find_chunks(every.numpy(), shares.tolist())
        for i, (chunk, rest) in enumerate(places):
            if first <= chunk < first + own.shape[1] and rest >= 0:
                start = (chunk - first) * CHUNK
                line = strip[rows[i], start : start + CHUNK].float() - tops[i]
                if cuts.has_temperature:
                    line.div_(temperatures[i])
                at = numpy_ops.find_column(np.exp(line.numpy()), rest)
                ids[i] = chunk * CHUNK + at
        drawn: Tensor = self._exchange(ids).amax(1)[:, 0]
        return drawn

    def _exchange(self, values: Tensor) -> Tensor:
        """Every rank's values [n, k]: [n, ranks, k]."""
        found = self._comm.all_gather(values, self._mesh.tp * values.shape[1], values.shape[1])
        return found.view(len(values), self._mesh.tp, -1)
