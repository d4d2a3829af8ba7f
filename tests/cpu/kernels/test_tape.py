"""Recording native ops and replaying them."""

import itertools
import threading

import pytest
import torch

from quire.attention.base import AttentionMetadata
from quire.attention.paged import Backend
from quire.kernels.act import act_mul
from quire.kernels.add import add
from quire.kernels.embedding import embedding
from quire.kernels.formats.parts_weight import PartsWeight
from quire.kernels.grouped_linear import pack as pack_codes
from quire.kernels.grouped_linear import random_codes
from quire.kernels.linear import linear, pack
from quire.kernels.native import library
from quire.kernels.native.op_tape import Arena, NotRecordableError, TapeRecorder, on_replay
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rope import rope

pytestmark = pytest.mark.usefixtures("seeded", "native", "inference")
F64 = torch.float64
H, K, D, E, V, B = 4, 2, 32, 64, 70, 16


@pytest.fixture(params=[True, False], ids=["inference_mode", "no_grad"])
def inference(request):
    """Composite ops reach the watch whole in the one mode, in parts in the other."""
    with torch.inference_mode() if request.param else torch.no_grad():
        yield


class Layer:
    scale, window, softcap, group, place = D**-0.5, None, None, 0, 0
    sinks, alibi, position_bias, k_scale, v_scale = None, None, None, 1.0, 1.0
    head_scales = None
    spans = True


