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
constexpr int SPAN_VECTORS = 4;                  // of columns whose sums are in registers
constexpr long SPAN = SPAN_VECTORS * W;
constexpr long RUN_AHEAD = 1024;            // bytes of a row of A to prefetch

inline Plan plan(const LoraArgs& a, int threads) {
  const long work = a.rows * a.rank * (a.parts * a.inputs * (a.x != nullptr) + a.outputs);
  return {work > 12288, (a.rows * a.parts + threads * SPAN) * a.rank * 4};
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

// SPAN columns in the order of their sums: of bf16 the even ones of 2 W, then the odd ones, and so
// again, because a dword is two of them.
INLINE void load_span(const float* p, vf (&to)[SPAN_VECTORS]) {
  UNROLL for (int u = 0; u < SPAN_VECTORS; u++) to[u] = load(p + u * W);
}
INLINE void load_span(const bf16* p, vf (&to)[SPAN_VECTORS]) {
  UNROLL for (int u = 0; u < SPAN_VECTORS; u += 2) {
    vi pairs;
    memcpy(&pairs, p + u * W, sizeof pairs);
    to[u] = (vf)(pairs << 16);
    to[u + 1] = (vf)(pairs & (int32_t)0xffff0000);
  }
}
INLINE void store_span(float* p, const vf (&from)[SPAN_VECTORS]) {
  UNROLL for (int u = 0; u < SPAN_VECTORS; u++) store(p + u * W, from[u]);
}
INLINE void store_span(bf16* p, const vf (&from)[SPAN_VECTORS]) {
  UNROLL for (int u = 0; u < SPAN_VECTORS; u += 2) {
    const vu pairs = round_bf16(from[u]) >> 16 | (round_bf16(from[u + 1]) & 0xffff0000u);
    memcpy(p + u * W, &pairs, sizeof pairs);
  }
}

INLINE void order_span(const float*, const vf (&from)[SPAN_VECTORS], float* to) { store_span(to, from); }
INLINE void order_span(const bf16*, const vf (&from)[SPAN_VECTORS], float* to) {
  for (int c = 0; c < SPAN; c++) to[c] = from[c / (2 * W) * 2 + c % 2][c % (2 * W) / 2];
}

// y = y * factor + shift + sums for SPAN columns, or for fewer. factor, shift: null, or of these.
template <class T>
INLINE void add_sums(T* y, const float* factor, const float* shift, const vf (&sums)[SPAN_VECTORS],
                     long columns) {
  if (columns == SPAN && !factor && !shift) {
    vf base[SPAN_VECTORS];
    load_span(y, base);
    UNROLL for (int u = 0; u < SPAN_VECTORS; u++) base[u] = base[u] + sums[u];
    return store_span(y, base);
  }
  float delta[SPAN];
  order_span(y, sums, delta);
  each(columns, [&](long c, long n) {
    const vf times = factor ? get(factor + c, n) : splat(1.0f);
    const vf plus = shift ? get(shift + c, n) : vf{};
    put(y + c, multiply_add(get(y + c, n), times, plus) + load(delta + c), n);
  });
}

// v[i] . b for MR rows and SPAN columns, added to y. B: T, or float as store_span() of floats.
template <class T, class B, int MR>
void expand_span(const B* b, long b_row, long rank, const float* const* v,
                 T* const* y, const float* factor, const float* shift, long columns) {
  vf sums[MR][SPAN_VECTORS] = {};
  for (long r = 0; r < rank; r++, b += b_row) {
    __builtin_prefetch(b + 2 * SPAN);
    vf part[SPAN_VECTORS];
    load_span(b, part);
    UNROLL for (int i = 0; i < MR; i++) {
      const vf times = splat(v[i][r]);
      UNROLL for (int u = 0; u < SPAN_VECTORS; u++)
        sums[i][u] = multiply_add(times, part[u], sums[i][u]);
    }
  }
  UNROLL for (int i = 0; i < MR; i++) add_sums(y[i], factor, shift, sums[i], columns);
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

// wide: of this thread, for SPAN columns of B in floats. Several rows read those: many rows of B lie
// a power of two apart, and would push one another out of a cache.
template <class T>
void expand_rows(const LoraArgs& a, const float* v, float* wide, long slot, long p, long from,
                 long to, long column, long end) {
  const long rank = a.ranks[slot * a.parts + p], width = a.parts * a.rank;
  for (; column < end; column += SPAN) {
    const long columns = end - column < SPAN ? end - column : SPAN, at = slot * a.outputs + column;
    const T* b = (const T*)a.b + slot * a.rank * a.outputs + column;
    const float* factor = a.factor ? a.factor + at : nullptr;
    const float* shift = a.shift ? a.shift + at : nullptr;
    const bool direct = to - from == 1 && columns == SPAN;
    for (long r = 0; r < rank && !direct; r++) {
      T pad[SPAN] = {};
      if (columns < SPAN) memcpy(pad, b + r * a.outputs, columns * sizeof(T));
      vf part[SPAN_VECTORS];
      load_span(columns < SPAN ? pad : b + r * a.outputs, part);
      store_span(wide + r * SPAN, part);
    }
    in_tiles(to - from, [&](auto tall, long row) {
      constexpr int MR = decltype(tall)::value;
      const float* in[MR];
      T* y[MR];
      for (int i = 0; i < MR; i++) {
        in[i] = v + (from + row + i) * width + p * a.rank;
        y[i] = (T*)(a.y + a.order[from + row + i] * a.y_row) + column;
      }
      if (MR == 1 && direct)
        expand_span<T, T, 1>(b, a.outputs, rank, in, y, factor, shift, columns);
      else
        expand_span<T, float, MR>(wide, SPAN, rank, in, y, factor, shift, columns);
    });
  }
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
  float* wide = v + (a.rows * a.parts + team.rank * SPAN) * a.rank;
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
        expand_rows<T>(a, v, wide, s, p, from, to, c, end);
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
