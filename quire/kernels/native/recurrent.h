// Recurrent layers: short convolutions, scans, the gated delta rule, and the gates beside them.
//
// The tokens of a row are computed one after the other, so the bits of a token depend neither on how
// its prompt is cut nor on other rows. Ranks share channels, heads and columns of states, never rows:
// a row may read the state that a row before it wrote. On a CPU a chunk as products of matrices
// costs nearly as much arithmetic, and the state of a head stays in a cache either way.
#pragma once
#include "elementwise.h"

struct StateRows {
  const int64_t *sources, *targets;  // row of the states that each row reads first, and writes
  const int64_t* spans;              // of rows of several tokens: the first one, and the end
  long decodes, count;               // leading rows of one token; all rows
  long begin(long s) const { return s < decodes ? s : spans[2 * (s - decodes)]; }
  long end(long s) const { return s < decodes ? s + 1 : spans[2 * (s - decodes) + 1]; }
};

constexpr long LANES = 4 * W;      // channels of an item
constexpr long STEP_TOKENS = 64;   // tokens whose gates are computed at once
constexpr long DELTA_TOKENS = 16;  // tokens whose keys and queries are: they share L1 with the state

INLINE long whole_vectors(long n) { return (n + W - 1) / W * W; }

INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }
INLINE vf silu(vf x) { return x / (1.0f + vexp(-x)); }

// log(1 + e**x), by log(1 + u) = 2 artanh(u / (2 + u)).
INLINE vf softplus(vf x) {
  const vf u = vexp_negative(pick(x < vf{}, x, -x)), s = u / (2.0f + u), q = s * s;
  vf p = q * (1.0f / 17) + 1.0f / 15;
  p = p * q + 1.0f / 13;
  p = p * q + 1.0f / 11;
  p = p * q + 1.0f / 9;
  p = p * q + 1.0f / 7;
  p = p * q + 1.0f / 5;
  p = p * q + 1.0f / 3;
  p = p * q + 1.0f;
  return vmax(vf{}, x) + 2.0f * s * p;
}

template <class T>
INLINE vf rounded(vf x) {  // to T
  if constexpr (sizeof(T) == 4) return x;
  return widen(narrow(x));
}

INLINE void keep(float* p, float x) { *p = x; }
INLINE void keep(bf16* p, float x) {  // x is a bf16 already
  uint32_t u;
  memcpy(&u, &x, 4);
  p->bits = (uint16_t)(u >> 16);
}

// Numbers of n <= STEP_TOKENS tokens, `row` apart, one by one to floats; zeros up to a whole vector.
template <class T>
INLINE void gather(const T* x, long row, long n, float* out) {
  for (long i = 0; i < n; i++) out[i] = one(x + i * row);
  for (long i = n; i < whole_vectors(n); i++) out[i] = 0;
}

// Time steps softplus(dt + bias) of n tokens of a head.
template <class T>
INLINE void time_steps(const T* dt, long row, long n, float bias, float* out) {
  gather(dt, row, n, out);
  for (long i = 0; i < n; i += W) store(out + i, softplus(load(out + i) + bias));
}

// ---- causal convolution ----

struct ConvArgs {
  const char* x;
  long x_row;  // elements
  char *y, *state;
  const char *weight, *bias;
  StateRows rows;
  long tokens, channels, width, silu, dtype;
};

inline Plan plan(const ConvArgs& a, int) { return {a.tokens * a.channels > SMALL, 0}; }

