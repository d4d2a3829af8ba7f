// Codes of 8 bits in a KV cache: a number is its code times a scale. See kv_write.py.
#pragma once
#include "simd.h"

enum { PLAIN, INT8, E4M3, E5M2 };

typedef uint8_t vub __attribute__((vector_size(W)));
typedef int8_t vsb __attribute__((vector_size(W)));

INLINE float code_limit(long code) { return code == INT8 ? 127.0f : code == E4M3 ? 448.0f : 57344.0f; }

// A scale of a head, for all blocks or for each, for all tokens or for each. Steps are in floats.
struct Scales {
  float* first;
  long block, head, token;
  INLINE float* at(long id, long row, long offset) const {  // row: plane * kv heads + head
    return first + id * block + row * head + offset * token;
  }
};

INLINE vf decode(long code, const char* from, long n) {
  char raw[W] = {};
  memcpy(raw, from, n);
  if (code == INT8) {
    vsb bytes;
    memcpy(&bytes, raw, sizeof bytes);
    return __builtin_convertvector(bytes, vf);
  }
  vub bytes;
  memcpy(&bytes, raw, sizeof bytes);
  const vu u = __builtin_convertvector(bytes, vu), m = u & 0x7fu;
  const vf whole = __builtin_convertvector((vi)m, vf);
  vf x;
  if (code == E4M3) {  // below the least exponent a code counts steps of 2^-9
    x = pick((vi)m < 8, whole * 0x1p-9f, (vf)((m << 20) + (120u << 23)));
    x = pick((vi)m == 0x7f, splat(NAN), x);
  } else {
    x = pick((vi)m < 4, whole * 0x1p-16f, (vf)((m << 21) + (112u << 23)));
    x = pick((vi)m >= 0x7c, (vf)(((m & 3u) << 21) | 0x7f800000u), x);
  }
  return (vf)((vu)x | (u & 0x80u) << 24);
}

// Rounded to nearest even, cut at the limits. A NaN is a NaN, or 0 as an integer.
INLINE void encode(long code, vf x, char* to, long n) {
  const vf limit = splat(code_limit(code));
  x = vmin(limit, vmax(-limit, x));
  char raw[W];
  if (code == INT8) {
    const vf r = x + ROUNDS - ROUNDS;
    const vsb bytes = __builtin_convertvector(__builtin_convertvector(pick(x == x, r, vf{}), vi), vsb);
    memcpy(raw, &bytes, sizeof bytes);
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
    const vub bytes = __builtin_convertvector(r | (((vu)x >> 24) & 0x80u), vub);
    memcpy(raw, &bytes, sizeof bytes);
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

template <class T>
INLINE void decode_head(long code, const char* from, T* to, long size) {
  each(size, [&](long i, long n) { put(to + i, decode(code, from + i, n), n); });
}
