// Low-rank adapters: y += B (A x) for rows sorted by slot.
//
// Two phases: v = A x for all rows with an adapter, then the outputs in pieces. Both read the rows of
// A and B from memory once for up to ROWS_AT_ONCE rows. Each number is one sum in one order: it does
// not depend on the rows computed with it.
#pragma once
#include "elementwise.h"

struct LoraArgs {
  const char* x;  // null: v is a column of A, that of ids
  long x_row;     // bytes
  const int32_t* ids;
  char* y;
  long y_row;  // bytes
  const char *a, *b;  // [slots, parts, rank, inputs], [slots, rank, outputs]
  const int32_t *ranks, *bounds;  // [slots, parts], [parts + 1]
  const float *factor, *shift;    // [slots, outputs] or null
  const int32_t *order, *starts;  // [rows], [slots + 1]
  long rows, top;  // top: rows of y that have one row of x
  long slots, parts, rank, inputs, outputs, dtype;
};

constexpr long ROWS_AT_ONCE = 64;
constexpr long COLUMNS_AT_ONCE = 256;
constexpr int RANKS = 4;                    // rows of A multiplied by a vector of x
constexpr int TALL = W == 16 ? 4 : 2;       // rows of x or y in registers
constexpr long RUN_AHEAD = 1024;            // bytes of a row of A to prefetch

inline Plan plan(const LoraArgs& a, int) {
  const long work = a.rows * a.rank * (a.parts * a.inputs * (a.x != nullptr) + a.outputs);
  return {work > 32768, a.rows * a.parts * a.rank * 4};
}

// v[i][j] = x[i] . a[j] for MR rows of x and `count` rows of A.
template <class T, int MR>
void shrink(const char* const* x, const char* a, long a_row, int count, long bytes, float* const* v) {
  const char* at[RANKS];
  for (int j = 0; j < RANKS; j++) at[j] = a + (j < count ? j : count - 1) * a_row;
  vf acc[MR][RANKS] = {};
  const auto step = [&](auto&& get_dwords, long k) {
    vi row[RANKS];
    UNROLL for (int j = 0; j < RANKS; j++) row[j] = get_dwords(at[j] + k);
    UNROLL for (int i = 0; i < MR; i++) {
      const vi one = get_dwords(x[i] + k);
      UNROLL for (int j = 0; j < RANKS; j++) acc[i][j] = dot_step<T>(acc[i][j], one, row[j]);
    }
  };
  long k = 0;
  for (; k + W * 4 <= bytes; k += W * 4) {
    UNROLL for (int j = 0; j < RANKS; j++) __builtin_prefetch(at[j] + k + RUN_AHEAD);
    step([](const char* p) { vi d; memcpy(&d, p, sizeof d); return d; }, k);
  }
  if (k < bytes)
    step([&](const char* p) { vi d{}; memcpy(&d, p, bytes - k); return d; }, k);
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < count; j++) v[i][j] = sum(acc[i][j]);
}

// NV vectors of columns from c on, of MR rows of y; or the last n < W columns, if !WHOLE.
template <class T, int MR, int NV, bool WHOLE>
INLINE void expand(const T* b, long b_row, long rank, const float* const* v, T* const* y,
                   const float* factor, const float* shift, long c, long n) {
  const auto read = [&](auto* p) {
    if constexpr (WHOLE) return load(p);
    return load(p, n);
  };
  vf acc[MR][NV] = {};
  for (long r = 0; r < rank; r++) {
    const T* row = b + r * b_row + c;
    __builtin_prefetch(row + 4 * NV * W);
    vf part[NV];
    UNROLL for (int j = 0; j < NV; j++) part[j] = read(row + j * W);
    UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NV; j++)
      acc[i][j] = multiply_add(splat(v[i][r]), part[j], acc[i][j]);
  }
  UNROLL for (int j = 0; j < NV; j++) {
    const long at = c + j * W;
    const vf times = factor ? read(factor + at) : splat(1.0f);
    const vf plus = shift ? read(shift + at) : vf{};
    UNROLL for (int i = 0; i < MR; i++) {
      const vf out = multiply_add(read(y[i] + at), times, plus) + acc[i][j];
      if constexpr (WHOLE) store(y[i] + at, out);
      else store(y[i] + at, out, n);
    }
  }
}