// n <= W channels from `first` on. Of each channel: K weights, and the last K - 1 inputs as state.
template <class T, int K>
void conv_channels(const ConvArgs& a, long first, long n) {
  const vf shift = a.bias ? get((const T*)a.bias + first, n) : vf{};
  float taps[K][W] = {};
  for (long c = 0; c < n; c++)
    for (int j = 0; j < K; j++) taps[j][c] = one((const T*)a.weight + (first + c) * K + j);
  vf weight[K];
  for (int j = 0; j < K; j++) weight[j] = load(taps[j]);
  for (long s = 0; s < a.rows.count; s++) {
    const T* from = (const T*)a.state + (a.rows.sources[s] * a.channels + first) * (K - 1);
    T* to = (T*)a.state + (a.rows.targets[s] * a.channels + first) * (K - 1);
    float last[K - 1][W] = {};
    for (long c = 0; c < n; c++)
      for (int j = 0; j < K - 1; j++) last[j][c] = one(from + c * (K - 1) + j);
    vf window[K];
    for (int j = 0; j < K - 1; j++) window[j] = load(last[j]);
    for (long t = a.rows.begin(s); t < a.rows.end(s); t++) {
      window[K - 1] = get((const T*)a.x + t * a.x_row + first, n);
      vf sum = shift;
      UNROLL for (int j = 0; j < K; j++) sum = multiply_add(weight[j], window[j], sum);
      put((T*)a.y + t * a.channels + first, a.silu ? silu(sum) : sum, n);
      UNROLL for (int j = 0; j < K - 1; j++) window[j] = window[j + 1];
    }
    for (int j = 0; j < K - 1; j++) store(last[j], window[j]);
    for (long c = 0; c < n; c++)
      for (int j = 0; j < K - 1; j++) keep(to + c * (K - 1) + j, last[j][c]);
  }
}

template <class T>
void conv_all(const ConvArgs& a, const Team& team) {
  for (long at; (at = team.take(1) * LANES) < a.channels;)
    for (long c = at; c < at + LANES && c < a.channels; c += W) {
      const long n = a.channels - c < W ? a.channels - c : W;
      if (a.width == 2) conv_channels<T, 2>(a, c, n);
      if (a.width == 3) conv_channels<T, 3>(a, c, n);
      if (a.width == 4) conv_channels<T, 4>(a, c, n);
    }
}

inline void run(const ConvArgs& a, const Team& team) {
  a.dtype ? conv_all<bf16>(a, team) : conv_all<float>(a, team);
}

// ---- Mamba-2 ----

struct SsdArgs {
  const char* x;
  long x_row;  // elements, as all that follow
  const char* dt;
  long dt_row;
  const char* b;
  long b_row;
  const char* c;
  long c_row;
  float *y, *state;
  StateRows rows;
  const float *a_log, *d, *dt_bias;
  long tokens, heads, size, groups, numbers, dtype;  // numbers: of a row of a state
  double lowest, highest;                            // time steps
};

constexpr long SSD_ROWS = 32;  // rows of a state that an item has

inline Plan plan(const SsdArgs& a, int threads) {
  const long work = a.tokens * a.heads * a.size * a.numbers;
  return {work > 4 * SMALL, threads * 2 * whole_vectors(a.numbers) * 4};
}

// R rows of a state after one more token, and what the token reads of them.
template <int R>
INLINE void ssd_rows(const float* from, float* to, const float* added, float decay, const float* b,
                     const float* c, long numbers, float* y) {
  vf sums[R] = {};
  each(numbers, [&](long i, long n) {
    const vf into = load(b + i), out = load(c + i);
    UNROLL for (int r = 0; r < R; r++) {
      const vf before = get(from + r * numbers + i, n) * decay;
      const vf h = multiply_add(splat(added[r]), into, before);
      put(to + r * numbers + i, h, n);
      sums[r] = multiply_add(h, out, sums[r]);
    }
  });
  UNROLL for (int r = 0; r < R; r++) y[r] += sum(sums[r]);
}

