// int8_linear: rows are quantized to int8 as wholes, and multiplied by a weight in int8, whose bytes
// lie in panels as codes of 8 bits do. Sums over all inputs are integers, so nothing depends on
// tiles and threads.
#pragma once
#include "codes_linear.h"

struct Int8LinearArgs {
  const char* x;
  long x_row;  // bytes
  const char* codes;
  const float* scale;         // [panels * 32]
  const int32_t* sums;        // of a weight's rows, the same; null: rows of x have no zero
  const float* input_scale;   // of all rows; null: each row has its own
  const int32_t* input_zero;  // beside it; null: 0
  const void* bias;
  void* y;
  long rows, inputs, outputs, dtype;

  long blocks() const { return (inputs + BLOCK - 1) / BLOCK; }
  long panels() const { return (outputs + PANEL - 1) / PANEL; }
  long row_bytes() const { return integer_bytes(true, blocks()); }
};

struct Int8Row {
  float scale;
  int32_t zero, sum;  // sum: of its integers
};

constexpr float MIN_RANGE = 1e-10f;  // as in formats/int8_weight.py

INLINE long int8_rows(const Int8LinearArgs& a) { return a.rows < QUANT_ROWS ? a.rows : QUANT_ROWS; }

inline Plan plan(const Int8LinearArgs& a, int) {
  const long row = a.row_bytes() + (long)sizeof(Int8Row);
  return {a.rows * a.inputs * a.outputs > 32768, int8_rows(a) * row};
}

INLINE float rounded(float x) { return rounded(splat(x))[0]; }

// The scale and the zero of a row of n numbers: see quantize_int8.py.
template <class T>
Int8Row row_range(const T* x, long n, bool symmetric) {
  vf low{}, high{}, bad{};
  each(n, [&](long i, long k) {
    const vf v = get(x + i, k);
    low = vmin(low, v);
    high = vmax(high, v);
    bad += v - v;
  });
  const float least = -largest(-low), most = largest(high);
  const float size = symmetric ? (most > -least ? most : -least) : most - least;
  float scale = (size > MIN_RANGE ? size : MIN_RANGE) / (symmetric ? 127.0f : 255.0f);
  if (sum(bad) != 0 || !(scale - scale == 0)) return {NAN, 0, 0};
  if (symmetric) return {scale, 0, 0};
  const float zero = nearbyintf(-128.0f - rounded(least * (1.0f / scale)));
  return {scale, (int32_t)(zero < -128 ? -128 : zero > 127 ? 127 : zero), 0};
}

template <class T>
void quantize_row(const Int8LinearArgs& a, const T* x, char* q, Int8Row& row) {
  if (a.input_scale)
    row = {*a.input_scale, a.input_zero ? *a.input_zero : 0, 0};
  else
    row = row_range(x, a.inputs, !a.sums);
  memset(q, 0, a.row_bytes());
  const float inverse = 1.0f / row.scale;
  const vi zero = vi{} + row.zero, least = vi{} - 128, most = vi{} + 127;
  vi all{};
  each(a.inputs, [&](long i, long n) {  // what is stored past the end meets codes of 0
    const vf v = rounded(get(x + i, n) * inverse);
    const vf near = vmin(splat(1024.0f), vmax(splat(-1024.0f), v));
    vi whole = (vi)(near + ROUNDS) - (vi)splat(ROUNDS) + zero;
    whole = whole < least ? least : whole;
    whole = (whole > most ? most : whole) & (v == v);
    all += whole;
    store_integers(q, i, whole, splits<SIGNED>());
  });
  for (int i = 0; i < W; i++) row.sum += all[i];
}

template <class T>
struct Int8Tiles {
  const Int8LinearArgs& a;
  const char* q;          // of the rows, and what belongs to each
  const Int8Row* given;
  long panel, first;  // first: the row of the call with which they begin
  long next;          // as in TileArgs
  static constexpr int ROWS = 4, PANELS = ROW_PANELS;

  template <int R, int NV>
  __attribute__((noinline)) void tile(long row, long column) const {
    const long panel_bytes = a.blocks() * BLOCK * PANEL;
    const char* at = a.codes + (panel * panel_bytes + column * 4);
    const long x_row = a.row_bytes();
    const char* x = q + row * x_row;
    vi all[R][NV] = {};
    for (long block = a.blocks(); block > 0; block--) {
      vi acc[R][NV] = {};
      add_products<BYTES, SIGNED, R, NV>(acc, at, next * panel_bytes, x, x_row, BLOCK / 8, nullptr);
      UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < NV; j++)
        all[i][j] += total<SIGNED>(acc[i][j]);
    }
    UNROLL for (int j = 0; j < NV; j++) {
      const long o = (panel + j / PV * next) * PANEL + column + j % PV * W;
      const long n = a.outputs - o < W ? a.outputs - o : W;
      if (n <= 0) break;
      const vf scale = load(a.scale + o), bias = a.bias ? get((const T*)a.bias + o, n) : vf{};
      vi sums{};
      if (a.sums) memcpy(&sums, a.sums + o, sizeof sums);
      UNROLL for (int i = 0; i < R; i++) {
        const Int8Row& one = given[row + i];
        const vi exact = all[i][j] - sums * one.zero - (FLIPS ? 128 * one.sum : 0);
        const vf y = rounded(__builtin_convertvector(exact, vf) * one.scale);
        put((T*)a.y + (first + row + i) * a.outputs + o, rounded(y * scale) + bias, n);
      }
    }
  }
};

template <class T>
void int8_product(const Int8LinearArgs& a, const Team& team) {
  const long most = int8_rows(a), panels = a.panels();
  Int8Row* given = (Int8Row*)team.scratch;
  char* q = (char*)(given + most);
  for (long first = 0; first < a.rows; first += most) {
    const long count = a.rows - first < most ? a.rows - first : most;
    if (first) {
      team.barrier();
      if (team.rank == 0) team.next->store(0);
      team.barrier();
    }
    long from, to;
    team.share(count, from, to);
    for (long i = from; i < to; i++)
      quantize_row(a, (const T*)(a.x + (first + i) * a.x_row), q + i * a.row_bytes(), given[i]);
    team.barrier();
    const long parts = row_parts(count), items = parts * panels, most = count == 1 ? ROW_PANELS : 1;
    const long grain = count > FUSED_ROWS ? 1 : (65536 / (a.blocks() * BLOCK * PANEL) + 2) / 2 * 2;
    for (long item; (item = team.take(grain)) < items;)
      for (long i = item; i < item + grain && i < items;) {
        const long part = i / panels, row = count * part / parts;
        const long next = most > 1 && i + 1 < item + grain && i % panels + 1 < panels;
        const Int8Tiles<T> tiles{a, q, given, i % panels, first, next};
        cover_panel(tiles, row, count * (part + 1) / parts - row);
        i += 1 + next;
      }
  }
}

inline void run(const Int8LinearArgs& a, const Team& team) {
  a.dtype ? int8_product<bf16>(a, team) : int8_product<float>(a, team);
}
