// Weights of two to eight bits as quire/kernels/formats/panel_codes.py lays them out, and the sums of
// products of their codes with rows of int8.
//
// A panel is 32 outputs, a block 32 inputs, a step 4 inputs. Codes of a block: [bits][32] dwords. A
// plane of b bits has b of these rows; row r holds steps r * 8 / b + j at bits b * j of every byte.
// So a lane is an output in every vector, whatever the number of bits, and a group's scales too.
//
// Codes of 8 bits are signed. Those of fewer bits are not, and are multiplied as they are: the code
// of zero is subtracted as `centre` times the sum of the row's integers.
#pragma once
#include "panel_gemm.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

typedef uint8_t vb __attribute__((vector_size(W * 4)));
typedef int16_t vs __attribute__((vector_size(W * 4)));
typedef uint16_t vus __attribute__((vector_size(W * 4)));

constexpr long BLOCK = 32;  // inputs

// The value, rounded: no compiler fuses the multiplication before with the addition after. So sums
// have the same bits on every instruction set.
INLINE vf rounded(vf v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

// The value, in a register: else GCC reorders sums of a tile, and then keeps them in memory.
INLINE void pin(vi& v) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(v));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(v));
#endif
}

enum Storage : long { F32, F16, BF16, U8, I8 };

// One number per output and group, in panels: values[panel][group][32], times outer[panel][group /
// share][32] if there is that.
struct Factors {
  const char* values;
  long storage, outer_groups, share;
  const float* outer;
};

struct CodesMatrix {  // fields in the order of PanelCodes.header
  const char* codes;
  long outputs, inputs, bits, group, groups;
  Factors scale, offset, zero;
  long centre;         // code of zero, where `zero` has no values
  const float* table;  // values of codes, [1 << bits], or of each output: then own_table is 1
  long own_table;
  const int8_t* levels;  // a table of 16 in int8, where products may use them: table = levels * unit
  double unit;
  const int32_t* perm;  // column i multiplies x[perm[i]]

  long blocks() const { return (inputs + BLOCK - 1) / BLOCK; }
  long panels() const { return (outputs + PANEL - 1) / PANEL; }
  long panel_bytes() const { return blocks() * bits * PANEL * 4; }
  // Inputs that are summed as integers: 16 only where they have a scale of their own.
  long unit_inputs() const { return group == 16 && groups > 1 ? 16 : BLOCK; }
  long units() const { return blocks() * (BLOCK / unit_inputs()); }
  // Units of a group. The last group ends with the row.
  long group_units() const { return groups == 1 ? units() : group / unit_inputs(); }
};

INLINE vf widen_half(vh h) {  // float16 -> float32, exact
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__) && defined(__F16C__)
  return (vf)_mm256_cvtph_ps((__m128i)h);
#else
  const vu u = __builtin_convertvector(h, vu), size = (u & 0x7fffu) << 13;
  vu wide = (vu)((vf)size * 0x1p112f);
  wide = (u & 0x7c00u) == 0x7c00u ? (size | 0x7f800000u) : wide;
  return (vf)(wide | (u & 0x8000u) << 16);
#endif
}

struct half {
  uint16_t bits;
};
INLINE vf load_factors(const float* p) { return load(p); }
INLINE vf load_factors(const bf16* p) { return load(p); }
INLINE vf load_factors(const half* p) {
  vh h;
  memcpy(&h, p, sizeof h);
  return widen_half(h);
}
INLINE vf load_factors(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = p[i];
  return v;
#endif
}
INLINE vf load_factors(const int8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = p[i];
  return v;
#endif
}

INLINE void store_bytes(int8_t* p, vi whole) {  // of numbers from -127 to 127
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)whole));
#elif defined(__AVX2__)
  const __m256i w = (__m256i)whole;
  const __m128i s = _mm_packs_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(s, s));
#else
  for (int i = 0; i < W; i++) p[i] = (int8_t)whole[i];
#endif
}

// to[n][32] = factors times the `products` (0 to 2) of `outer` and `unit`, of which `unit` is the last.
template <int PRODUCTS, class T>
void widen_factors(const T* from, long n, const float* outer, float unit, float* to) {
  vf times[PV];
  UNROLL for (int j = 0; j < PV; j++) times[j] = outer ? load(outer + j * W) : splat(unit);
  for (; n > 0; n--, from += PANEL, to += PANEL)
    UNROLL for (int j = 0; j < PV; j++) {
      vf v = load_factors(from + j * W);
      if (PRODUCTS > 0) v = rounded(v * times[j]);
      if (PRODUCTS > 1) v = rounded(v * unit);
      store(to + j * W, v);
    }
}