// Rows [first, first + count) of the states of a head.
template <class T>
void ssd_item(const SsdArgs& a, long head, long first, long count, float* b, float* c) {
  const long group = head / (a.heads / a.groups), state_size = a.heads * a.size * a.numbers;
  const long at = head * a.size + first;
  const vf rate = -vexp(splat(a.a_log[head]));
  for (long s = 0; s < a.rows.count; s++) {
    const float* from = a.state + a.rows.sources[s] * state_size + at * a.numbers;
    float* to = a.state + a.rows.targets[s] * state_size + at * a.numbers;
    const long end = a.rows.end(s);
    for (long t0 = a.rows.begin(s); t0 < end; t0 += STEP_TOKENS) {
      const long tokens = end - t0 < STEP_TOKENS ? end - t0 : STEP_TOKENS;
      float steps[STEP_TOKENS], decay[STEP_TOKENS];
      time_steps((const T*)a.dt + t0 * a.dt_row + head, a.dt_row, tokens, a.dt_bias[head], steps);
      for (long i = 0; i < tokens; i += W) {
        const vf low = vmax(splat((float)a.lowest), load(steps + i));
        const vf step = vmin(splat((float)a.highest), low);
        store(steps + i, step);
        store(decay + i, vexp(step * rate));
      }
      for (long i = 0; i < tokens; i++, from = to) {
        const long t = t0 + i;
        each(a.numbers, [&](long j, long n) {
          store(b + j, get((const T*)a.b + t * a.b_row + group * a.numbers + j, n));
          store(c + j, get((const T*)a.c + t * a.c_row + group * a.numbers + j, n));
        });
        float added[SSD_ROWS];
        float* y = a.y + t * a.heads * a.size + at;
        each(count, [&](long p, long n) {
          const vf x = get((const T*)a.x + t * a.x_row + at + p, n);
          put(added + p, x * steps[i], n);
          put(y + p, x * a.d[head], n);
        });
        long p = 0;
        for (; p + 4 <= count; p += 4)
          ssd_rows<4>(from + p * a.numbers, to + p * a.numbers, added + p, decay[i], b, c,
                      a.numbers, y + p);
        for (; p < count; p++)
          ssd_rows<1>(from + p * a.numbers, to + p * a.numbers, added + p, decay[i], b, c,
                      a.numbers, y + p);
      }
    }
  }
}

template <class T>
void ssd_all(const SsdArgs& a, const Team& team) {
  const long padded = whole_vectors(a.numbers), parts = (a.size + SSD_ROWS - 1) / SSD_ROWS;
  float* b = (float*)team.scratch + team.rank * 2 * padded;
  for (long item; (item = team.take(1)) < a.heads * parts;) {
    const long first = item % parts * SSD_ROWS, left = a.size - first;
    ssd_item<T>(a, item / parts, first, left < SSD_ROWS ? left : SSD_ROWS, b, b + padded);
  }
}

inline void run(const SsdArgs& a, const Team& team) {
  a.dtype ? ssd_all<bf16>(a, team) : ssd_all<float>(a, team);
}

// ---- Mamba-1 ----

struct SelectiveArgs {
  const char* x;
  long x_row;  // elements, as all that follow
  const char* dt;
  long dt_row;
  const char* b;
  long b_row;
  const char* c;
  long c_row;
  const char* z;
  long z_row;
  char* y;
  float* state;
  StateRows rows;
  const float *a_log, *d;
  long tokens, channels, numbers, dtype;  // numbers: of a channel's state
};

inline Plan plan(const SelectiveArgs& a, int threads) {
  const long work = a.tokens * a.channels * a.numbers;
  return {work > SMALL, threads * 2 * a.numbers * LANES * 4};
}

// out[i][c] = x[c][i] of `channels` rows of n numbers; out has LANES columns.
INLINE void turn_in(const float* x, long channels, long n, float* out) {
  if (channels < LANES) memset(out, 0, n * LANES * 4);
  long c = 0;
  if (n % 16 == 0)
    for (; c + 16 <= channels; c += 16)
      for (long i = 0; i < n; i += 16) {
        const uint32_t* rows[16];
        for (int r = 0; r < 16; r++) rows[r] = (const uint32_t*)(x + (c + r) * n + i);
        transpose16(rows, (uint32_t*)out + i * LANES + c, LANES);
      }
  for (; c < channels; c++)
    for (long i = 0; i < n; i++) out[i * LANES + c] = x[c * n + i];
}

INLINE void turn_out(const float* x, long channels, long n, float* out) {
  long c = 0;
  if (n % 16 == 0)
    for (; c + 16 <= channels; c += 16)
      for (long i = 0; i < n; i += 16) {
        const uint32_t* rows[16];
        for (int r = 0; r < 16; r++) rows[r] = (const uint32_t*)(x + (i + r) * LANES + c);
        transpose16(rows, (uint32_t*)out + c * n + i, n);
      }
  for (; c < channels; c++)
    for (long i = 0; i < n; i++) out[c * n + i] = x[i * LANES + c];
}

