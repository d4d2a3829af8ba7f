"""Attention's kernels in the interpreter: what the op's cases do not reach."""

import pytest
import torch

from quire.kernels.encoder_attention import _case as encoder_case
from quire.kernels.encoder_attention import encoder_attention
from quire.kernels.framework.op import OPS
from quire.kernels.kv_write import kv_write
from quire.kernels.paged_attention import _case
from tests import tiers
from tests.cpu.attention.test_spans import dense

pytestmark = pytest.mark.sampled(2)

body = pytest.importorskip(
    "quire.kernels.gpu.attention.paged_attention", reason="triton is not installed"
)
cut = pytest.importorskip("quire.kernels.gpu.attention.split_plan")
decode_body = pytest.importorskip("quire.kernels.gpu.attention.paged_attention_decode")
CPU = torch.device("cpu")
REFERENCE = OPS["paged_attention"].reference


def run(case, splits=None, tiles=None, **how):
    """The op's GPU body; splits, tiles: cut otherwise than it would."""
    out = torch.full(case["q"].shape, float("nan"), dtype=case["q"].dtype)
    with pytest.MonkeyPatch.context() as patch:
        if splits is not None:
            cut = body.plan_decode
            patch.setattr(body, "plan_decode", lambda *a: cut(*a)._replace(splits=splits))
        if tiles is not None:
            patch.setattr(body, "plan_prefill_tiles", lambda *_: body.PrefillTiles(*tiles))
        body.launch(out, **case, **how)
    return out


def decoding(contexts, features="decodes", dtype=torch.float32, **more):
    torch.manual_seed(0)
    rows = [(1, c) for c in contexts]
    return _case(CPU, (4, 2, 16, 16), rows, dtype, features=features, **more)


@pytest.mark.parametrize("splits", [1, 2, *tiers.long(7, 32)])
def test_a_context_may_be_split_any_way(splits):
    case = decoding([1, 64, 65, 0, 500, 1000], "decodes rows sinks")
    torch.testing.assert_close(run(case, splits=splits), REFERENCE(**case), atol=1e-5, rtol=1e-5)


def test_a_window_moves_the_first_stretch():
    case = decoding([1, 99, 100, 101, 700], window=100)
    torch.testing.assert_close(run(case, splits=4), REFERENCE(**case), atol=1e-5, rtol=1e-5)


def test_counters_are_left_as_they_were_found():
    case = decoding(tiers.amount([300, 130, 30], [500, 1000, 30]))
    counters = torch.zeros(64, dtype=torch.int32)
    first = run(case, counters=counters)
    assert not counters.any()
    assert torch.equal(run(case, counters=counters), first)


def test_in_float32_a_row_does_not_depend_on_the_others():
    case = decoding(tiers.amount([600, 5, 64, 200], [2300, 5, 64, 900]))
    whole = run(case)
    for s in range(4):
        alone = case | {
            "q": case["q"][s : s + 1],
            "tables": case["tables"][s : s + 1],
            "contexts": case["contexts"][s : s + 1],
            "q_starts": case["q_starts"][:2],
            "decodes": 1,
        }
        assert torch.equal(run(alone), whole[s : s + 1])


UNLIKE = [900, 33, 0, 1, 64, 800]


@pytest.mark.parametrize(
    "features", ["rows sinks", *tiers.long("", "int8_token rows", "alibi fp8")]
)
@pytest.mark.parametrize("contexts", [UNLIKE, *tiers.long([3000], [300] * 5, [0, 0, 5])])
def test_keys_of_long_contexts_are_divided_evenly(monkeypatch, contexts, features):
    monkeypatch.setattr(cut, "sm_count", lambda _: 8)
    case = decoding(contexts, f"decodes balanced {features}", torch.bfloat16)
    counters = torch.zeros(64, dtype=torch.int32)
    got = run(case, counters=counters)
    assert not counters.any()
    torch.testing.assert_close(got, REFERENCE(**case), atol=2e-2, rtol=2e-2)


def test_no_range_is_longer_than_a_share_of_all_keys(monkeypatch):
    """Of 6 programs a head, three times as many for 6 rows; each part has a place of its own."""
    monkeypatch.setattr(cut, "sm_count", lambda _: 4)
    monkeypatch.setattr(cut, "BALANCED_CHUNK", 64)
    case = decoding(UNLIKE, "decodes balanced", torch.bfloat16)
    lengths, parts = [], []
    attend, store = decode_body.attend_range, decode_body.store_or_merge

    def noted(*args):
        lengths.append(int(args[10]) - int(args[9]))
        return attend(*args)

    def stored(*args):
        split, used, first = map(int, args[14:17])
        parts.extend([first + split] * (used > 1))
        return store(*args)

    monkeypatch.setattr(decode_body, "attend_range", noted)
    monkeypatch.setattr(decode_body, "store_or_merge", stored)
    run(case)
    assert len({*parts}) == len(parts) == 2 * (5 + 5)
    assert sorted(lengths) == sorted(2 * [*[192] * 4, 132, 33, 0, 1, 64, *[192] * 4, 32])


