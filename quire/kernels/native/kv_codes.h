// Codes of 8 bits in a KV cache: a number is its code times a scale. See kv_write.py.
#pragma once
#include "simd.h"

enum { PLAIN, INT8, E4M3, E5M2 };

typedef uint16_t vw __attribute__((vector_size(W * 4)));
typedef int8_t vc __attribute__((vector_size(W * 4)));
typedef int16_t vsw __attribute__((vector_size(W * 4)));

INLINE vsw least(vsw a, vsw b) { return a < b ? a : b; }

INLINE float code_limit(long code) { return code == INT8 ? 127.0f : code == E4M3 ? 448.0f : 57344.0f; }

// A scale of a head, for all blocks or for each, for all tokens or for each. Steps are in floats.
struct Scales {
  float* first;
  long block, head, token;
  INLINE float* at(long id, long row, long offset) const {  // row: plane * kv heads + head
    return first + id * block + row * head + offset * token;
  }
  void copy(long id, long row, long offset, long n, float* to) const {
    const float* from = at(id, row, offset);
    if (token == 1) memcpy(to, from, n * sizeof *to);
    else
      for (long i = 0; i < n; i++) to[i] = from[i * token];
  }
};

// What works within every 16 bytes of a vector.
#if defined(__AVX512BW__)
#define IN_LANES(name) _mm512_##name
typedef __m512i Lanes;
typedef __m512 FloatLanes;
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define IN_LANES(name) _mm256_##name
typedef __m256i Lanes;
typedef __m256 FloatLanes;
#elif defined(__SSSE3__) && !defined(__AVX512F__)
#define IN_LANES(name) _mm_##name
typedef __m128i Lanes;
typedef __m128 FloatLanes;
#endif

#if defined(IN_LANES)

// The bfloat16 of codes of 8-bit floats, all of which are exact there: its low byte by the low four
// bits of a code, its high byte by the high four (E4M3) or by the four below the sign (E5M2). Where
// those below the sign are 0 some codes have the least exponent: both bytes are by the low four bits.
struct CodeTables {
  alignas(64) uint8_t low[W * 4], high[W * 4], first_low[W * 4], first_high[W * 4];
  constexpr explicit CodeTables(int code) : low(), high(), first_low(), first_high() {
    const int mantissa = code == E4M3 ? 3 : 2, bias = code == E4M3 ? 120 : 112;
    for (int i = 0; i < W * 4; i++) {
      const int n = i % 16, at = code == E4M3 ? n & 7 : n, m = code == E4M3 ? n : n & 7;
      low[i] = n << (7 - mantissa);
      high[i] = (at ? bias / 2 + at : 0) | (n - at) << 4;
      int whole = m, exponent = bias + 1;
      for (; whole && whole < 1 << mantissa; whole *= 2) exponent--;
      const int bits = (exponent << 7) + ((whole & ((1 << mantissa) - 1)) << (7 - mantissa));
      first_low[i] = m ? bits & 0xff : 0, first_high[i] = m ? bits >> 8 : 0;
    }
  }
};

INLINE vc pick_bytes(const uint8_t* table, vc at) {
  return (vc)IN_LANES(shuffle_epi8)(*(const Lanes*)table, (Lanes)at);
}

// Four codes in each lane -> the first two of them in bfloat16, and the other two.
template <int CODE>
INLINE void widen_floats(vc codes, vu& low, vu& high) {
  alignas(64) static constexpr CodeTables tables(CODE);
  const vc size = codes & 0x7f, n = codes & 0xf, at = (vc)((vu)codes >> (CODE == E4M3 ? 4 : 3)) & 0xf;
  const vc first = CODE == E4M3 ? (codes & 0x70) == 0 : size < 8;
  const vc l = first ? pick_bytes(tables.first_low, n) : pick_bytes(tables.low, n);
  vc h = pick_bytes(tables.high, at) | (first & pick_bytes(tables.first_high, n));
  if (CODE == E4M3)
    h |= size == 0x7f;
  else
    h |= ((size > 0x7b) & 0x38) | (codes & (int8_t)0x80);
  const auto a = (FloatLanes)IN_LANES(unpacklo_epi8)((Lanes)l, (Lanes)h);
  const auto b = (FloatLanes)IN_LANES(unpackhi_epi8)((Lanes)l, (Lanes)h);
  low = (vu)IN_LANES(shuffle_ps)(a, b, 0x88);
  high = (vu)IN_LANES(shuffle_ps)(a, b, 0xdd);
}