// One token of up to LANES channels from `first` on. h and rate: [numbers][LANES].
template <class T>
INLINE void selective_token(const SelectiveArgs& a, long t, long first, long channels, float* h,
                            const float* rate) {
  const T *b = (const T*)a.b + t * a.b_row, *c = (const T*)a.c + t * a.c_row;
  vf steps[4] = {}, x[4] = {}, added[4] = {}, y[4] = {};
  for (int j = 0; j < 4 && j * W < channels; j++) {
    const long at = first + j * W, n = channels - j * W < W ? channels - j * W : W;
    steps[j] = softplus(get((const T*)a.dt + t * a.dt_row + at, n));
    x[j] = get((const T*)a.x + t * a.x_row + at, n);
    added[j] = steps[j] * x[j];
  }
  for (long i = 0; i < a.numbers; i++) {
    const vf into = splat(one(b + i)), out = splat(one(c + i));
    UNROLL for (int j = 0; j < 4; j++) {
      float* own = h + i * LANES + j * W;
      const vf before = load(own) * vexp(steps[j] * load(rate + i * LANES + j * W));
      const vf after = multiply_add(added[j], into, before);
      store(own, after);
      y[j] = multiply_add(after, out, y[j]);
    }
  }
  for (int j = 0; j < 4 && j * W < channels; j++) {
    const long at = first + j * W, n = channels - j * W < W ? channels - j * W : W;
    const vf whole = multiply_add(x[j], get(a.d + at, n), y[j]);
    put((T*)a.y + t * a.channels + at, whole * silu(get((const T*)a.z + t * a.z_row + at, n)), n);
  }
}

template <class T>
void selective_all(const SelectiveArgs& a, const Team& team) {
  float* h = (float*)team.scratch + team.rank * 2 * a.numbers * LANES;
  float* rate = h + a.numbers * LANES;
  for (long first; (first = team.take(1) * LANES) < a.channels;) {
    const long channels = a.channels - first < LANES ? a.channels - first : LANES;
    turn_in(a.a_log + first * a.numbers, channels, a.numbers, rate);
    for (long i = 0; i < a.numbers * LANES; i += W) store(rate + i, -vexp(load(rate + i)));
    for (long s = 0; s < a.rows.count; s++) {
      const long from = (a.rows.sources[s] * a.channels + first) * a.numbers;
      turn_in(a.state + from, channels, a.numbers, h);
      for (long t = a.rows.begin(s); t < a.rows.end(s); t++)
        selective_token<T>(a, t, first, channels, h, rate);
      const long to = (a.rows.targets[s] * a.channels + first) * a.numbers;
      turn_out(h, channels, a.numbers, a.state + to);
    }
  }
}

inline void run(const SelectiveArgs& a, const Team& team) {
  a.dtype ? selective_all<bf16>(a, team) : selective_all<float>(a, team);
}

// ---- gated delta rule ----

struct DeltaArgs {
  const char* q;
  long q_row;  // elements, as all that follow
  const char* k;
  long k_row;
  const char* v;
  long v_row;
  const char* a;
  long a_row;
  const char* b;
  long b_row;
  float *y, *state;
  StateRows rows;
  const float *a_log, *dt_bias;
  long tokens, key_heads, heads, keys, values, dtype;
};

constexpr int DELTA_VECTORS = W == 16 ? 4 : 2;  // columns of a state that an item has

inline Plan plan(const DeltaArgs& a, int threads) {
  const long work = a.tokens * a.heads * a.keys * a.values;
  return {work > 4 * SMALL, threads * (2 * DELTA_TOKENS + 1) * whole_vectors(a.keys) * 4};
}

// x as a vector of length `scale`.
template <class T>
INLINE void unit(const T* x, long size, float scale, float* out) {
  vf squares{};
  each(size, [&](long i, long n) {
    const vf v = get(x + i, n);
    squares = multiply_add(v, v, squares);
    store(out + i, v);
  });
  const float factor = scale / std::sqrt(sum(squares) + 1e-6f);
  for (long i = 0; i < size; i += W) store(out + i, load(out + i) * factor);
}

