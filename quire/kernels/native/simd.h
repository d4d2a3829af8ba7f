// Vectors of floats as wide as the machine has, in GCC/Clang vector extensions.
// Every kernel is written once over `vf`; only the bf16 dot product, the bf16
// rounding and the 16x16 transpose have an AVX-512 body beside the portable one.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

struct bf16 {
  uint16_t bits;
};

INLINE vf splat(float x) { return x - vf{}; }

INLINE vi lanes() {
  vi out;
  for (int i = 0; i < W; i++) out[i] = i;
  return out;
}

INLINE vf pick(vi mask, vf yes, vf no) { return mask ? yes : no; }
// The larger, the smaller; b where one of them is NaN.
INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return pick(a > b, a, b);
#endif
}
INLINE vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return pick(a < b, a, b);
#endif
}

INLINE vf widen(vh h) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // a compiler would widen halves
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
  return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

INLINE vu round_bf16(vf x) {  // to nearest even, in the upper half; NaN stays NaN
  const vu u = (vu)x;
  const vi nan = (vi)(u & 0x7fffffffu) > 0x7f800000;
  return nan ? (vu{} + 0x7fc00000u) : u + 0x7fffu + ((u >> 16) & 1u);
}

INLINE vh narrow(vf x) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  const vu r = round_bf16(x) >> 16;
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (vh)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)r),
                              _mm256_extracti128_si256((__m256i)r, 1));
#else
  return __builtin_convertvector(r, vh);
#endif
#endif
}

INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE vf load(const bf16* p) {
  vh h;
  memcpy(&h, p, sizeof h);
  return widen(h);
}
INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
INLINE void store(bf16* p, vf v) {
  vh h = narrow(v);
  memcpy(p, &h, sizeof h);
}

// The first n < W lanes; the rest read as zero and are not written.
template <class T>
INLINE vf load(const T* p, long n) {
  T pad[W] = {};
  memcpy(pad, p, n * sizeof(T));
  return load(pad);
}
template <class T>
INLINE void store(T* p, vf v, long n) {
  T pad[W];
  store(pad, v);
  memcpy(p, pad, n * sizeof(T));
}

// f(offset, load, store) over n elements, W at a time; the tail runs the same arithmetic.
template <class F>
INLINE void each(long n, F&& f) {
  long i = 0;
  for (; i + W <= n; i += W) f(i, (long)W);
  if (i < n) f(i, n - i);
}
template <class T>
INLINE vf get(const T* p, long n) {
  return n == W ? load(p) : load(p, n);
}
template <class T>
INLINE void put(T* p, vf v, long n) {
  if (n == W)
    store(p, v);
  else
    store(p, v, n);
}

INLINE float sum(vf v) {  // a fixed tree, so equal inputs give equal bits
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
  float s[W];
  memcpy(s, &v, sizeof s);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) s[i] += s[i + half];
  return s[0];
#endif
}
INLINE float largest(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 s = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
#else
  float s[W];
  memcpy(s, &v, sizeof s);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) s[i] = s[i] > s[i + half] ? s[i] : s[i + half];
  return s[0];
#endif
}

// x * 2**n for whole n.
INLINE vf scaled(vf x, vf n) {
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)x, (__m512)n);
#else  // in two steps, neither of which can overflow
  const vi e = __builtin_convertvector(n, vi), half = e >> 1;
  return x * (vf)((half + 127) << 23) * (vf)((e - half + 127) << 23);
#endif
}

constexpr float ROUNDS = 12582912.0f;  // 1.5 * 2**23: what is added to it is an integer

INLINE vf exp_part(vf x, vf n) {  // e**x / 2**n for the n nearest to x / log(2)
  vf r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * r * r + r + 1.0f;
}

// e**x to about one unit in the last place; exactly 0 for -inf (a mask), NaN for NaN.
INLINE vf vexp(vf x) {
  const vf c = vmin(splat(89.0f), vmax(splat(-150.0f), x));
  const vf n = c * 1.44269504088896341f + ROUNDS - ROUNDS;
  return scaled(exp_part(c, n), n);
}

// The same for x <= 0, and 0 where that is below 1e-38: n is added to the exponent.
INLINE vf vexp_negative(vf x) {
  const vf c = vmax(splat(-87.0f), x), n = c * 1.44269504088896341f + ROUNDS;
  const vf y = (vf)((vi)exp_part(c, n - ROUNDS) + ((vi)n << 23));
  return pick(x < -87.0f, vf{}, y);
}

INLINE vf vtanh(vf x) {  // the exponential form loses digits near 0, so a series serves there
  vf a = pick(x < vf{}, -x, x), q = x * x;
  vf big = 1.0f - 2.0f / (vexp(2.0f * a) + 1.0f);
  big = pick(x < vf{}, -big, big);
  vf p = splat(-5.70498872745e-3f);
  p = p * q + 2.06390887954e-2f;
  p = p * q - 5.37397155531e-2f;
  p = p * q + 1.33314422036e-1f;
  p = p * q - 3.33332819422e-1f;
  vf small = p * q * x + x;
  return pick(a < splat(0.625f), small, big);
}

// a * b + c, rounded once where the CPU can. Compilers fuse some copies of a template and not others,
// so sums whose bits must not depend on the copy are written with this.
INLINE vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// A step of a dot product is 4 bytes: 2 bf16 or 1 float. acc += a . b, lane by lane.
template <class T>
INLINE vf dot_step(vf acc, vi a, vi b);
template <>
INLINE vf dot_step<float>(vf acc, vi a, vi b) {
  return multiply_add((vf)a, (vf)b, acc);
}
template <>
INLINE vf dot_step<bf16>(vf acc, vi a, vi b) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#else
  const vi high = vi{} + (int32_t)0xffff0000;
  acc = multiply_add((vf)(a << 16), (vf)(b << 16), acc);
  return multiply_add((vf)(a & high), (vf)(b & high), acc);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// to[i] = rows[j][i] for 8 x 8 dwords from column `at` on.
INLINE void transpose8(const uint32_t* const* rows, long at, __m256* to) {
  __m256 r[8], t[8];
  UNROLL for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps((const float*)(rows[i] + at));
  UNROLL for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    to[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    to[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
}
#endif

// out[i * stride + j] = rows[j][i] for 16 x 16 dwords, written in order of i: with a stride below 16
// each row overwrites what the one before had too much.
INLINE void transpose16(const uint32_t* const rows[16], uint32_t* out, long stride) {
#if defined(__AVX512F__)
  __m512i r[16], t[16];
  UNROLL for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[i]);
  UNROLL for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
  UNROLL for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + i * stride, r[i]);
#elif defined(__AVX2__)
  for (int half = 0; half < 16; half += 8) {
    __m256 low[8], high[8];
    transpose8(rows, half, low);
    transpose8(rows + 8, half, high);
    UNROLL for (int i = 0; i < 8; i++) {
      _mm256_storeu_ps((float*)out + (half + i) * stride, low[i]);
      _mm256_storeu_ps((float*)out + (half + i) * stride + 8, high[i]);
    }
  }
#else
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) out[i * stride + j] = rows[j][i];
#endif
}