class Tiny:
    """One layer of a model on the ops, over static buffers, as a runner has them."""

    def __init__(self, rows, dtype=torch.bfloat16):
        def weight(o, i):
            return pack((torch.randn(o, i) / i**0.5).to(dtype))

        self.embed, self.qkv = weight(V, E), weight((H + 2 * K) * D, E)
        self.out, self.up, self.down = weight(E, H * D), weight(192, E), weight(E, 96)
        self.norm, self.head_norm = torch.ones(E, dtype=dtype), torch.ones(D, dtype=dtype)
        angles = torch.outer(torch.arange(200.0), 0.5 ** torch.arange(D // 2))
        self.table = torch.cat([angles.cos(), angles.sin()], -1)
        self.cache = [torch.randn(rows * 8, 2, K, B, D).to(dtype)]
        self.ids = torch.zeros(rows, dtype=torch.int32)
        self.positions = torch.zeros(rows, dtype=torch.int32)
        self.contexts = torch.zeros(rows, dtype=torch.int32)
        self.slots = torch.full((rows,), -1)
        self.tables = torch.arange(rows * 8, dtype=torch.int32).view(rows, 8)
        starts = torch.arange(rows + 1, dtype=torch.int32)
        batch = AttentionMetadata(starts, self.contexts, (self.tables,), (self.slots,), 1, 128)
        self.step = Backend(self.cache).plan(batch)

    def fill(self, position):
        """Every row decodes one token at this position."""
        rows = len(self.ids)
        self.ids.copy_(torch.randint(0, V, (rows,)))
        self.positions.fill_(position)
        self.contexts.fill_(position + 1)
        self.slots.copy_(self.tables[:, position // B].long() * B + position % B)

    def forward(self):
        return self.run(self.ids, self.positions, self.step)

    def forward_of(self, sizes):
        """The first tokens, in so many sequences."""
        tokens, rows = sizes
        batch = self.step.metadata
        own = AttentionMetadata(
            batch.q_starts[: rows + 1], batch.contexts[:rows], (self.tables[:rows],),
            (self.slots[:tokens],), 1, 128,
        )  # fmt: skip
        return self.run(self.ids[:tokens], self.positions[:tokens], Backend(self.cache).plan(own))

    def run(self, ids, positions, step):
        x, res = embedding(ids, self.embed), None
        x, res = rms_norm(x, self.norm, 1e-6, res)
        q, k, v = linear(x, self.qkv).view(-1, H + 2 * K, D).split([H, K, K], 1)
        q, k = rms_norm(q, self.head_norm, 1e-6)[0], rms_norm(k, self.head_norm, 1e-6)[0]
        q, k = rope(q, k, positions, self.table)
        x = linear(step.run(q, k, v, Layer).flatten(1), self.out)
        x, res = rms_norm(x, self.norm, 1e-6, res)
        x = linear(act_mul(linear(x, self.up), "silu"), self.down)
        return linear(add(x, res), self.embed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_replay_equals_the_eager_run_bit_for_bit(rows, dtype):
    model = Tiny(rows, dtype)
    model.fill(0)
    tape = TapeRecorder().record(model.forward)
    assert tape.num_ops == 15
    for position in range(1, 100, 7):
        model.fill(position)
        before = model.cache[0].clone()
        got = tape.replay().clone()
        written = model.cache[0].clone()
        model.cache[0].copy_(before)
        assert torch.equal(got, model.forward())
        assert torch.equal(written, model.cache[0])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_of_parts_in_other_formats_is_recorded(rows):
    codes = [next(random_codes(32, E, bits, 32, torch.device("cpu"))) for bits in (4, 6)]
    weight = PartsWeight(tuple(pack_codes(one, torch.bfloat16) for one in codes), (32, 32))
    x = torch.randn(rows, E).bfloat16()
    tape = TapeRecorder().record(lambda: weight.product(x))
    x.copy_(torch.randn(rows, E))
    got = tape.replay().clone()
    assert torch.equal(got, torch.cat([one.product(x) for one in weight.parts], 1))


def test_recording_runs_no_op():
    model = Tiny(2)
    model.fill(0)
    before = model.cache[0].clone()
    tape = TapeRecorder().record(model.forward)
    assert torch.equal(model.cache[0], before)
    assert torch.equal(tape.replay().clone(), model.forward())
    assert not torch.equal(model.cache[0], before)


def test_tapes_of_one_recorder_share_their_memory():
    model, recorder = Tiny(32), TapeRecorder()
    model.fill(0)
    recorder.record(model.forward)
    bytes_of_one = recorder.arena.reserved_bytes
    for _ in range(5):
        recorder.record(model.forward)
    assert recorder.arena.reserved_bytes == bytes_of_one
    assert recorder.arena.allocated_bytes == 0


def test_functions_run_in_their_place_and_read_views():
    x = torch.randn(4, 8)

    def run():
        y = add(x, x)
        left = on_replay(lambda half: half * 3, y[:, :4], shape=(4, 4))
        return add(left, left), on_replay(lambda y: y[:, 0].double(), y, shape=(4,), dtype=F64)

    recorder = TapeRecorder()
    tape = recorder.record(run)
    for _ in range(3):
        x.normal_()
        six, first = tape.replay()
        assert torch.equal(six, 12 * x[:, :4])
        assert torch.equal(first, 2 * x[:, 0].double())
    assert torch.equal(on_replay(torch.neg, x), -x), "nothing is recorded"


def test_what_a_function_reads_is_not_held():
    x, recorder = torch.randn(64, 64), TapeRecorder()

    def layers(count):
        y = x
        for _ in range(count):
            y = add(on_replay(torch.neg, y), x)
        return y

    tape = recorder.record(lambda: layers(30))
    assert recorder.arena.allocated_bytes <= 3 * x.nbytes
    assert torch.equal(tape.replay().clone(), layers(30))


def test_a_torch_op_that_computes_makes_recording_refuse_and_name_it():
    model, recorder = Tiny(2), TapeRecorder()
    model.fill(0)
    with pytest.raises(NotRecordableError, match=r"aten\.mul"):
        recorder.record(lambda: model.forward() * 2)
    assert library.active_recording is None
    assert recorder.arena.allocated_bytes == 0
    recorder.record(model.forward)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.clone(),
        lambda x: x.contiguous() if not x.is_contiguous() else x[:, ::2].contiguous(),
        lambda x: torch.zeros(3),
        lambda x: x.float(),
        lambda x: x.add_(1),
        lambda x: x.sum().item(),
        lambda x: torch.cat([x, x]),
        lambda x: torch.empty(3),
    ],
)
def test_every_kind_of_computing_op_is_refused(op):
    x = torch.randn(4, 6).bfloat16()
    with pytest.raises(NotRecordableError, match="aten"):
        TapeRecorder().record(lambda: op(x))


def test_an_op_that_falls_back_to_its_reference_is_refused():
    x = torch.randn(4, 6, dtype=torch.float16)
    with pytest.raises(NotRecordableError):
        TapeRecorder().record(lambda: add(x, x))


def test_views_are_recordable():
    x = torch.randn(4, 8)

    def views():
        a, b = x.view(4, 2, 4).unbind(1)
        return add(x.t().t(), x.reshape(4, 8)), a[:, None].squeeze(1), b.split(2, -1)

    assert torch.equal(TapeRecorder().record(views).replay()[0], x + x)


def test_a_view_keeps_its_block_and_the_end_of_the_last_view_frees_it():
    arena = Arena()
    base = arena.empty((4, 8), torch.float32)
    part = base.view(2, 16)[1]
    del base
    assert arena.allocated_bytes == 128
    other = arena.empty((4, 8), torch.float32)
    assert other.data_ptr() + 128 <= part.data_ptr() or other.data_ptr() > part.data_ptr()
    del part
    assert arena.allocated_bytes == 128
    del other
    assert arena.allocated_bytes == 0
    assert len(arena._free_spans) == 1


def test_blocks_of_an_arena_never_overlap():
    arena, live = Arena(), []
    generator = torch.Generator().manual_seed(0)
    for step in range(400):
        size = int(torch.randint(1, 400_000, (1,), generator=generator))
        live.append((torch.full_like(arena.empty((size,), torch.uint8), 0), size))
        live[-1] = (arena.empty((size,), torch.uint8), size)
        if step % 3:
            del live[int(torch.randint(0, len(live), (1,), generator=generator))]
    spans = sorted((t.data_ptr(), t.data_ptr() + n) for t, n in live)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    live.clear()
    assert arena.allocated_bytes == 0
    assert sum(size for _, size in arena._free_spans) >= arena.reserved_bytes - 128 * len(
        arena._chunks
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sized_tape_equals_the_eager_run_at_each_size(dtype):
    model, recorder = Tiny(40, dtype), TapeRecorder()
    before = model.cache[0].clone()
    tape = recorder.record_sized(model.forward_of, (40, 9))
    assert torch.equal(model.cache[0], before), "recording runs no op"
    assert 0 <= recorder.arena.allocated_bytes - tape._result.nbytes < 64
    for sizes in (1, 1), (40, 9), (2, 2), (7, 3), (33, 1), (39, 8), (5, 5):
        tokens, rows = sizes
        model.fill(3 * tokens)
        starts = torch.linspace(0, tokens, rows + 1).int()
        model.step.metadata.q_starts[: rows + 1] = starts
        model.contexts[:rows] = starts.diff() + 2
        got = tape.replay(sizes)[:tokens].clone()
        written = model.cache[0].clone()
        model.cache[0].copy_(before)
        assert torch.equal(got, model.forward_of(sizes))
        assert torch.equal(written, model.cache[0])
        model.cache[0].copy_(before)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: add(x, x) if len(x) < 3 else add(add(x, x), x), "ops of a step differ"),
        (lambda x: add(x[len(x) // 3 :], x[: len(x) - len(x) // 3]), "no multiple"),
        (lambda x: add(x[:1], x[:1]) if len(x) > 9 else add(x, x), "results of a step differ"),
        (lambda x: on_replay(torch.neg, add(x, x)), "has one size"),
        (lambda x: add(x, x) * 2, r"aten\.mul"),
    ],
)
def test_a_sized_recording_refuses_what_is_not_linear_in_its_size(function, why):
    x, recorder = torch.randn(20, 8), TapeRecorder()
    with pytest.raises(NotRecordableError, match=why):
        recorder.record_sized(lambda sizes: function(x[: sizes[0]]), (20,))
    assert library.active_recording is None
    assert recorder.arena.allocated_bytes == 0


def test_another_thread_is_not_recorded():
    x, got = torch.randn(4, 6), []

    def function():
        thread = threading.Thread(target=lambda: got.append(add(x, x)))
        thread.start()
        thread.join()
        return add(x, x)

    assert TapeRecorder().record(function).num_ops == 1
    assert torch.equal(got[0], x + x)