// NV vectors of columns of one head's states, n columns in each. y and v: at these columns.
template <class T, int NV>
struct DeltaColumns {
  long keys, values, n;  // rows of the state, and its row in elements
  vf found[NV];          // k S of the token that comes

  INLINE void begin(const float* state, const float* k) {
    for (int j = 0; j < NV; j++) found[j] = vf{};
    for (long i = 0; i < keys; i++) {
      const vf key = splat(k[i]);
      UNROLL for (int j = 0; j < NV; j++)
        found[j] = multiply_add(key, get(state + i * values + j * W, n), found[j]);
    }
  }

  // A token, and what the one after it finds.
  INLINE void token(const float* from, float* to, const float* q, const float* k, const float* next,
                    float decay, float beta, const T* v, float* y) {
    vf change[NV], read[NV] = {}, after[NV] = {};
    UNROLL for (int j = 0; j < NV; j++)
      change[j] = (get(v + j * W, n) - found[j] * decay) * beta;
    for (long i = 0; i < keys; i++) {
      const vf key = splat(k[i]), query = splat(q[i]), other = splat(next[i]);
      UNROLL for (int j = 0; j < NV; j++) {
        const vf before = get(from + i * values + j * W, n) * decay;
        const vf s = multiply_add(key, change[j], before);
        put(to + i * values + j * W, s, n);
        read[j] = multiply_add(query, s, read[j]);
        after[j] = multiply_add(other, s, after[j]);
      }
    }
    UNROLL for (int j = 0; j < NV; j++) {
      put(y + j * W, read[j], n);
      found[j] = after[j];
    }
  }
};

// The columns from `first` on of the states of a head. near: memory for keys and queries.
template <class T, int NV>
void delta_item(const DeltaArgs& a, long head, long first, long n, float* near) {
  const long key_head = head / (a.heads / a.key_heads), padded = whole_vectors(a.keys);
  const long state_size = a.heads * a.keys * a.values;
  const float scale = 1.0f / std::sqrt((float)a.keys);
  const vf rate = -vexp(splat(a.a_log[head]));
  float *keys = near, *queries = near + (DELTA_TOKENS + 1) * padded;
  DeltaColumns<T, NV> columns{a.keys, a.values, n, {}};
  for (long s = 0; s < a.rows.count; s++) {
    const long at = head * a.keys * a.values + first, end = a.rows.end(s);
    const float* from = a.state + a.rows.sources[s] * state_size + at;
    float* to = a.state + a.rows.targets[s] * state_size + at;
    for (long t0 = a.rows.begin(s); t0 < end; t0 += DELTA_TOKENS) {
      const long tokens = end - t0 < DELTA_TOKENS ? end - t0 : DELTA_TOKENS;
      float decay[DELTA_TOKENS], beta[DELTA_TOKENS];
      time_steps((const T*)a.a + t0 * a.a_row + head, a.a_row, tokens, a.dt_bias[head], decay);
      gather((const T*)a.b + t0 * a.b_row + head, a.b_row, tokens, beta);
      for (long i = 0; i < tokens; i += W) {
        store(decay + i, vexp(load(decay + i) * rate));
        store(beta + i, rounded<T>(sigmoid(load(beta + i))));
      }
      for (long i = 0; i < tokens; i++) {
        unit((const T*)a.k + (t0 + i) * a.k_row + key_head * a.keys, a.keys, 1, keys + i * padded);
        unit((const T*)a.q + (t0 + i) * a.q_row + key_head * a.keys, a.keys, scale,
             queries + i * padded);
      }
      memset(keys + tokens * padded, 0, padded * 4);
      columns.begin(from, keys);
      for (long i = 0; i < tokens; i++, from = to) {
        const long t = t0 + i;
        const T* v = (const T*)a.v + t * a.v_row + head * a.values + first;
        columns.token(from, to, queries + i * padded, keys + i * padded, keys + (i + 1) * padded,
                      decay[i], beta[i], v, a.y + (t * a.heads + head) * a.values + first);
      }
    }
  }
}