#else

// Codes in the high byte of each lane. Magnitudes are the least of lines: bits grow evenly between
// powers of two, and half as fast after each, for codes of the least exponent too.
template <int CODE>
INLINE vw bfloat16_of(vw t) {
  const vsw m = (vsw)(t >> 8) & 0x7f;
  vsw x;
  if (CODE == E4M3) {
    x = least(least(0x3a80 + (m << 7), 0x3b00 + (m << 6)),
              least(0x3b80 + (m << 5), 0x3c00 + (m << 4)));
    x = (x & (m != 0)) | ((m == 0x7f) & 0x7f80);
  } else {
    x = least(least(0x3700 + (m << 7), 0x3780 + (m << 6)), 0x3800 + (m << 5));
    x = (x & (m != 0)) + ((m >= 0x7c) & 0x3800);
  }
  return (vw)x | (t & 0x8000);
}

template <int CODE>
INLINE void widen_floats(vc codes, vu& low, vu& high) {
  const vu even = (vu)bfloat16_of<CODE>((vw)codes << 8);
  const vu odd = (vu)bfloat16_of<CODE>((vw)codes & 0xff00);
  low = (even & 0xffffu) | odd << 16;
  high = even >> 16 | (odd & 0xffff0000u);
}

#endif

template <int CODE>
INLINE void widen_four(vu raw, vu& low, vu& high) {
  if constexpr (CODE != INT8) return widen_floats<CODE>((vc)raw, low, high);
  auto number = [&](int at) { return (vu)__builtin_convertvector((vi)(raw << at) >> 24, vf); };
  low = number(24) >> 16 | number(16);
  high = number(8) >> 16 | number(0);
}

