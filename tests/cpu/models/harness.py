"""Sequences over a paged cache, without an engine: enough to step a built model anywhere.

Blocks are handed out in a shuffled order; those that a window has passed are given back and
poisoned, so a model that reads them shows NaN.
"""

import itertools
import threading

import torch

from quire.attention import mla, paged
from quire.attention.base import AttentionMetadata
from quire.config.memory.kv_layout import group_layers
from quire.kernels.framework import lazy_fusion
from quire.layers import Attention
from quire.layers.recurrent import RecurrentLayer
from quire.models.base import StepInputs
from quire.runner.state_tensors import StateTensors

BLOCK = 16
NO_BLOCK = -1


class Stepper:
    """Feeds tokens to a model, any number at a time, and keeps the cache of its sequences."""

    def __init__(
        self,
        model,
        config,
        *,
        dtype=torch.float32,
        max_tokens=700,
        seed=0,
        device="cpu",
        layers=None,
        sequences=1,
    ):
        self.model, self.lengths, self.device = model, [0] * sequences, device
        layers = config.attention_layers() if layers is None else layers
        self.groups = group_layers(layers)
        width = -(-max_tokens // BLOCK)
        pool = width * len(self.groups) * sequences
        own = [module for module in model.modules() if isinstance(module, Attention)]
        places = [own[i] for i in max((group.layers for group in self.groups), key=len, default=())]
        shapes = [(pool, layers[0].planes, one.kv_heads, BLOCK, one.head_dim) for one in places]
        self.cache = [
            torch.full(shape, float("nan"), dtype=dtype, device=device) for shape in shapes
        ]
        order = torch.randperm(pool, generator=torch.Generator().manual_seed(seed))
        self.tables = order.view(len(self.groups), sequences, width).int()
        self.backend = (mla if layers and layers[0].latent else paged).Backend(self.cache)
        self.states = None
        recurrent = [one for one in model.modules() if isinstance(one, RecurrentLayer)]
        if recurrent:
            states = [one.of_rank(recurrent[0].mesh.tp) for one in config.states]
            self.states = StateTensors(states, sequences, 0, dtype, torch.device(device))

    def hidden(self, ids):
        """Hidden states [n, E] of the next n tokens of the only sequence."""
        return self.hidden_of([(0, ids)])

    @torch.inference_mode()
    def hidden_of(self, pieces):
        """Hidden states [T, E] of the next tokens of some sequences, in one step.

        pieces: (sequence, ids); those of one token come first.
        """
        rows, lens = [row for row, _ in pieces], [len(ids) for _, ids in pieces]
        starts = [self.lengths[row] for row in rows]
        for row, start in zip(rows, starts):
            self._give_back(row, start)
        ends = [start + count for start, count in zip(starts, lens)]
        positions = [torch.arange(start, end) for start, end in zip(starts, ends)]
        batch = AttentionMetadata(
            q_starts=self._there([0, *itertools.accumulate(lens)]),
            contexts=self._there(ends),
            tables=tuple(table[rows].clone().to(self.device) for table in self.tables),
            slots=tuple(
                torch.cat([_slots(table[row], at) for row, at in zip(rows, positions)]).to(
                    self.device
                )
                for table in self.tables
            ),
            max_query=max(lens),
            max_context=max(ends),
            decodes=sum(1 for _ in itertools.takewhile(lambda n: n == 1, lens)),
            past=max(starts),
        )
        for row, end in zip(rows, ends):
            self.lengths[row] = end
        ids = self._there([token for _, ids in pieces for token in ids])
        positions = torch.cat(positions).int().to(self.device)
        states = self._state_step(rows, batch)
        hidden = self.model(StepInputs(ids, positions, self.backend.plan(batch), states=states))
        lazy_fusion.flush()
        return hidden

    def logits(self, ids):
        """Logits [n, V] of the next n tokens of the only sequence."""
        return self.logits_of([(0, ids)])

    @torch.inference_mode()
    def logits_of(self, pieces):
        """Logits [T, V] of the next tokens of some sequences, in one step."""
        logits = self.model.logits(self.hidden_of(pieces))
        lazy_fusion.flush()
        return logits.float().cpu()

    def greedy(self, prompt, count):
        """The `count` best next tokens, one at a time."""
        logits, out = self.logits(prompt), []
        for _ in range(count):
            out.append(int(logits[-1].argmax()))
            logits = self.logits(out[-1:])
        return out

    def _state_step(self, rows, batch):
        if self.states is None:
            return None
        starts = batch.q_starts.tolist()[batch.decodes :]
        self.states._spans = tuple(itertools.pairwise(starts))
        return self.states.step_of(self.states.rows_of(self._there(rows)), batch.decodes)

    def _there(self, ints):
        return torch.tensor(ints, dtype=torch.int32, device=self.device)

    def _give_back(self, row, start):
        """Blocks wholly before the window of a sequence's token at `start` are gone."""
        for group, table in zip(self.groups, self.tables, strict=True):
            gone = max(0, start - group.window + 1) // BLOCK if group.window else 0
            for at in range(gone):
                if int(table[row, at]) != NO_BLOCK:
                    table[row, at] = NO_BLOCK


def _slots(table, positions):
    """Places in the cache [n] of the tokens at these positions of a sequence."""
    return table[positions // BLOCK].long() * BLOCK + positions % BLOCK


class Together:
    """Collectives among threads: ranks meet at a barrier and read one another's tensor."""

    def __init__(self, size):
        self._barrier = threading.Barrier(size, timeout=120)
        self._given = [None] * size

    def of(self, rank):
        return Rank(self, rank)

    def abort(self):
        """Have all ranks fail: one has."""
        self._barrier.abort()

    def exchange(self, rank, x):
        self._given[rank] = x
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


class Rank:
    def __init__(self, together, rank):
        self._together, self._rank = together, rank

    def all_reduce(self, x):
        return sum(self._together.exchange(self._rank, x))

    def all_gather(self, x, total, size=None):
        return torch.cat(self._together.exchange(self._rank, x), -1)

    def broadcast(self, x):
        return x.copy_(self._together.exchange(self._rank, x.clone())[0])

    def all_to_all(self, pieces, sizes):
        found = [one[self._rank] for one in self._together.exchange(self._rank, pieces)]
        assert [len(one) for one in found] == sizes
        return found
