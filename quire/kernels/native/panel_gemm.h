// Matrix products over panels of 32 columns: the inside of `linear` and of attention.
// b: panels of [steps][32] dwords, a dword being 2 bf16 or 1 float of one column.
// a: rows of dwords. Each output is ONE accumulator over the steps in order, whatever the tile:
// this is why a row's bits do not depend on how many rows are computed with it.
#pragma once
#include "simd.h"

constexpr int PANEL = 32;           // columns
constexpr int PV = PANEL / W;       // vectors in a step of a panel
#if defined(__AVX512F__)
constexpr int MAX_ACC = 28;         // of 32 registers: 2 hold the step of b, 1 the broadcast of a
#elif defined(__AVX2__)
constexpr int MAX_ACC = 12;
#else
constexpr int MAX_ACC = 16;
#endif
constexpr int MAX_ROWS = MAX_ACC / PV;

struct Operand {  // where a tile finds its rows and panels
  const char* a;
  long a_row, a_step;  // bytes
  const char* b;
  long panel_bytes, steps, ahead;  // ahead: how far in b to prefetch, bytes
  const char* later;               // what is read after this tile: fetched a line a step
};

// y[MR][NP panels] (+)= a[MR][steps] . b[NP panels][steps], in fp32.
template <class T, int MR, int NP>
__attribute__((noinline)) void tile(const Operand& o, float* y, long stride, bool add) {
  constexpr int NV = NP * PV;
  vf acc[MR][NV];
  UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NV; j++)
    acc[i][j] = add ? load(y + i * stride + j * W) : vf{};
  const char *a = o.a, *b = o.b, *later = o.later;
  const long a_row = o.a_row, ahead = o.ahead;
  for (long k = o.steps; k > 0; k--, a += o.a_step, b += PANEL * 4) {
    __builtin_prefetch(later, 0, 2);
    later += 64;
    vi column[NV];
    UNROLL for (int j = 0; j < NV; j++) {
      const char* at = b + j / PV * o.panel_bytes + j % PV * (W * 4);
      memcpy(&column[j], at, sizeof(vi));
      if (j * W * 4 % 64 == 0) __builtin_prefetch(at + ahead);
    }
    UNROLL for (int i = 0; i < MR; i++) {
      int32_t x;
      memcpy(&x, a + i * a_row, 4);
      const vi row = vi{} + x;
      UNROLL for (int j = 0; j < NV; j++) acc[i][j] = dot_step<T>(acc[i][j], row, column[j]);
    }
  }
  UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NV; j++)
    store(y + i * stride + j * W, acc[i][j]);
}

// Panels a tile of `rows` rows takes at once: few rows need more columns to hide latency.
constexpr int panels_at_once(int rows) {
  return rows * 4 * PV <= MAX_ACC ? 4 : rows * 2 * PV <= MAX_ACC ? 2 : 1;
}

template <class T, int MR = MAX_ROWS>
void tile_of(int rows, int panels, const Operand& o, float* y, long stride, bool add) {
  if constexpr (MR > 0) {
    if (rows != MR) return tile_of<T, MR - 1>(rows, panels, o, y, stride, add);
    if (panels == 1) return tile<T, MR, 1>(o, y, stride, add);
    if constexpr (panels_at_once(MR) >= 2)
      if (panels == 2) return tile<T, MR, 2>(o, y, stride, add);
    if constexpr (panels_at_once(MR) >= 4)
      if (panels == 4) return tile<T, MR, 4>(o, y, stride, add);
  }
}

struct Tiles {  // `rows` cut into tiles of nearly equal height
  long rows, count;
  explicit Tiles(long rows) : rows(rows), count((rows + MAX_ROWS - 1) / MAX_ROWS) {}
  long start(long i) const { return rows * i / count; }
};