def test_in_float32_keys_are_never_divided_evenly():
    case = decoding([600, 5, 64], "decodes balanced")
    assert torch.equal(run(case), run(case | {"balanced": False}))


@pytest.mark.parametrize("splits", [1, *tiers.long(3, 8)])
@pytest.mark.parametrize("features", ["", "rows sinks", *tiers.long("int8_token", "rows fp8")])
def test_shared_leading_keys_are_merged_with_the_rows_own(monkeypatch, features, splits):
    contexts = [70, 49, 33, 300, 12, 1, 64, 130, 90]
    case = decoding(contexts, f"decodes shared {features}")
    planned = body.plan_shared
    monkeypatch.setattr(body, "plan_shared", lambda *a: planned(*a)._replace(chunk=16))
    shared = case["shared"]
    assert shared.lengths.tolist() == [48, 32, 0, 32, 0, 0, 48, 32, 48]
    found = run(case, splits=splits)
    torch.testing.assert_close(found, REFERENCE(**case), atol=1e-5, rtol=1e-5)
    # shared keys are read through the table of the first sequence of a tile
    case["tables"][:, :2][torch.tensor([3, 6])] = -1
    if not features:
        assert torch.equal(run(case, splits=splits), found)


FIRST, SECOND = (32, 16, 4, 1, True), (64, 32, 4, 1, False)


@pytest.mark.parametrize(
    ("tiles", "window"), [(FIRST, 20), (SECOND, None), *tiers.long((FIRST, None), (SECOND, 20))]
)
def test_prompts_and_chunks_in_tiles_of_any_size(tiles, window):
    torch.manual_seed(1)
    rows = [(40, 40), (1, 9), (17, 150), (2, 2), (70, 71), (16, 32)]
    case = _case(CPU, (6, 2, 16, 16), rows, torch.float32, window, features="fresh")
    got = run(case, tiles=body.PrefillTiles(*tiles))
    torch.testing.assert_close(got, REFERENCE(**case), atol=1e-5, rtol=1e-5)


def sharing(features, window=None, softcap=None):
    """A few new tokens behind prefixes of many lengths, none a multiple of anything."""
    torch.manual_seed(6)
    rows = [(1, 70), (5, 300), (17, 240), (3, 3), (2, 129), (20, 430)]
    return _case(
        CPU, (4, 2, 16, 16), rows, torch.bfloat16, window, softcap=softcap, features=features
    )