template <class T>
void widen_factors(const T* from, long n, const float* outer, float unit, float* to) {
  const int products = (outer != nullptr) + (unit != 1.0f);
  if (products == 0) return widen_factors<0>(from, n, outer, unit, to);
  if (products == 1) return widen_factors<1>(from, n, outer, unit, to);
  widen_factors<2>(from, n, outer, unit, to);
}

// to[g - first][32] = the factors of groups [first, end) of a panel, times unit.
template <class T>
void widen_factors(const Factors& f, long groups, long panel, long first, long end, float unit,
                   float* to) {
  const T* from = (const T*)f.values + panel * groups * PANEL;
  if (!f.outer) return widen_factors(from + first * PANEL, end - first, nullptr, unit, to);
  const float* outer = f.outer + panel * f.outer_groups * PANEL;
  for (long g = first, after; g < end; g = after) {
    const long block = g / f.share;
    after = (block + 1) * f.share < end ? (block + 1) * f.share : end;
    widen_factors(from + g * PANEL, after - g, outer + block * PANEL, unit, to + (g - first) * PANEL);
  }
}

inline void widen_factors(const Factors& f, long groups, long panel, long first, long end,
                          float unit, float* to) {
  if (f.storage == F32) return widen_factors<float>(f, groups, panel, first, end, unit, to);
  if (f.storage == F16) return widen_factors<half>(f, groups, panel, first, end, unit, to);
  if (f.storage == BF16) return widen_factors<bf16>(f, groups, panel, first, end, unit, to);
  if (f.storage == U8) return widen_factors<uint8_t>(f, groups, panel, first, end, unit, to);
  widen_factors<int8_t>(f, groups, panel, first, end, unit, to);
}

// What the codes of some groups of a panel become: code * scale + offset. In memory of the caller.
struct GroupMeaning {
  float *scale, *offset;  // [groups][32]; offset is null where there is none

  static long floats(long groups) { return groups * PANEL * 3; }

  // memory: `floats` of end - first groups.
  GroupMeaning(const CodesMatrix& m, long panel, long first, long end, float unit, float* memory)
      : scale(memory), offset(nullptr) {
    const long n = (end - first) * PANEL;
    if (m.scale.values)
      widen_factors(m.scale, m.groups, panel, first, end, unit, scale);
    else
      for (long i = 0; i < n; i += W) store(scale + i, splat(unit));
    if (!m.offset.values && !m.zero.values) return;
    offset = scale + n;
    if (m.offset.values)
      widen_factors(m.offset, m.groups, panel, first, end, 1.0f, offset);
    else
      for (long i = 0; i < n; i += W) store(offset + i, vf{});
    if (!m.zero.values) return;
    float* zero = offset + n;
    widen_factors(m.zero, m.groups, panel, first, end, 1.0f, zero);
    for (long i = 0; i < n; i += W)
      store(offset + i, load(offset + i) - rounded(load(scale + i) * load(zero + i)));
  }
};

INLINE vb load_bytes(const char* p) {
  vb v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE vb shift_right(vb v, int bits) { return (vb)((vs)v >> bits); }  // the caller masks

INLINE vb shift_left(vb v, int bits) { return (vb)((vs)v << bits); }

// Bits [at, at + COUNT) of every byte, at bits [to, to + COUNT).
template <int COUNT>
INLINE vb move_bits(vb v, int at, int to) {
  const vb moved = at > to ? shift_right(v, at - to) : at < to ? shift_left(v, to - at) : v;
  return moved & (uint8_t)(((1 << COUNT) - 1) << to);
}

// Codes of the four steps of half `h` of a block: its dwords from `column` on.
template <int BITS>
INLINE void fetch_half(const char* block, long h, long column, vb (&out)[4]) {
  const char* at = block + column * 4;
  const long row = PANEL * 4;
  int low = 0;  // bits of a code that are fetched
  if (BITS == 8) UNROLL for (int i = 0; i < 4; i++) out[i] = load_bytes(at + (4 * h + i) * row);
  if (BITS >= 4 && BITS < 8) {
    UNROLL for (int i = 0; i < 2; i++) {
      const vb v = load_bytes(at + (2 * h + i) * row);
      out[2 * i] = v & 15;
      out[2 * i + 1] = move_bits<4>(v, 4, 0);
    }
    at += 4 * row;
    low = 4;
  }
  if (BITS % 4 > 1) {
    const vb v = load_bytes(at + h * row);
    UNROLL for (int i = 0; i < 4; i++) {
      const vb two = move_bits<2>(v, 2 * i, low);
      out[i] = low ? out[i] | two : two;
    }
    at += 2 * row;
    low += 2;
  }
  if (BITS % 2) {
    const vb v = shift_right(load_bytes(at), (int)h * 4);
    UNROLL for (int i = 0; i < 4; i++) out[i] |= move_bits<1>(v, i, low);
  }
}

inline void fetch_half(long bits, const char* block, long h, long column, vb (&out)[4]) {
  switch (bits) {
    case 2: return fetch_half<2>(block, h, column, out);
    case 3: return fetch_half<3>(block, h, column, out);
    case 4: return fetch_half<4>(block, h, column, out);
    case 5: return fetch_half<5>(block, h, column, out);
    case 6: return fetch_half<6>(block, h, column, out);
    default: return fetch_half<8>(block, h, column, out);
  }
}

// The 16 bytes of `levels` that codes below 16 choose.
INLINE vb choose(vb codes, const int8_t* levels) {
#if defined(__AVX512BW__)
  const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)levels));
  return (vb)_mm512_shuffle_epi8(all, (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)levels));
  return (vb)_mm256_shuffle_epi8(all, (__m256i)codes);
