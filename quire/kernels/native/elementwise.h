// Norms, rope, activations, adds, cache writes: one pass over the data, rows shared out when many.
#pragma once
#include "kv_codes.h"
#include "linear.h"

constexpr long SMALL = 4096;  // elements below which one thread is faster than two

// Rows are (outer, inner) pairs: heads inside tokens, so that views of a fused qkv need no copy.
struct NormArgs {
  const char* x;
  long x_outer, x_inner;  // elements
  const void *weight, *bias, *residual;
  void *y, *r;
  long outer, inner, size, dtype, centred;
  long weight_inner;  // elements: `size` if each inner row has weights of its own, else 0
  double eps, offset;
};

inline Plan plan(const NormArgs& a, int) {
  return {a.outer * a.inner * a.size > SMALL && a.outer > 1, 0};
}

template <class T>
INLINE void norm_row(const NormArgs& a, const T* weight, const T* x, const T* res, T* y, T* r) {
  const T* bias = (const T*)a.bias;
  vf squares{}, total{};
  each(a.size, [&](long i, long n) {
    vf v = get(x + i, n);
    if (res) {
      v = v + get(res + i, n);
      put(r + i, v, n);
      v = get(r + i, n);  // the norm must see the rounded sum
    }
    squares = squares + v * v;
    total = total + v;
  });
  float mean = 0;
  if (a.centred) {
    mean = sum(total) / a.size;
    squares = vf{};
    each(a.size, [&](long i, long n) {
      vf v = get((res ? r : x) + i, n) - mean;
      if (n < W) v = pick(lanes() < (int)n, v, vf{});
      squares = squares + v * v;
    });
  }
  const float factor = 1.0f / std::sqrt(sum(squares) / a.size + (float)a.eps);
  each(a.size, [&](long i, long n) {
    vf v = (get((res ? r : x) + i, n) - mean) * factor * (get(weight + i, n) + (float)a.offset);
    if (bias) v = v + get(bias + i, n);
    put(y + i, v, n);
  });
}

template <class T>
void norm(const NormArgs& a, const Team& team) {
  long from, to;
  team.share(a.outer, from, to);
  for (long t = from; t < to; t++)
    for (long h = 0; h < a.inner; h++) {
      const long at = (t * a.inner + h) * a.size;
      const T* x = (const T*)a.x + t * a.x_outer + h * a.x_inner;
      norm_row<T>(a, (const T*)a.weight + h * a.weight_inner, x, a.residual ? (const T*)a.residual + at : nullptr, (T*)a.y + at,
                  a.r ? (T*)a.r + at : nullptr);
    }
}

inline void run(const NormArgs& a, const Team& team) {
  a.dtype ? norm<bf16>(a, team) : norm<float>(a, team);
}

struct RopeArgs {
  const char* x[2];        // queries, keys
  long token[2], head[2];  // strides, elements
  char* y[2];
  long heads[2];
  const int32_t* positions;
  const float* table;
  long rows, size, rotated, limit, interleaved, dtype;
};

inline Plan plan(const RopeArgs& a, int) {
  return {a.rows * (a.heads[0] + a.heads[1]) * a.size > SMALL && a.rows > 1, 0};
}

template <class T>
INLINE void turn_halves(const T* x, T* y, const float* cos, const float* sin, long half) {
  each(half, [&](long i, long n) {
    vf a = get(x + i, n), b = get(x + half + i, n), c = get(cos + i, n), s = get(sin + i, n);
    put(y + i, a * c - b * s, n);
    put(y + half + i, b * c + a * s, n);
  });
}

