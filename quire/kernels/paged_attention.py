"""Paged attention: causal attention of the last tokens of sequences over their cached keys, values.

    sequence s owns query rows [q_starts[s], q_starts[s+1]): the LAST of its contexts[s] tokens
    the token at position p is in block tables[s, p // B], at offset p % B
    position p sees positions [0, p], with a window w only (p - w, p]; and those of its span

One contract for decoding (one row a sequence), chunks of prompts and prefix hits. No step gathers
a whole context: work is done by tiles of queries and chunks of keys, so memory is linear.

    score = bend(q . k * scale) - slope * |key's position - query's position| + bias
    bend    softcap * tanh(x / softcap), or nothing;  slope: ALiBi, one per head, or nothing
    bias    of a head, by the distance of the key, cut at +-R: [H, 2 R + 1]; added to the score
    sink    a logit per head that joins the softmax's denominator and has no value

Axes: T query tokens, S sequences, H query heads, K kv heads, D head size, N blocks, B block size,
W width of the block table, M rows of the block table (S, unless `rows` picks them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.kernels.formats.kv_cache import (
    CODE_LIMITS,
    allocate_blocks,
    encode,
    encode_per_token,
    has_dense_heads,
    head_step,
)
from quire.kernels.formats.shared_prefixes import SharedPrefixes
from quire.kernels.framework.op import op
from quire.kernels.kv_write import CODES, scale_args
from quire.kernels.native.library import ATTENTION, DTYPES, NativeOp, empty

_TILE = 256  # query rows of one sequence the reference scores at a time


def _case(
    device: torch.device,
    shape: tuple[int, int, int, int],
    rows: list[tuple[int, int]],
    dtype: torch.dtype,
    window: int | None = None,
    softcap: float | None = None,
    *,
    features: str = "",
) -> dict[str, Any]:
    """rows: (queries, context) of each sequence. Blocks before a window are given back (-1).

    features: words out of sinks, alibi, bias, rows, spans, fresh, decodes (single queries first),
    drafts (contexts that grow by one are of one sequence), balanced, shared (of those that decode,
    sequences in turn begin with the same three, or two, blocks);
    of a cache of 8 bits fp8, e5m2 and int8 (scales of the layer), int8_head, int8_token, fp8_token.
    """
    heads, kv_heads, size, block = shape
    queries = [q for q, _ in rows]
    width = max(-(-c // block) for _, c in rows) + 1
    pool = sum(-(-c // block) for _, c in rows) + 3
    free = torch.randperm(pool)
    tables = torch.full((len(rows), width), -1, dtype=torch.int32)
    at = 0
    for s, (q, c) in enumerate(rows):
        used = -(-c // block)
        tables[s, :used] = free[at : at + used].int()
        at += used
        if window is not None and not {"drafts", "shared"} & {*features.split()}:
            tables[s, : max(0, c - q - window + 1) // block] = -1  # blocks of this row alone
    qkv = torch.randn(sum(queries), heads + 2, size, device=device).to(dtype)
    cache = torch.randn(pool, 2, kv_heads, block, size, device=device).to(dtype)
    for s, (_, c) in enumerate(rows):  # slots without a token may hold any number
        if c % block:
            cache[tables[s, c // block], :, :, c % block :] = float("nan")
    case = {
        "q": qkv[:, :heads],
        "cache": cache,
        "tables": tables.to(device),
        "q_starts": torch.tensor([0, *queries]).cumsum(0).int().to(device),
        "contexts": torch.tensor([c for _, c in rows], dtype=torch.int32, device=device),
        "scale": size**-0.5,
        "window": window,
        "softcap": softcap,
    }
    return _with(case, features.split(), rows)


def _with(case: dict[str, Any], features: list[str], rows: list[tuple[int, int]]) -> dict[str, Any]:
    q, cache, tables = case["q"], case["cache"], case["tables"]
    heads, kv_heads, sequences = q.shape[1], cache.shape[2], len(rows)
    if "sinks" in features:
        case["sinks"] = torch.randn(heads, device=q.device)
    if "alibi" in features:
        case["alibi"] = 0.5 ** torch.arange(1, heads + 1, device=q.device).float()
    if "bias" in features:
        case["position_bias"] = torch.randn(heads, 2 * 20 + 1, device=q.device)
    if "spans" in features:
        case["spans"] = _spans(rows).to(q.device)
    if "decodes" in features:
        case["decodes"] = next((s for s, (n, _) in enumerate(rows) if n > 1), sequences)
    if "shared" in features:
        case["shared"] = _share(tables, [c for _, c in rows[: case["decodes"]]], cache.shape[3])
    for feature in features:
        if feature in _CODED:
            case |= _coded(cache, *_CODED[feature])
    if "balanced" in features:
        case["balanced"] = True
    if "rows" in features:
        order = torch.randperm(sequences + 2, device=q.device)[:sequences]
        shuffled = torch.full((sequences + 2, tables.shape[1]), -1, dtype=torch.int32)
        shuffled = shuffled.to(q.device)
        shuffled[order] = tables
        case |= {"tables": shuffled, "rows": order.int()}
    if "drafts" in features:
        case["drafts"] = True
        for s in reversed(range(sequences - 1)):  # rows of one sequence have the table of its last
            if rows[s + 1][1] == rows[s][1] + 1:
                case["rows"][s] = case["rows"][s + 1]
    if "fresh" in features:
        case |= _new_tokens(case, kv_heads, rows)
    return case


def _share(tables: Tensor, contexts: list[int], block: int) -> SharedPrefixes:
    """Give sequences the same leading blocks: one group of three blocks, one of two, tiles of two
    sequences, and one tile that is not used."""
    lengths = [0] * len(contexts)
    members: list[int] = []
    tiles: list[tuple[int, int, int]] = []
    for blocks, want in ((3, range(0, len(contexts), 2)), (2, range(1, len(contexts), 2))):
        group = [s for s in want if contexts[s] > blocks * block]
        for at in range(0, len(group), 2):
            tile = group[at : at + 2]
            tiles.append((len(members), len(tile), blocks * block))
            members += tile
        for s in group:
            tables[s, :blocks] = tables[group[0], :blocks]
            lengths[s] = blocks * block
    members += [0] * (len(contexts) - len(members))
    made = [torch.tensor(x, dtype=torch.int32, device=tables.device) for x in (lengths, members)]
    ends = torch.tensor([*tiles, (0, 0, 0)], dtype=torch.int32, device=tables.device)
    return SharedPrefixes(made[0], made[1], ends, 2)


def _spans(rows: list[tuple[int, int]]) -> Tensor:
    """Of each prompt the middle third of its new tokens, which may be none."""
    found = torch.zeros(sum(n for n, _ in rows), 2, dtype=torch.int32)
    token = 0
    for n, context in rows:
        low, high = n // 3, n - n // 3
        if n > 1:
            found[token + low : token + high, 0] = context - n + low
            found[token + low : token + high, 1] = context - n + high
        token += n
    return found


_CODED = {
    "fp8": (torch.float8_e4m3fn, "layer"),
    "e5m2": (torch.float8_e5m2, "layer"),
    "int8": (torch.int8, "layer"),
    "int8_head": (torch.int8, "head"),
    "int8_token": (torch.int8, "token"),
    "fp8_token": (torch.float8_e4m3fn, "token"),
}


def _coded(cache: Tensor, dtype: torch.dtype, kind: str) -> dict[str, Any]:
    """The cache in codes, with its scales."""
    if kind == "layer":
        k_scale, v_scale = (0.5, 2.0) if dtype != torch.int8 else (0.03, 0.02)
        planes = [encode(cache[:, 0], k_scale, dtype), encode(cache[:, 1], v_scale, dtype)]
        return {"cache": torch.stack(planes, 1), "k_scale": k_scale, "v_scale": v_scale}
    if kind == "head":
        heads = 0.02 + torch.rand(2, cache.shape[2], device=cache.device) / 50
        codes = encode(cache, heads[None, :, :, None, None], dtype)
        return {"cache": codes, "scales": heads[None, :, :, None].expand(cache.shape[:4])}
    codes, scales = allocate_blocks(cache.shape, dtype, cache.device)
    made, measured = encode_per_token(cache.flatten(0, 3)[:, None], dtype)
    codes.copy_(made.view(cache.shape))
    scales.copy_(measured.view(scales.shape))
    return {"cache": codes, "scales": scales}


def _new_tokens(
    case: dict[str, Any], kv_heads: int, rows: list[tuple[int, int]]
) -> dict[str, Tensor]:
    """k and v of the step's own tokens, as views of one tensor, as they are in the cache."""
    cache, tables = case["cache"], case["tables"].long()
    parts = []
    for s, (n, context) in enumerate(rows):
        row = s if case.get("rows") is None else case["rows"][s]
        at = torch.arange(context - n, context, device=cache.device)
        size = cache.shape[3]
        parts.append(cache[tables[row][at // size], :, :, at % size])  # [n, 2, K, D]
    both = torch.cat(parts).flatten(1, 2).to(case["q"].dtype)
    return {"k": both[:, :kv_heads], "v": both[:, kv_heads:]}


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    mixed = [(1, 33), (7, 7), (1, 1), (5, 70), (40, 150)]
    yield _case(device, (4, 2, 64, 16), mixed, fp32)
    yield _case(device, (4, 2, 64, 16), mixed, bf16)
    yield _case(device, (4, 4, 16, 8), mixed, fp32)
    yield _case(device, (8, 1, 128, 16), mixed, bf16)
    yield _case(device, (4, 1, 80, 16), mixed, bf16)
    yield _case(device, (2, 2, 256, 16), mixed, bf16)
    yield _case(device, (2, 1, 20, 4), mixed, fp32)
    yield _case(device, (4, 2, 512, 16), [(1, 33), (5, 20), (40, 70)], bf16)
    yield _case(device, (6, 2, 32, 1), mixed, bf16)
    yield _case(device, (16, 8, 128, 16), [(1, 2300), (1, 1024), (1, 1025), (3, 1026)], bf16)
    yield _case(device, (2, 1, 64, 16), [(1, 3000)], fp32)
    yield _case(device, (4, 2, 64, 16), mixed, fp32, window=20)
    yield _case(device, (4, 2, 64, 16), [*mixed, (1, 2100), (130, 1400)], bf16, window=100)
    yield _case(device, (4, 2, 64, 16), mixed, fp32, softcap=5.0)
    yield _case(device, (4, 2, 32, 32), mixed, bf16, window=16, softcap=5.0)
    yield _case(device, (4, 2, 32, 16), mixed, torch.float16)
    yield from _feature_cases(device)


def _feature_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    step = [(1, 33), (1, 1), (1, 0), (1, 130), (7, 7), (5, 40), (33, 40)]
    shape = (4, 2, 16, 16)
    yield _case(device, shape, step, fp32, features="decodes rows sinks")
    yield _case(device, shape, step, fp32, features="decodes alibi fresh")
    yield _case(device, (6, 2, 32, 16), [(1, 1100), *step], fp32, features="alibi")
    yield _case(device, shape, [*step, (130, 1400)], bf16, 100, 5.0, features="alibi")
    yield _case(device, shape, step, bf16, features="decodes rows sinks fresh")
    yield _case(device, shape, step, bf16, features="alibi fp8 decodes")
    yield _case(device, (8, 1, 32, 16), step, bf16, window=30, features="fresh sinks rows decodes")
    yield _case(device, shape, step, bf16, softcap=5.0, features="fresh decodes fp8")
    yield _case(device, (6, 2, 80, 32), step, torch.float16, features="fresh decodes")
    yield _case(device, shape, [*step, (90, 1200)], fp32, features="bias")
    yield _case(device, shape, [*step, (90, 1200)], fp32, features="spans decodes rows")
    yield _case(device, shape, step, fp32, window=6, features="spans")
    yield _case(device, (8, 2, 64, 16), [*step, (600, 1500)], bf16, features="spans fresh sinks")
    yield _case(device, (4, 1, 128, 16), [(1, 1100), (300, 1400)], bf16, 40, 5.0, features="spans")
    yield _case(device, shape, step, bf16, window=20, features="spans int8_token fresh")
    yield _case(device, shape, step, bf16, features="bias fresh decodes rows")
    grown = [(1, c) for c in (70, 49, 33, 400, 12, 1, 64, 130, 90)]
    yield _case(device, shape, grown, fp32, features="decodes shared")
    yield _case(device, (8, 2, 64, 16), [*grown, (7, 40)], bf16, features="decodes shared rows")
    yield _case(device, (6, 2, 20, 8), grown, fp32, None, 5.0, features="decodes shared sinks rows")
    yield _case(device, (4, 2, 80, 16), [*grown, (1, 1500)], bf16, features="decodes shared fp8")
    yield _case(device, shape, grown, bf16, features="decodes shared int8_token rows")
    yield _case(device, shape, grown, fp32, window=20, features="decodes shared")
    for feature in ("e5m2", "int8", "int8_head", "int8_token", "fp8_token"):
        yield _case(device, shape, step, fp32, features=f"{feature} decodes")
        yield _case(device, shape, step, bf16, features=f"{feature} sinks decodes rows")
    chains = [*((1, c) for c in (33, 34, 35, 0, 128, 129, 130, 131, 132, 7)), (1, 1), (1, 2)]
    long = [(1, c) for c in (*range(1095, 1101), 40, *range(2040, 2043))]
    for dtype, more in ((fp32, "sinks"), (bf16, ""), (bf16, "fp8"), (bf16, "int8_token")):
        yield _case(device, shape, [*chains, *long], dtype, features=f"decodes rows drafts {more}")
    chained = "decodes rows drafts"
    yield _case(device, (8, 2, 80, 16), chains, bf16, window=20, softcap=5.0, features=chained)
    yield _case(device, (8, 1, 128, 16), [*chains, *long], bf16, window=100, features=chained)
    yield _case(device, (32, 1, 32, 16), chains, fp32, features=chained)
    yield _case(device, (3, 1, 64, 16), [(1, c) for c in range(1, 90)], fp32, features=chained)
    unlike = [(1, c) for c in (1500, 33, 0, 1, 64, 700, 130)]
    for feature in ("", "rows sinks alibi", "fp8", "int8_token rows", "bias"):
        yield _case(device, shape, unlike, bf16, features=f"decodes balanced {feature}")
    yield _case(device, (8, 2, 128, 16), [*unlike, (9, 80)], bf16, features="decodes balanced")
    yield _case(device, (2, 1, 256, 16), unlike, bf16, features="decodes balanced")
    yield _case(device, shape, unlike, fp32, features="decodes balanced rows")
    long = [(1, 1100), (40, 1400)]
    yield _case(device, (8, 2, 64, 16), long, bf16, window=100, features="int8_token")
    yield _case(device, (4, 2, 80, 8), long, fp32, softcap=5.0, features="int8_token alibi")
    yield _case(device, (4, 1, 128, 16), long, torch.float16, features="int8_token fresh")
    yield _case(device, (4, 2, 20, 1), step, fp32, features="fp8_token bias")
    yield _case(device, (4, 2, 64, 16), long, fp32, features="fp8_token")


run_attention = NativeOp(ATTENTION, "q" * 33 + "ddd")
_MAX_SIZE = 1024


def _native(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    rows: Tensor | None = None,
    decodes: int = 0,
    max_context: int | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    counters: Tensor | None = None,
    position_bias: Tensor | None = None,
    scales: Tensor | None = None,
    spans: Tensor | None = None,
    shared: SharedPrefixes | None = None,
    drafts: bool = False,
    balanced: bool = False,
) -> Tensor:
    if sinks is not None or rows is not None or not has_dense_heads(cache):
        return NotImplemented
    code = CODES.get(cache.dtype, 0)
    kv = () if code else (cache,)
    if not native_takes(q, kv, (tables, q_starts, contexts), (alibi, position_bias)):
        return NotImplemented
    if not code or scales is not None:
        k_scale = v_scale = 1.0
    blocks, _, kv_heads, block, size = cache.shape
    y, (token, head, _) = empty(q.shape, q.dtype), q.stride()
    run_attention(
        q.data_ptr(), token, head, cache.data_ptr(),
        tables.data_ptr(), q_starts.data_ptr(), contexts.data_ptr(), y.data_ptr(),
        tables.stride(0), contexts.shape[0], q.shape[1], kv_heads, size, block, blocks,
        DTYPES[q.dtype], window or 0, *native_score_args(alibi, position_bias), 0, 0, 0, 0, 0, 0,
        code, head_step(cache) * cache.element_size(), *scale_args(scales),
        0 if spans is None else spans.data_ptr(),
        scale * k_scale, softcap or 0.0, v_scale,
    )  # fmt: skip
    return y


def native_takes(
    q: Tensor,
    kv: Sequence[Tensor],
    indices: Sequence[Tensor],
    added: Sequence[Tensor | None],
) -> bool:
    """Whether the compiled body reads these: its dtypes, and heads that are dense."""
    size = q.shape[2]
    return (
        q.dtype in DTYPES
        and all(x.dtype == q.dtype and x.stride(-1) == 1 for x in (q, *kv))
        and all(x.dtype == torch.int32 and x.stride(-1) == 1 for x in indices)
        and all(x is None or (x.dtype == torch.float32 and x.is_contiguous()) for x in added)
        and size <= _MAX_SIZE
        and size * q.element_size() % 4 == 0
    )


def native_score_args(alibi: Tensor | None, position_bias: Tensor | None) -> tuple[int, int, int]:
    """Slopes, bias and the distance at which the bias is cut."""
    slopes = 0 if alibi is None else alibi.data_ptr()
    if position_bias is None:
        return slopes, 0, 0
    return slopes, position_bias.data_ptr(), position_bias.shape[1] // 2


@op(cases=_cases, native=_native, gpu="attention.paged_attention")
def paged_attention(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    rows: Tensor | None = None,
    decodes: int = 0,
    max_context: int | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    counters: Tensor | None = None,
    position_bias: Tensor | None = None,
    scales: Tensor | None = None,
    spans: Tensor | None = None,
    shared: SharedPrefixes | None = None,
    drafts: bool = False,
    balanced: bool = False,
) -> Tensor:
    """Attend every query row to the cached tokens of its sequence.

    q: [T, H, D], may be strided. cache: [N, 2, K, B, D], the keys and values of the step written,
    heads may be apart; in q's dtype, or codes of 8 bits: a key is then k_scale times its code, a
    value v_scale times. scales: [N, 2, K, B] float32 of codes, in place of both. tables: [M, W]
    int32; entries wholly before the window may be -1. q_starts: [S+1] int32. contexts: [S] int32,
    the step's tokens included; 0 is a padding row, which yields zeros. sinks, alibi: [H].
    position_bias: [H, 2 R + 1] float32.
    rows: [S] int32, the row of `tables` of each sequence; None: in order.
    spans: [T, 2] int32, packed; the query also sees positions [spans[t, 0], spans[t, 1]) of its
    sequence. Within the context, not of the first `decodes` queries, without alibi and
    position_bias.

    drafts: sequences of one query may have one table, if one follows the other, each with a context
    longer by one than the one before it.

    The rest only makes it faster: the first `decodes` sequences have one query each; no context
    exceeds max_context; k, v: [T, K, D], the step's own keys and values; counters: zeros, int32,
    at least decodes * K of them, left as they were; shared: of the first `decodes` sequences,
    whose tables begin with the same blocks; balanced: the keys of the first `decodes` sequences are
    divided evenly, for contexts that are long. Returns a new [T, H, D] in q.dtype.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, lengths = q_starts.tolist(), contexts.tolist()
    places = range(len(lengths)) if rows is None else rows.tolist()
    bias = ScoreModifiers(softcap, sinks, alibi, position_bias)
    if cache.dtype not in CODE_LIMITS or scales is not None:
        k_scale = v_scale = 1.0
    for s, context in enumerate(lengths):
        for row in range(starts[s], starts[s + 1] if context else starts[s], _TILE):
            stop = min(row + _TILE, starts[s + 1])
            end = context - (starts[s + 1] - stop)  # tokens visible to the last of these rows
            first = max(0, end - (stop - row) - window + 1) if window is not None else 0
            own = None if spans is None else spans[row:stop]
            if own is not None and len(seen := own[own[:, 0] < own[:, 1]]):
                first, last = min(first, int(seen[:, 0].min())), max(end, int(seen[:, 1].max()))
            else:
                last = end
            keys, values = _gather_kv(cache, scales, tables[places[s]], first, last)
            mask = _causal_mask(stop - row, end - first, window, q.device)
            mask = torch.nn.functional.pad(mask, (0, last - end))
            if own is not None:
                at = torch.arange(first, last, device=q.device)
                mask |= (at >= own[:, :1]) & (at < own[:, 1:])
            weights = attention_weights(q[row:stop], keys, mask, scale * k_scale, bias)
            y = torch.einsum("kgrn,knd->rkgd", weights, values * v_scale)
            out[row:stop] = y.reshape(q[row:stop].shape).to(q.dtype)
    return out


class ScoreModifiers(NamedTuple):
    softcap: float | None
    sinks: Tensor | None
    alibi: Tensor | None
    by_distance: Tensor | None


def _gather_kv(
    cache: Tensor, scales: Tensor | None, table: Tensor, first: int, end: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of positions [first, end): [K, n, D] each, fp32."""
    size = cache.shape[3]
    low = first // size
    index = table[low : -(-end // size)].long()
    blocks = cache[index].float()  # [n, 2, K, B, D]
    if scales is not None:
        blocks = blocks * scales[index][..., None]
    both = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, K, n * B, D]
    both = both[:, :, first - low * size : end - low * size]
    return both[0], both[1]


def _causal_mask(rows: int, span: int, window: int | None, device: torch.device) -> Tensor:
    """[rows, span]: row i is position span - rows + i of the span."""
    at = torch.arange(span - rows, span, device=device)[:, None]
    key = torch.arange(span, device=device)[None]
    seen = key <= at
    return seen if window is None else seen & (key > at - window)


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor, scale: float, bias: ScoreModifiers
) -> Tensor:
    """The weight of each key for each row: [K, H / K, rows, n], fp32.

    The rows are the last of the keys' tokens.
    """
    rows, span, size = q.shape[0], k.shape[1], q.shape[2]
    grouped = q.float().view(rows, k.shape[0], -1, size)  # [rows, K, H / K, D]
    scores = torch.einsum("rkgd,knd->kgrn", grouped, k) * scale
    if bias.softcap is not None:
        scores = bias.softcap * torch.tanh(scores / bias.softcap)
    key, row = torch.arange(span, device=q.device), torch.arange(rows, device=q.device)
    ahead = key[None] - (row + span - rows)[:, None]
    if bias.by_distance is not None:
        reach = bias.by_distance.shape[1] // 2
        added = bias.by_distance[:, ahead.clamp(-reach, reach) + reach]  # [H, rows, n]
        scores = scores + added.view(k.shape[0], -1, rows, span)
    if bias.alibi is not None:
        scores = scores - bias.alibi.float().view(k.shape[0], -1, 1, 1) * ahead.abs()
    scores = scores.masked_fill(~mask, float("-inf"))
    if bias.sinks is None:
        return scores.softmax(-1)
    sink = bias.sinks.float().view(k.shape[0], -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
