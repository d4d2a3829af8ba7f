"""Decode helpers: slices of a TiledWeight as numbers of the activations' dtype, in registers.

A register has two words, which are neighbours of a row. A shift, a mask and a constant make two
numbers of them: 128 + q in bfloat16 (exact while q < 128), 1024 + q in float16. One fused
multiply-add then subtracts that constant and the code of zero, which is exact. So two weights cost
about three instructions. Codes of 8 bits in bfloat16 are 128 + low and 2048 + 16 * high, added.
The bits of an e4m3 float are put where those of a larger float are, which is then multiplied by the
power of two between the biases: seven instructions.
Triton's own operations would do this for each number apart; they are the path of the interpreter.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from quire.kernels.formats.tiled_weight import TiledFactors


@triton.constexpr_function
def decode_asm(low: int, at: int, high: int, high_at: int, bf16: bool) -> str:
    """Operands: out, words, [words of the high plane,] minus (constant + zero)."""
    kind, one = ("bf16x2", "0x3f803f80") if bf16 else ("f16x2", "0x3c003c00")
    magic = "0x43004300" if bf16 else "0x64006400"
    mask = f"0x{((1 << low) - 1) * 0x10001:08x}"
    minus = "$3" if high else "$2"
    text = "{ .reg .b32 t, u, c, m, one; "  # of two immediate operands ptxas makes two instructions
    text += f"mov.b32 one, {one}; mov.b32 m, {magic}; shr.b32 t, $1, {at}; "
    text += f"lop3.b32 t, t, {mask}, m, 0xea; "
    if high == 4 and bf16:
        text += f"mov.b32 c, 0x45004500; shr.b32 u, $2, {high_at}; "
        text += "lop3.b32 u, u, 0x000f000f, c, 0xea; mov.b32 c, 0xc508c508; "
        text += "fma.rn.bf16x2 u, u, one, c; fma.rn.bf16x2 t, t, one, u; "
    elif high:
        move = f"shr.b32 u, $2, {high_at - low}" if high_at >= low else ""
        move = move or f"shl.b32 u, $2, {low - high_at}"
        mask = f"0x{(((1 << high) - 1) << low) * 0x10001:08x}"
        text += f"{move}; lop3.b32 t, u, {mask}, t, 0xea; "
    return text + f"fma.rn.{kind} $0, t, one, {minus}; }}"


@triton.constexpr_function
def magic_of(bits: int, bf16: bool) -> float:
    """The constant that decode_asm adds to codes."""
    if not bf16:
        return 1024.0
    return 0.0 if bits == 8 else 128.0


@triton.constexpr_function
def e4m3_asm(at: int, high_at: int, bf16: bool) -> str:
    """Operands: out, words of the low 4 bits, words of the high ones. Exact, NaN excepted."""
    kind, place, times = ("bf16x2", 4, "0x7b807b80") if bf16 else ("f16x2", 7, "0x5c005c00")
    text = "{ .reg .b32 t, u, v, m, n; "
    for to, word, move, bits in (
        ("t", "$1", place - at, 15 << place),
        ("u", "$2", place + 4 - high_at, 7 << place + 4),
        ("v", "$2", 12 - high_at, 1 << 15),
    ):
        text += f"{'shr' if move < 0 else 'shl'}.b32 {to}, {word}, {abs(move)}; "
        before = f"0x{bits * 0x10001:08x}, {'0' if to == 't' else 't'}, 0xea"
        text += f"lop3.b32 t, {to}, {before}; "
    return text + (f"mov.b32 m, {times}; mov.b32 n, 0x80008000; fma.rn.{kind} $0, t, m, n; }}")


@triton.jit
def load_words(
    ptr, o, m, BLOCKS: tl.constexpr, WORDS: tl.constexpr, SK: tl.constexpr, EVICT: tl.constexpr
):
    """The words of block m for outputs o: WORDS tiles [BN, SK]."""
    j = tl.arange(0, SK)
    row = ((o // 64).to(tl.int64) * BLOCKS + m) * (WORDS * 64 * SK) + o % 64 * SK
    tiles = ()
    for i in tl.static_range(WORDS):
        at = ptr + row[:, None] + (i * 64 * SK + j)[None, :]
        tiles = tiles + (tl.load(at, eviction_policy=EVICT),)  # type: ignore[assignment]
    return tiles


@triton.jit
def decode_slice(low, high, minus, S: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
                 E4M3: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Slice S of a block: q - zero [BN, SK], in the dtype of `minus`.

    low, high: the words of both planes. minus: [BN, 1], minus (magic_of + zero). E4M3: codes are
    floats, without a zero.
    """
    bf16: tl.constexpr = minus.dtype == tl.bfloat16
    word = low[S // (16 // LOW)]
    AT: tl.constexpr = S % (16 // LOW) * LOW
    HIGH_AT: tl.constexpr = S % (16 // HIGH) * HIGH if HIGH else 0
    minus = tl.broadcast_to(minus, word.shape)
    if ASM and E4M3:
        floats: tl.constexpr = e4m3_asm(AT, HIGH_AT, bf16)
        return tl.inline_asm_elementwise(
            floats, "=r,r,r", [word, high[S // (16 // HIGH)]],
            dtype=minus.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM:
        text: tl.constexpr = decode_asm(LOW, AT, HIGH, HIGH_AT, bf16)
        if HIGH:
            return tl.inline_asm_elementwise(
                text, "=r,r,r,r", [word, high[S // (16 // HIGH)], minus],
                dtype=minus.dtype, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                text, "=r,r,r", [word, minus], dtype=minus.dtype, is_pure=True, pack=2
            )
    else:
        q = (word.to(tl.int32) >> AT) & ((1 << LOW) - 1)
        if HIGH:
            above = high[S // (16 // HIGH)].to(tl.int32) >> HIGH_AT
            q = q | ((above & ((1 << HIGH) - 1)) << LOW)
        if E4M3:
            value = float_of(q, 1)
        else:
            value = q.to(tl.float32) + magic_of(LOW + HIGH, bf16) + minus.to(tl.float32)
        return value.to(minus.dtype)


_LOOKUP_ASM = tl.constexpr("""{
.reg .b32 n, m, q, c, l, h, k, v, p, r, s, t;
mov.b32 c, 0xff; and.b32 n, $4, 0x77777777;
and.b32 q, $4, 0x88888888; xor.b32 m, q, 0x88888888; shr.b32 m, m, 3; or.b32 m, m, q;
prmt.b32 k, c, c, m;
prmt.b32 l, $5, $7, n; prmt.b32 v, $9, $11, n; lop3.b32 l, v, l, k, 0xe4;
prmt.b32 h, $13, $15, n; prmt.b32 v, $17, $19, n; lop3.b32 h, v, h, k, 0xe4;
prmt.b32 p, l, h, 0x5140; prmt.b32 r, l, h, 0x7362;
shr.b32 n, n, 16; shr.b32 m, m, 16; prmt.b32 k, c, c, m;
prmt.b32 l, $5, $7, n; prmt.b32 v, $9, $11, n; lop3.b32 l, v, l, k, 0xe4;
prmt.b32 h, $13, $15, n; prmt.b32 v, $17, $19, n; lop3.b32 h, v, h, k, 0xe4;
prmt.b32 s, l, h, 0x5140; prmt.b32 t, l, h, 0x7362;
prmt.b32 $0, p, s, 0x5410; prmt.b32 $1, p, s, 0x7632;
prmt.b32 $2, r, t, 0x5410; prmt.b32 $3, r, t, 0x7632;
}""")
"""Operands: four slices out, words (two in a register), eight words of the table, each twice.

`prmt` picks four bytes of eight by four codes of 3 bits; bit 3 of a code picks one of two tables.
Low and high bytes of the numbers are picked apart, then put together.
"""

_LOOKUP_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 17))


@triton.constexpr_function
def _four(dtype: Any) -> tuple[Any, ...]:
    return (dtype,) * 4


@triton.jit
def lookup_slices(word, table, dtype: tl.constexpr, ASM: tl.constexpr):
    """Four slices [BN, SK] of a tile of words, whose values are those of a table of 16."""
    if ASM:
        return tl.inline_asm_elementwise(
            _LOOKUP_ASM, _LOOKUP_CONSTRAINTS,
            [word, table[0], table[1], table[2], table[3], table[4], table[5], table[6], table[7]],
            dtype=_four(dtype), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        slices = ()
        for s in tl.static_range(4):
            q = (word.to(tl.int32) >> (4 * s)) & 15
            bits = tl.zeros(word.shape, tl.int32)
            for e in tl.static_range(16):
                low = (table[e // 4] >> (8 * (e % 4))) & 255
                high = (table[4 + e // 4] >> (8 * (e % 4))) & 255
                bits = tl.where(q == e, low | (high << 8), bits)
            slices = slices + (bits.to(tl.uint16).to(dtype, bitcast=True),)  # type: ignore[assignment]
        return slices


@triton.jit
def load_table(ptr, o, OWN: tl.constexpr):
    """The eight words of the table of outputs o: each [BN, 1]."""
    words = ()
    for i in tl.static_range(8):
        at = ptr + ((o // 64) * 512 + i * 64 + o % 64 if OWN else o * 0 + i)
        words = words + (tl.load(at)[:, None],)  # type: ignore[assignment]
    return words


@triton.jit
def float_of(raw, FORM: tl.constexpr):
    """A number of TiledFactors in float32. FORM: of _FORMS."""
    if FORM == 1:
        word = raw.to(tl.int32)
        half = (((word & 0x7F) << 7) | ((word & 0x80) << 8)).to(tl.uint16)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((word & 0x7F) == 0x7F, float("nan"), value)
    elif FORM == 2:
        word = raw.to(tl.int32)
        bits = tl.where(word == 0, 1 << 22, tl.where(word == 255, 0x7FC00000, word << 23))
        return bits.to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float32)


@triton.jit
def load_factor(v_ptr, c_ptr, o, g, G: tl.constexpr, FORM: tl.constexpr):
    """The factor of group g of outputs o, float32 [BN]. FORM: of factor_form."""
    SHARE: tl.constexpr = FORM // 16
    S: tl.constexpr = (G + SHARE - 1) // SHARE
    value = tl.load(v_ptr + (o // 64) * (64 * S) + o % 64 + g // SHARE * 64)
    factor = float_of(value, FORM // 4 % 4)
    if c_ptr is not None:
        factor *= float_of(tl.load(c_ptr + (o // 64) * (64 * G) + o % 64 + g * 64), FORM % 4)
    return factor


_FORMS = {"": 0, "e4m3": 1, "e8m0": 2}


def factor_form(factors: TiledFactors | None) -> int:
    """How load_factor reads factors, as one constant."""
    if factors is None:
        return 16
    return factors.share * 16 + _FORMS[factors.value_form] * 4 + _FORMS[factors.code_form]
