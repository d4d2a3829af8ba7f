"""Ranks that choose from strips of the vocabulary: the bits of one rank that has all logits."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire.core.params import SamplingParams
from quire.distributed.mesh import Mesh, strip_size, vocab_range
from quire.sampling.sampler import Sampler
from quire.sampling.slot_join import SlotJoin
from tests import tiers
from tests.cpu.models.harness import Rank, Together
from tests.cpu.sampling.cases import filled, sequence

VOCAB = 2100
PLAIN = [{"temperature": 0}, {}, {"temperature": 0.3}, {"temperature": 1.7}, {"temperature": 0}]
FILTERED = {"top_p": 0.4, "temperature": 0.8}
ROWS = 60


class CountingRank(Rank):
    """Remembers the widest thing that it gathered."""

    widest = 0

    def all_gather(self, x, total, size=None):
        self.widest = max(self.widest, total)
        return super().all_gather(x, total, size)


def on_ranks(size, logits, sequences, positions, **options):
    """What each rank samples from its strip, and the widest tensor that it gathered."""
    together = Together(size)

    def rank_main(rank):
        try:
            mesh, comm = Mesh(tp=size, rank=rank), CountingRank(together, rank)
            sampler = Sampler(VOCAB, len(sequences), comm=comm, mesh=mesh, **options)
            for slot, seq in enumerate(sequences):
                sampler.join(SlotJoin.from_sequence(seq, slot))
            mine = vocab_range(VOCAB, mesh)
            strip = logits[:, mine.start : mine.stop].clone()
            return sampler.sample(strip, tuple(range(len(sequences))), positions), comm.widest
        except Exception:
            together.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [one.result() for one in [pool.submit(rank_main, rank) for rank in range(size)]]


def rows_of(kinds):
    params = [SamplingParams(**kinds[i % len(kinds)]) for i in range(ROWS)]
    return [sequence(one, name=str(i), seed=100 + i) for i, one in enumerate(params)]


@pytest.mark.parametrize("size", [3, *tiers.long(2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ids_and_best_logits_are_those_of_all_logits(size, dtype):
    torch.manual_seed(size)
    logits = (3 * torch.randn(ROWS, VOCAB)).to(dtype)
    for row in range(0, ROWS, 5):  # greedy ones: equal best logits in several strips
        logits[row, [1700, 700 + row, 9 + row, 2099]] = 40.0
    logits[1, :] = -torch.inf
    logits[2, 1800], logits[5, 1] = torch.nan, torch.nan
    logits[6, : VOCAB - 10] = -torch.inf
    sequences, positions = rows_of(PLAIN), [i % 7 for i in range(ROWS)]
    want = filled(VOCAB, sequences).sample(logits.clone(), range(ROWS), positions)
    for got, widest in on_ranks(size, logits, sequences, positions):
        good = want.top_logits.isfinite()
        assert good.sum() == ROWS - 3
        assert torch.equal(got.token_ids[good], want.token_ids[good])
        torch.testing.assert_close(got.top_logits, want.top_logits, rtol=0, atol=0, equal_nan=True)
        assert widest < VOCAB // 100, "logits were gathered"


@pytest.mark.parametrize(
    "other", [FILTERED, {"logprobs": 2}, {"presence_penalty": 1.0}, {"logit_bias": {5: 9.0}}]
)
def test_a_row_that_needs_all_logits_changes_no_other(other):
    torch.manual_seed(1)
    logits = 3 * torch.randn(ROWS, VOCAB)
    sequences, positions = rows_of([*PLAIN, other]), [3] * ROWS
    want = filled(VOCAB, sequences).sample(logits.clone(), range(ROWS), positions)
    alone = rows_of([*PLAIN, {}])
    for (got, widest), (plain, _) in zip(
        on_ranks(2, logits, sequences, positions), on_ranks(2, logits, alone, positions)
    ):
        assert widest == VOCAB
        assert torch.equal(got.token_ids, want.token_ids)
        same = [row for row in range(ROWS) if row % 6 < 5]
        assert torch.equal(got.token_ids[same], plain.token_ids[same])
        assert str(got.logprobs()) == str(want.logprobs())


def test_strips_are_of_whole_chunks_where_every_rank_has_some():
    assert [strip_size(V, n) for V, n in [(151_936, 2), (32_000, 8), (128_256, 4)]] == [
        76_288,
        4096,
        32_256,
    ]
    assert strip_size(300, 2) == 150, "too few for chunks"
    assert strip_size(151_936, 1) == 151_936
    sampler = Sampler(300, 1, comm=Rank(Together(2), 0), mesh=Mesh(tp=2))
    assert sampler.strips is None