INLINE float one(const float* p) { return *p; }
INLINE float one(const bf16* p) {
  uint32_t u = (uint32_t)p->bits << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

template <class T>
INLINE void turn_pairs(const T* x, T* y, const float* cos, const float* sin, long half) {
  for (long i = 0; i < half; i++) {
    float a = one(x + 2 * i), b = one(x + 2 * i + 1);
    store(y + 2 * i, splat(a * cos[i] - b * sin[i]), 1);
    store(y + 2 * i + 1, splat(b * cos[i] + a * sin[i]), 1);
  }
}

template <class T>
void turn(const RopeArgs& a, const Team& team) {
  long from, to;
  team.share(a.rows, from, to);
  const long half = a.rotated / 2;
  for (long t = from; t < to; t++) {
    long position = a.positions[t];
    if (position < 0) position = 0;  // padding rows; never read outside the table
    if (position >= a.limit) position = a.limit - 1;
    const float* cos = a.table + position * a.rotated;
    for (int which = 0; which < 2; which++)
      for (long h = 0; h < a.heads[which]; h++) {
        const T* x = (const T*)a.x[which] + t * a.token[which] + h * a.head[which];
        T* y = (T*)a.y[which] + (t * a.heads[which] + h) * a.size;
        if (a.interleaved)
          turn_pairs(x, y, cos, cos + half, half);
        else
          turn_halves(x, y, cos, cos + half, half);
        memcpy(y + a.rotated, x + a.rotated, (a.size - a.rotated) * sizeof(T));
      }
  }
}

inline void run(const RopeArgs& a, const Team& team) {
  a.dtype ? turn<bf16>(a, team) : turn<float>(a, team);
}

// y = f(x) * (gate form: the second half of the row) over rows of `size`.
struct MapArgs {
  const char *x, *other;
  long x_row, other_row;  // elements
  char* y;
  long rows, size, kind, dtype;
  double value;
};
enum { SILU, GELU, GELU_TANH, RELU, ADD, SOFTCAP, SCALE, CLIP, QUICK_GELU, SAME };

inline Plan plan(const MapArgs& a, int) { return {a.rows * a.size > SMALL, 0}; }

// The normal distribution function, to 1e-7: Abramowitz and Stegun 7.1.26.
INLINE vf normal_cdf(vf x) {
  const vf z = (vf)((vi)x & 0x7fffffff) * 0.70710678118654752f, t = 1.0f / (1.0f + 0.3275911f * z);
  vf p = splat(0.5f * 1.061405429f);
  p = p * t - 0.5f * 1.453152027f;
  p = p * t + 0.5f * 1.421413741f;
  p = p * t - 0.5f * 0.284496736f;
  p = p * t + 0.5f * 0.254829592f;
  const vf tail = p * t * vexp_negative(-z * z);
  return pick(x < vf{}, tail, 1.0f - tail);
}

template <int KIND>
INLINE vf apply(vf x, float value) {
  if constexpr (KIND == SILU) return x / (1.0f + vexp(-x));
  if constexpr (KIND == GELU) return x * normal_cdf(x);
  if constexpr (KIND == GELU_TANH)
    return 0.5f * x * (1.0f + vtanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  if constexpr (KIND == QUICK_GELU) return x / (1.0f + vexp(-1.702f * x));
  if constexpr (KIND == RELU) return pick(x < vf{}, vf{}, x);
  if constexpr (KIND == SOFTCAP) return value * vtanh(x / value);
  if constexpr (KIND == SCALE) return value * x;
  if constexpr (KIND == CLIP) return pick(x > value, splat(value), pick(x < -value, splat(-value), x));
  return x;
}

template <class T, int KIND>
void map(const MapArgs& a, const Team& team) {
  long from, to;
  const bool flat = a.rows == 1;  // one long row is shared out by columns
  team.share(flat ? (a.size + W - 1) / W : a.rows, from, to);
  const long begin = flat ? from * W : 0;
  const long end = flat ? (to * W < a.size ? to * W : a.size) : a.size;
  for (long t = flat ? 0 : from; t < (flat ? 1 : to); t++) {
    const T* x = (const T*)a.x + t * a.x_row + begin;
    const T* other = a.other ? (const T*)a.other + t * a.other_row + begin : nullptr;
    T* y = (T*)a.y + t * a.size + begin;
    each(end - begin, [&](long i, long n) {
      vf v = apply<KIND>(get(x + i, n), (float)a.value);
      if constexpr (KIND == ADD) v = v + get(other + i, n);
      else if (other) v = v * get(other + i, n);
      put(y + i, v, n);
    });
  }
}

template <class T>
void map_kind(const MapArgs& a, const Team& team) {
  switch (a.kind) {
    case SILU: return map<T, SILU>(a, team);
    case GELU: return map<T, GELU>(a, team);
    case GELU_TANH: return map<T, GELU_TANH>(a, team);
    case RELU: return map<T, RELU>(a, team);
    case ADD: return map<T, ADD>(a, team);
    case SOFTCAP: return map<T, SOFTCAP>(a, team);
    case SCALE: return map<T, SCALE>(a, team);
    case CLIP: return map<T, CLIP>(a, team);
    case QUICK_GELU: return map<T, QUICK_GELU>(a, team);
    case SAME: return map<T, SAME>(a, team);
  }
}

inline void run(const MapArgs& a, const Team& team) {
  a.dtype ? map_kind<bf16>(a, team) : map_kind<float>(a, team);
}

struct WriteArgs {
  const char *k, *v;
  long k_token, k_head, v_token, v_head;  // bytes
  char* cache;
  const int64_t* slots;
  long rows, blocks, kv_heads, block, size, dtype, code, head;  // head: bytes of one in a block
  Scales scales;  // of tokens: measured and written; of heads: given; none: those of the layer
  double k_scale, v_scale;
};

inline Plan plan(const WriteArgs& a, int) {
  return {a.rows * a.kv_heads * a.size * (a.dtype ? 2 : 4) > 4 * SMALL, 0};
}

template <class T>
void write(const WriteArgs& a, const Team& team) {
  long from, to;
  team.share(a.rows, from, to);
  const long bytes = a.size * (a.code ? 1 : (long)sizeof(T));
  for (long t = from; t < to; t++) {
    const int64_t slot = a.slots[t];
    if (slot < 0 || slot >= a.blocks * a.block) continue;  // padding
    const long id = slot / a.block, offset = slot % a.block;
    for (long row = 0; row < 2 * a.kv_heads; row++) {
      const bool value = row >= a.kv_heads;
      const long h = row - value * a.kv_heads;
      const char* x = value ? a.v + t * a.v_token + h * a.v_head : a.k + t * a.k_token + h * a.k_head;
      char* there = a.cache + (id * 2 * a.kv_heads + row) * a.head + offset * bytes;
      if (!a.code) {
        memcpy(there, x, bytes);
        continue;
      }
      float scale = (float)(value ? a.v_scale : a.k_scale);
      if (a.scales.first) {
        float* own = a.scales.at(id, row, offset);
        if (a.scales.token) *own = measure(a.code, (const T*)x, a.size);
        scale = *own;
      }
      encode_head(a.code, (const T*)x, scale, there, a.size);
    }
  }
}

inline void run(const WriteArgs& a, const Team& team) {
  a.dtype ? write<bf16>(a, team) : write<float>(a, team);
}

// Logits whose bit in the row's mask is 0 become -inf; the others are not touched.
struct MaskArgs {
  char* x;
  long x_row, vocab;  // elements
  const uint32_t* words;
  long width;
  const int32_t* rows;
  long masks, dtype;
};

inline Plan plan(const MaskArgs& a, int) { return {a.masks * a.vocab > 128 * SMALL, 0}; }

template <class U>
void mask(const MaskArgs& a, U lowest, const Team& team) {
  long from, to;
  team.share(a.masks, from, to);
  for (long i = from; i < to; i++) {
    if (a.rows[i] < 0) continue;  // padding
    U* x = (U*)a.x + a.rows[i] * a.x_row;
    const uint32_t* words = a.words + i * a.width;
    for (long w = 0; w < a.vocab / 32; w++, x += 32) {
      const uint32_t word = words[w];
      if (word == 0xffffffffu) continue;
      if (word == 0)
        for (int j = 0; j < 32; j++) x[j] = lowest;
      else
        for (int j = 0; j < 32; j++) x[j] = word >> j & 1 ? x[j] : lowest;
    }
    for (int j = 0; j < a.vocab % 32; j++)
      if (!(words[a.vocab / 32] >> j & 1)) x[j] = lowest;
  }
}

inline void run(const MaskArgs& a, const Team& team) {
  a.dtype ? mask<uint16_t>(a, 0xff80, team) : mask<uint32_t>(a, 0xff800000u, team);
}

// Rows of bytes to another place, with gaps between them.
struct CopyArgs {
  const char* x;
  long x_row;
  char* y;
  long y_row, rows, bytes;
};

inline Plan plan(const CopyArgs& a, int) { return {a.rows * a.bytes > 64 * SMALL && a.rows > 1, 0}; }

inline void run(const CopyArgs& a, const Team& team) {
  long from, to;
  team.share(a.rows, from, to);
  for (long i = from; i < to; i++) memcpy(a.y + i * a.y_row, a.x + i * a.x_row, a.bytes);
}