template <class T, int MR>
void expand_columns(const LoraArgs& a, long slot, long rank, const float* const* v, T* const* y,
                    long from, long to) {
  const T* b = (const T*)a.b + slot * a.rank * a.outputs;
  const float* factor = a.factor ? a.factor + slot * a.outputs : nullptr;
  const float* shift = a.shift ? a.shift + slot * a.outputs : nullptr;
  long c = from;
  for (; c + 2 * W <= to; c += 2 * W)
    expand<T, MR, 2, true>(b, a.outputs, rank, v, y, factor, shift, c, 2 * W);
  for (; c + W <= to; c += W)
    expand<T, MR, 1, true>(b, a.outputs, rank, v, y, factor, shift, c, W);
  if (c < to) expand<T, MR, 1, false>(b, a.outputs, rank, v, y, factor, shift, c, to - c);
}

// f(MR, first) over n rows, TALL of them at a time.
template <class F>
INLINE void in_tiles(long n, F&& f) {
  long i = 0;
  for (; i + TALL <= n; i += TALL) f(std::integral_constant<int, TALL>(), i);
  for (; i < n; i++) f(std::integral_constant<int, 1>(), i);
}

template <class T>
void shrink_rows(const LoraArgs& a, float* v, long slot, long p, long from, long to, long r) {
  const long rank = a.ranks[slot * a.parts + p], width = a.parts * a.rank;
  const char* w = a.a + ((slot * a.parts + p) * a.rank + r) * a.inputs * (long)sizeof(T);
  const int count = (int)(rank - r < RANKS ? rank - r : RANKS);
  in_tiles(to - from, [&](auto tall, long at) {
    constexpr int MR = decltype(tall)::value;
    const char* x[MR];
    float* out[MR];
    for (int i = 0; i < MR; i++) {
      const long t = a.order[from + at + i];
      out[i] = v + (from + at + i) * width + p * a.rank + r;
      if (a.x) {
        x[i] = a.x + t / a.top * a.x_row;
        continue;
      }
      const long id = a.ids[t];
      for (int j = 0; j < count; j++)
        out[i][j] = id < 0 || id >= a.inputs ? NAN : one((const T*)w + j * a.inputs + id);
    }
    if (a.x) shrink<T, MR>(x, w, a.inputs * sizeof(T), count, a.inputs * sizeof(T), out);
  });
}

template <class T>
void expand_rows(const LoraArgs& a, const float* v, long slot, long p, long from, long to,
                 long column, long end) {
  const long rank = a.ranks[slot * a.parts + p], width = a.parts * a.rank;
  in_tiles(to - from, [&](auto tall, long at) {
    constexpr int MR = decltype(tall)::value;
    const float* in[MR];
    T* y[MR];
    for (int i = 0; i < MR; i++) {
      in[i] = v + (from + at + i) * width + p * a.rank;
      y[i] = (T*)(a.y + a.order[from + at + i] * a.y_row);
    }
    expand_columns<T, MR>(a, slot, rank, in, y, column, end);
  });
}

// f(slot, part, first row, end of rows) for every part with an adapter and up to ROWS_AT_ONCE rows.
template <class F>
void for_each_part(const LoraArgs& a, F&& f) {
  for (long s = 0; s < a.slots; s++)
    for (long from = a.starts[s]; from < a.starts[s + 1]; from += ROWS_AT_ONCE) {
      const long left = a.starts[s + 1] - from;
      for (long p = 0; p < a.parts; p++)
        if (a.ranks[s * a.parts + p]) f(s, p, from, from + (left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE));
    }
}

template <class T>
void lora(const LoraArgs& a, const Team& team) {
  float* v = (float*)team.scratch;
  long item = 0, mine = team.take(1);
  for_each_part(a, [&](long s, long p, long from, long to) {
    for (long r = 0; r < a.ranks[s * a.parts + p]; r += RANKS)
      if (item++ == mine) {
        shrink_rows<T>(a, v, s, p, from, to, r);
        mine = team.take(1);
      }
  });
  team.barrier();
  for_each_part(a, [&](long s, long p, long from, long to) {
    const long last = a.bounds[p + 1];
    for (long c = a.bounds[p]; c < last; c += COLUMNS_AT_ONCE)
      if (item++ == mine) {
        const long end = c + COLUMNS_AT_ONCE < last ? c + COLUMNS_AT_ONCE : last;
        expand_rows<T>(a, v, s, p, from, to, c, end);
        mine = team.take(1);
      }
  });
}

inline void run(const LoraArgs& a, const Team& team) {
  a.dtype ? lora<bf16>(a, team) : lora<float>(a, team);
}