#else
  vb out;
  for (int i = 0; i < W * 4; i++) out[i] = (uint8_t)levels[codes[i] & 15];
  return out;
#endif
}

// How products of codes and int8 are summed. Sums of 16 bits may hold so many: of a code c and x,
// |x| <= 127, a pair of products is at most 2 * 127 * c, and 32767 / (2 * 127 * 15) = 8.6 pairs.
enum Sums {
  LONG,    // codes below 16: a lane's pairs of a whole unit, 8 at most, in 16 bits
  SHORT,   // codes below 64: two pairs, 2 * 2 * 127 * 63 = 32004
  SIGNED,  // codes from -128 to 127
  FLIPPED,  // the same, held as code + 128: where FLIPS
};

#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define QUIRE_VNNI 1
constexpr bool FLIPS = true;  // signed codes are multiplied as code + 128, and flipped for each tile or once
#else
constexpr bool FLIPS = false;
#endif
#if !defined(QUIRE_VNNI) && (defined(__AVX512F__) ? defined(__AVX512BW__) : defined(__AVX2__))
#define QUIRE_MADDUBS 1
#endif

// Whether rows are held in 16 bits, as x0 x2 x1 x3 of every step: codes are widened to meet them.
// There is no product of bytes, or it would saturate.
template <Sums S>
constexpr bool splits() {
#if defined(QUIRE_VNNI)
  return false;
#elif defined(QUIRE_MADDUBS)
  return S == SIGNED;
#else
  return true;
#endif
}

INLINE vi madd16(vs a, vs b) {  // lane: the sum of two products of 16 bits
#if defined(__AVX512BW__)
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(__AVX512F__)
  return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((vi)a << 16 >> 16) * ((vi)b << 16 >> 16) + ((vi)a >> 16) * ((vi)b >> 16);
#endif
}

// acc += the two steps a . x0 + b . x1, where x are 4 int8 in every lane. Not where S splits.
template <Sums S>
INLINE vi add_pair(vi acc, vb a, vb b, vi x0, vi x1) {
#if defined(QUIRE_VNNI)
  if (S == SIGNED) a ^= 128, b ^= 128;
#if defined(__AVX512F__)
  acc = (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)x0);
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)b, (__m512i)x1);
#else
  acc = (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)x0);
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)b, (__m256i)x1);
#endif
#elif defined(QUIRE_MADDUBS)
#if defined(__AVX512F__)
  const vs first = (vs)_mm512_maddubs_epi16((__m512i)a, (__m512i)x0);
  const vs second = (vs)_mm512_maddubs_epi16((__m512i)b, (__m512i)x1);
#else
  const vs first = (vs)_mm256_maddubs_epi16((__m256i)a, (__m256i)x0);
  const vs second = (vs)_mm256_maddubs_epi16((__m256i)b, (__m256i)x1);
#endif
  if constexpr (S == LONG) return (vi)((vs)acc + first + second);
  return acc + madd16(first + second, vs{} + 1);
#else
  return acc;
#endif
}

// The codes of a step whose inputs are even, and those whose are odd, in 16 bits; signed ones times
// 256, which `total` undoes.
template <Sums S>
INLINE void split(vb codes, vs& even, vs& odd) {
  even = S == SIGNED ? (vs)codes << 8 : (vs)codes & 255;
  odd = S == SIGNED ? (vs)codes & (int16_t)0xff00 : (vs)((vus)codes >> 8);
}

// Whether sums of a unit begin at the code of zero: in 32 bits they may. Else they begin at 0.
template <Sums S>
constexpr bool starts_anywhere() {
#if defined(QUIRE_VNNI)
  return S != SIGNED;  // those of 8 bits were slower at 32 rows
#else
  return false;
#endif
}

template <Sums S>
INLINE vi total(vi acc) {  // the 32-bit sums of what add_pair made
#if defined(QUIRE_MADDUBS)
  if (S == LONG) return madd16((vs)acc, vs{} + 1);
#endif
  return splits<S>() && S == SIGNED ? acc >> 8 : acc;
}