@pytest.mark.parametrize(
    ("room", "features"),
    [
        (40, "decodes rows sinks fresh"),
        *tiers.long((100, "fresh"), (600, "alibi fp8 decodes")),
    ],
)
def test_programs_may_share_a_prefix(monkeypatch, room, features):
    case = sharing(features, softcap=20.0 if features == "fresh" else None)
    want = REFERENCE(**case)
    shares = []

    def noted(*args):
        shares.append(real(*args))
        return shares[-1]

    real = body.plan_prefill_splits
    monkeypatch.setattr(body, "plan_prefill_splits", noted)
    for module in (body, cut):
        monkeypatch.setattr(module, "MIN_SPLIT_KEYS", 64)
    monkeypatch.setattr(body, "sm_count", lambda _: room)
    counters = torch.zeros(256, dtype=torch.int32)
    got = run(case, counters=counters)
    assert shares[0].splits > 1
    assert not counters.any()
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("features", ["decodes", "fresh decodes alibi"])
def test_the_largest_heads(features):
    torch.manual_seed(5)
    case = _case(CPU, (2, 1, 512, 16), [(1, 33), (5, 40)], torch.bfloat16, features=features)
    torch.testing.assert_close(run(case), REFERENCE(**case), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("size", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("group", [1, 8, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tile_of_prompts_fits_in_shared_memory_or_is_refused(size, group, dtype):
    q = torch.empty(1, group, size, dtype=dtype, device="meta")
    cache = torch.empty(1, 2, 1, 16, size, dtype=dtype, device="meta")
    index = torch.empty(1, 8, dtype=torch.int32, device="meta")
    taken = body.outputs(q, cache, index, index, index, 1.0) is not NotImplemented
    tiles = cut.plan_prefill_tiles(q, 1)
    held = tiles.rows + 2 * tiles.tile_keys * tiles.stages  # queries, keys and values
    assert tiles.rows >= group or not taken
    assert held * size * dtype.itemsize <= 227 << 10 or not taken
    assert taken or (size, group) == (512, 128)


def test_a_prefix_is_shared_by_what_there_is_room_for(monkeypatch):
    q = torch.empty(64, 32, 128, dtype=torch.bfloat16)
    none = cut.AttentionExtras(1.0)

    def shares(tokens, longest, extras=none, of=q):
        return cut.plan_prefill_splits(of, 8, tokens, 3, 128, 132, extras, longest)

    assert shares(32, 200_000).splits == 16
    assert shares(64, 200_000).splits == 8
    assert shares(256, 200_000).splits == 2
    assert not shares(1024, 200_000).may_split
    assert shares(64, 5000).splits == 5000 // cut.MIN_SPLIT_KEYS
    assert not shares(64, 2000).may_split  # the model's contexts are short
    short = shares(64, 200_000, none._replace(max_context=500))
    assert (short.splits, short.may_split) == (1, True)  # this step's are: the same kernel
    assert not shares(64, 200_000, of=q.float()).may_split


def test_a_sequence_gone_bad_does_not_touch_its_neighbours():
    torch.manual_seed(2)
    rows = [(20, 20), (9, 30), (20, 20)]
    case = _case(CPU, (4, 2, 16, 16), rows, torch.float32, features="fresh")
    want = run(case)
    case["k"], case["v"] = case["k"].clone(), case["v"].clone()
    case["k"][20:29], case["v"][20:29] = float("nan"), float("inf")
    got = run(case)
    assert torch.equal(got[:20], want[:20])
    assert torch.equal(got[29:], want[29:])
    assert got[20:29].isnan().all()


@pytest.mark.parametrize("feature", ["int8_token", *tiers.long("fp8_token")])
def test_a_sequence_with_a_spoilt_scale_does_not_touch_its_neighbours(feature):
    torch.manual_seed(2)
    rows = [(1, 40), (1, 33), (9, 30), (20, 20)]
    case = _case(CPU, (4, 2, 16, 16), rows, torch.float32, features=f"{feature} decodes")
    want = run(case)
    for bad in (1, 2):
        case["scales"][case["tables"][bad, 0].long()] = float("nan")
    got = run(case)
    assert torch.equal(got[:1], want[:1])
    assert torch.equal(got[11:], want[11:])
    assert got[1:11].isnan().all()


@pytest.mark.long("259 sequences take 9 s in the interpreter")
def test_more_sequences_than_one_scan_finds():
    torch.manual_seed(3)
    rows = [(1, 1)] * 255 + [(3, 20), (1, 1), (2, 2), (5, 40)]
    case = _case(CPU, (2, 1, 16, 16), rows, torch.float32, features="fresh")
    torch.testing.assert_close(run(case), REFERENCE(**case), atol=1e-5, rtol=1e-5)


def test_an_fp8_cache_reads_back_what_was_written():
    torch.manual_seed(4)
    case = _case(CPU, (4, 2, 16, 16), [(1, 40), (20, 20)], torch.float32, features="decodes")
    tokens = case["q"].shape[0]
    k, v = torch.randn(2, tokens, 2, 16)
    cache = torch.zeros(case["cache"].shape, dtype=torch.float8_e4m3fn)
    slots = case["tables"][0, 2].long() * 16 + 7
    slots = torch.cat([slots[None], case["tables"][1, torch.arange(20) // 16].long() * 16])
    slots[1:] += torch.arange(20) % 16
    OPS["kv_write"].gpu.launch(None, k, v, cache, slots, 0.02, 0.03)
    mine = torch.zeros_like(cache)
    kv_write(k, v, mine, slots, 0.02, 0.03)
    assert torch.equal(cache.float(), mine.float())
    case |= {"cache": cache, "k": k, "v": v, "k_scale": 0.02, "v_scale": 0.03}
    torch.testing.assert_close(run(case), REFERENCE(**case), atol=1e-4, rtol=1e-4)


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize(
    ("features", "dtype"),
    [
        ("bias decodes rows", torch.bfloat16),
        ("bias", torch.float32),
        ("bias fresh decodes alibi", torch.float32),
        *tiers.long(
            ("bias decodes rows", torch.float32),
            ("bias", torch.bfloat16),
            ("bias fresh decodes alibi", torch.bfloat16),
        ),
    ],
)
def test_a_bias_by_distance_is_added_to_scores(features, dtype):
    torch.manual_seed(3)
    case = _case(CPU, (4, 2, 16, 16), [(1, 90), (1, 3), (20, 60), (3, 3)], dtype, features=features)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    got = run(case, splits=2)
    torch.testing.assert_close(got, REFERENCE(**case), atol=tolerance, rtol=tolerance)
    without = REFERENCE(**{**case, "position_bias": None})
    assert not torch.allclose(got.float(), without.float(), atol=0.05)


ENCODER = pytest.importorskip("quire.kernels.gpu.attention.encoder_attention")


def encode(case):
    out = torch.full(case["q"].shape, float("nan"))
    ENCODER.launch(out, **case)
    return out


ENCODED = [
    ((2, 2), {}),
    ((6, 2), {"window": 20, "softcap": 5.0, "alibi": True}),
    ((2, 1), {"window": 50, "key_counts": [40, 0, 20, 33]}),
    *tiers.long(
        ((4, 4), {"reach": 7}),
        ((6, 2), {"reach": 7}),
        ((4, 4), {"window": 20, "softcap": 5.0, "alibi": True}),
        ((4, 4), {"key_counts": [40, 0, 64, 5]}),
        ((6, 2), {"key_counts": [40, 0, 64, 5]}),
    ),
]


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize(("heads", "features"), ENCODED)
def test_encoder_attention_of_packed_sources(heads, features):
    torch.manual_seed(4)
    case = encoder_case(CPU, [70, 1, 64, 33], (*heads, 20), torch.float32, **features)
    torch.testing.assert_close(encode(case), encoder_attention(**case), atol=1e-5, rtol=1e-5)


@pytest.mark.slow("kernels in the interpreter")
def test_encoder_attention_gives_a_text_the_same_bits_alone_and_in_company():
    torch.manual_seed(4)
    case = encoder_case(CPU, [70, 9, 33], (2, 2, 16), torch.float32)
    whole = encode(case)
    case["k"], case["v"] = case["k"].clone(), case["v"].clone()
    case["k"][:70], case["v"][79:] = float("nan"), float("inf")
    assert torch.equal(encode(case)[70:79], whole[70:79])
    alone = {x: case[x][70:79] for x in "qkv"} | {"starts": torch.tensor([0, 9]).int()}
    assert torch.equal(encode({**case, **alone, "longest": 9}), whole[70:79])


@pytest.mark.parametrize("longest", [16, 64, 512])
@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_tiles_of_an_encoder_fit_in_shared_memory(size, longest, dtype):
    q = torch.empty(1, 8, size, dtype=dtype, device="meta")
    tiles = ENCODER.plan_tiles(q, 8, longest)
    held = tiles.rows + 2 * tiles.tile_keys * tiles.stages
    assert held * size * dtype.itemsize <= 227 << 10
    assert tiles.tile_keys == ENCODER.plan_tiles(q, 8, 8192).tile_keys  # it decides the sums


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("window", [None, 7])
def test_a_token_sees_its_span_and_what_is_before(window):
    torch.manual_seed(1)
    rows = [(1, 40), (9, 9), (30, 100)]
    case = _case(CPU, (4, 2, 16, 16), rows, torch.float32, window, features="spans")
    torch.testing.assert_close(run(case).double(), dense(case, window), atol=2e-5, rtol=2e-5)


CHAINS = [33, 34, 35, 0, 128, 129, 130, 131, 132, 7, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("more", ["", "sinks", *tiers.long("fp8", "int8_token")])
@pytest.mark.parametrize("splits", [1, 3])
def test_rows_of_one_sequence_read_its_keys_together(splits, more):
    case = decoding(CHAINS, f"decodes rows drafts {more}")
    counters = torch.zeros(64, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        plan = body.packed.plan_decode
        patch.setattr(body.packed, "plan_decode", lambda *a: plan(*a)._replace(splits=splits))
        got = run(case, counters=counters)
        assert not counters.any()
    torch.testing.assert_close(got, REFERENCE(**case), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 20])
def test_rows_of_one_sequence_have_their_own_windows(window):
    case = decoding(CHAINS, "decodes rows drafts", window=window, softcap=5.0)
    torch.testing.assert_close(run(case), REFERENCE(**case), atol=1e-5, rtol=1e-5)


def test_a_chain_may_be_longer_than_rows_look_back():
    case = decoding(range(3, 83), "decodes rows drafts")
    torch.testing.assert_close(run(case), REFERENCE(**case), atol=1e-5, rtol=1e-5)


def test_rows_of_wide_groups_are_packed_by_four_or_not_at_all():
    pack = body.packed.pack_rows
    assert [pack(group) for group in (1, 2, 3, 4, 7, 8, 16, 17)] == [16, 8, 4, 4, 4, 4, 4, 1]