template <class T>
void delta_all(const DeltaArgs& a, const Team& team) {
  const long wide = DELTA_VECTORS * W, parts = (a.values + wide - 1) / wide;
  float* near =
      (float*)team.scratch + team.rank * (2 * DELTA_TOKENS + 1) * whole_vectors(a.keys);
  for (long item; (item = team.take(1)) < a.heads * parts;) {
    const long head = item / parts, first = item % parts * wide;
    if (first + wide <= a.values)
      delta_item<T, DELTA_VECTORS>(a, head, first, W, near);
    else
      each(a.values - first, [&](long i, long n) { delta_item<T, 1>(a, head, first + i, n, near); });
  }
}

inline void run(const DeltaArgs& a, const Team& team) {
  a.dtype ? delta_all<bf16>(a, team) : delta_all<float>(a, team);
}

// ---- gates ----

// The RMS norm of each group of `size` channels, and silu(gate) before or after it. Without weights
// there is no norm.
struct GatedNormArgs {
  const float* x;
  const char* gate;
  long gate_row;  // elements
  const char* weight;
  char* y;
  long rows, channels, size, weight_size, gate_first, dtype;
  double eps;
};

inline Plan plan(const GatedNormArgs& a, int) {
  return {a.rows * a.channels > SMALL && a.rows > 1, 0};
}

template <class T>
void gated_norm(const GatedNormArgs& a, const Team& team) {
  long from, to;
  team.share(a.rows, from, to);
  for (long t = from; t < to; t++)
    for (long at = 0; at < a.channels; at += a.size) {
      const float* x = a.x + t * a.channels + at;
      const T* gate = (const T*)a.gate + t * a.gate_row + at;
      const T* weight = (const T*)a.weight + (a.weight_size == a.size ? 0 : at);
      T* y = (T*)a.y + t * a.channels + at;
      const auto value = [&](long i, long n) {
        const vf v = get(x + i, n);
        return a.gate_first ? v * silu(get(gate + i, n)) : v;
      };
      vf squares{};
      each(a.size, [&](long i, long n) {
        const vf v = value(i, n);
        squares = squares + v * v;
      });
      const float factor = 1.0f / std::sqrt(sum(squares) / a.size + (float)a.eps);
      if (!a.weight) {
        each(a.size, [&](long i, long n) { put(y + i, value(i, n), n); });
        continue;
      }
      each(a.size, [&](long i, long n) {
        vf v = rounded<T>(value(i, n) * factor) * get(weight + i, n);
        if (!a.gate_first) v = rounded<T>(v) * silu(get(gate + i, n));
        put(y + i, v, n);
      });
    }
}

inline void run(const GatedNormArgs& a, const Team& team) {
  a.dtype ? gated_norm<bf16>(a, team) : gated_norm<float>(a, team);
}

// y = base + x sigmoid(gate), the gate of each number, or one of each row.
struct GateArgs {
  const char *x, *gate;
  long gate_row, gate_inner;  // elements
  const char* base;           // or null
  char* y;
  long rows, inner, size, single, dtype;
};

inline Plan plan(const GateArgs& a, int) {
  return {a.rows * a.inner * a.size > SMALL && a.rows > 1, 0};
}

template <class T>
void open_gate(const GateArgs& a, const Team& team) {
  long from, to;
  team.share(a.rows * a.inner, from, to);
  for (long r = from; r < to; r++) {
    const T* gate = (const T*)a.gate + r / a.inner * a.gate_row + r % a.inner * a.gate_inner;
    each(a.size, [&](long i, long n) {
      const long at = r * a.size + i;
      const vf opened = sigmoid(a.single ? splat(one(gate)) : get(gate + i, n));
      const vf v = get((const T*)a.x + at, n) * opened;
      put((T*)a.y + at, a.base ? get((const T*)a.base + at, n) + v : v, n);
    });
  }
}

inline void run(const GateArgs& a, const Team& team) {
  a.dtype ? open_gate<bf16>(a, team) : open_gate<float>(a, team);
}