// Bytes of 4 rows of 32 -> dwords: a column of the 4 in each.
INLINE void interleave(const char* const rows[4], vu to[32 / W]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m256i r[4], t[4];
  UNROLL for (int i = 0; i < 4; i++) r[i] = _mm256_loadu_si256((const __m256i*)rows[i]);
  UNROLL for (int i = 0; i < 2; i++) {
    t[i] = _mm256_unpacklo_epi8(r[2 * i], r[2 * i + 1]);
    t[i + 2] = _mm256_unpackhi_epi8(r[2 * i], r[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 2; i++) {
    r[2 * i] = _mm256_unpacklo_epi16(t[2 * i], t[2 * i + 1]);
    r[2 * i + 1] = _mm256_unpackhi_epi16(t[2 * i], t[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 2; i++) {
    to[i] = (vu)_mm256_permute2x128_si256(r[2 * i], r[2 * i + 1], 0x20);
    to[i + 2] = (vu)_mm256_permute2x128_si256(r[2 * i], r[2 * i + 1], 0x31);
  }
#elif defined(__SSE2__) && !defined(__AVX512F__)
  for (int c = 0; c < 32; c += 16, to += 4) {
    __m128i r[4];
    UNROLL for (int i = 0; i < 4; i++) r[i] = _mm_loadu_si128((const __m128i*)(rows[i] + c));
    const __m128i a = _mm_unpacklo_epi8(r[0], r[1]), b = _mm_unpacklo_epi8(r[2], r[3]);
    const __m128i d = _mm_unpackhi_epi8(r[0], r[1]), e = _mm_unpackhi_epi8(r[2], r[3]);
    to[0] = (vu)_mm_unpacklo_epi16(a, b), to[1] = (vu)_mm_unpackhi_epi16(a, b);
    to[2] = (vu)_mm_unpacklo_epi16(d, e), to[3] = (vu)_mm_unpackhi_epi16(d, e);
  }
#else
  alignas(64) uint32_t all[32];
  for (int c = 0; c < 32; c++) {
    all[c] = 0;
    for (int i = 0; i < 4; i++) all[c] |= (uint32_t)(uint8_t)rows[i][c] << 8 * i;
  }
  memcpy(to, all, sizeof all);
#endif
}

// The same as the dwords of a panel: `step` dwords from one to the next.
template <int CODE>
INLINE void store_four(vu raw, bf16* to, long step) {
  vu low, high;
  widen_four<CODE>(raw, low, high);
  memcpy(to, &low, sizeof low);
  memcpy(to + 2 * step, &high, sizeof high);
}
template <int CODE>
INLINE void store_four(vu raw, float* to, long step) {
  vu low, high;
  widen_four<CODE>(raw, low, high);
  store(to, (vf)(low << 16));
  store(to + step, (vf)(low & 0xffff0000u));
  store(to + 2 * step, (vf)(high << 16));
  store(to + 3 * step, (vf)(high & 0xffff0000u));
}

INLINE void store_low_bytes(vu x, char* to) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__AVX2__)
  const __m256i low = (__m256i)(x & 0xffu);
  const __m128i s = _mm_packs_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(s, s));
#else
  for (int i = 0; i < W; i++) to[i] = (char)x[i];
#endif
}

// Rounded to nearest even, cut at the limits. A NaN is a NaN, or 0 as an integer.
INLINE void encode(long code, vf x, char* to, long n) {
  const vf limit = splat(code_limit(code));
  x = vmin(limit, vmax(-limit, x));
  char raw[W];
  if (code == INT8) {
    const vf r = x + ROUNDS - ROUNDS;
    store_low_bytes((vu)__builtin_convertvector(pick(x == x, r, vf{}), vi), raw);
  } else {
    const vu a = (vu)x & 0x7fffffffu;
    vu steps, rest, least;
    if (code == E4M3) {  // the sum with 2^14 has steps of 2^-9
      steps = (vu)((vf)a + 0x1p14f) - (vu)splat(0x1p14f);
      rest = (a + 0x7ffffu + ((a >> 20) & 1u) - (120u << 23)) >> 20;
      least = vu{} + (121u << 23);
    } else {
      steps = (vu)((vf)a + 0x1p7f) - (vu)splat(0x1p7f);
      rest = (a + 0xfffffu + ((a >> 21) & 1u) - (112u << 23)) >> 21;
      least = vu{} + (113u << 23);
    }
    vu r = a < least ? steps : rest;
    r = a > 0x7f800000u ? vu{} + 0x7fu : r;
    store_low_bytes(r | (((vu)x >> 24) & 0x80u), raw);
  }
  memcpy(to, raw, n);
}

// The scale of a head's numbers; NaN if one of them is not finite.
template <class T>
INLINE float measure(long code, const T* x, long size) {
  vi top{};
  each(size, [&](long i, long n) {
    const vi bits = (vi)get(x + i, n) & 0x7fffffff;
    top = bits > top ? bits : top;
  });
  int32_t most = 0;
  for (int i = 0; i < W; i++) most = top[i] > most ? top[i] : most;
  float amax;
  memcpy(&amax, &most, 4);
  return most >= 0x7f800000 ? NAN : amax / code_limit(code);
}

template <class T>
INLINE void encode_head(long code, const T* x, float scale, char* to, long size) {
  const float divisor = scale == 0 ? 1 : scale;
  each(size, [&](long i, long n) { encode(code, get(x + i, n) / divisor, to + i, n); });
}
