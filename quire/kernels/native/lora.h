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

typedef float DeltaSums[COLUMNS_AT_ONCE + W];

// sums[i] += v[i][r + j] * b[r + j] for NR ranks. b: at the first column. Few rows of B at a time:
// many lie a power of two apart, and would push one another out of a cache.
template <class T, int MR, int NR>
INLINE void add_ranks(const T* b, long b_row, const float* const* v, long r, DeltaSums* sums,
                      long columns) {
  const T* row = b + r * b_row;
  const auto step = [&](auto&& read, long c) {
    vf acc[MR];
    UNROLL for (int i = 0; i < MR; i++) acc[i] = load(sums[i] + c);
    UNROLL for (int j = 0; j < NR; j++) {
      const vf part = read(row + j * b_row + c);
      __builtin_prefetch(row + (j + NR) * b_row + c);
      UNROLL for (int i = 0; i < MR; i++) acc[i] = multiply_add(splat(v[i][r + j]), part, acc[i]);
    }
    UNROLL for (int i = 0; i < MR; i++) store(sums[i] + c, acc[i]);
  };
  long c = 0;
  for (; c + W <= columns; c += W) step([](const T* p) { return load(p); }, c);
  if (c < columns) step([&](const T* p) { return load(p, columns - c); }, c);
}

template <class T, int MR>
void expand_columns(const LoraArgs& a, long slot, long rank, const float* const* v, T* const* y,
                    long from, long to) {
  const T* b = (const T*)a.b + slot * a.rank * a.outputs + from;
  DeltaSums sums[MR] = {};
  long r = 0;
  for (; r + RANKS <= rank; r += RANKS)
    add_ranks<T, MR, RANKS>(b, a.outputs, v, r, sums, to - from);
  for (; r < rank; r++) add_ranks<T, MR, 1>(b, a.outputs, v, r, sums, to - from);
  const float* factor = a.factor ? a.factor + slot * a.outputs + from : nullptr;
  const float* shift = a.shift ? a.shift + slot * a.outputs + from : nullptr;
  for (int i = 0; i < MR; i++)
    each(to - from, [&](long c, long n) {
      const vf times = factor ? get(factor + c, n) : splat(1.0f);
      const vf plus = shift ? get(shift + c, n) : vf{};
      T* out = y[i] + from + c;
      put(out, multiply_add(get(out, n), times, plus) + load(sums[i] + c), n);
    });
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

struct LoraRowsArgs {
  int32_t *slots, *order, *starts;  // [rows], [rows], [count + 1]
  const int32_t *table, *sequences;  // null: slots are given
  long rows, count;
};

inline Plan plan(const LoraRowsArgs& a, int) { return {false, (a.count + 1) * 4}; }

inline void run(const LoraRowsArgs& a, const Team& team) {
  if (a.table)
    for (long t = 0; t < a.rows; t++)
      a.slots[t] = a.sequences[t] < 0 ? -1 : a.table[a.sequences[t]];
  int32_t* next = (int32_t*)team.scratch;  // of each slot, -1 first
  for (long s = 0; s <= a.count; s++) next[s] = 0;
  for (long t = 0; t < a.rows; t++) next[a.slots[t] < 0 ? 0 : a.slots[t] + 1]++;
  int32_t before = 0;
  for (long s = 0; s <= a.count; s++) {
    const int32_t own = next[s];
    next[s] = before;
    a.starts[s] = before += own;
  }
  for (long t = 0; t < a.rows; t++) a.order[next[a.slots[t] < 0 ? 0 : a.slots[t] + 1]++] = (int32_t)t;
}
