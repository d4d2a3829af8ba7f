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

// acc[MR][NP * PV] += a[MR][steps] . b[NP panels][steps]
template <class T, int MR, int NP>
INLINE void accumulate(vf (&acc)[MR][NP * PV], const char* a, long a_row, long a_step,
                       const char* b, long panel_bytes, long steps, long ahead) {
  for (long k = 0; k < steps; k++) {
    vi col[NP * PV];
    UNROLL for (int p = 0; p < NP; p++) UNROLL for (int v = 0; v < PV; v++) {
      const char* at = b + p * panel_bytes + k * (PANEL * 4) + v * (W * 4);
      memcpy(&col[p * PV + v], at, sizeof(vi));
      if (ahead && (v * W * 4) % 64 == 0) __builtin_prefetch(at + ahead);
    }
    UNROLL for (int i = 0; i < MR; i++) {
      int32_t x;
      memcpy(&x, a + i * a_row + k * a_step, 4);
      const vi row = vi{} + x;
      UNROLL for (int j = 0; j < NP * PV; j++) acc[i][j] = dot_step<T>(acc[i][j], row, col[j]);
    }
  }
}

struct Operand {  // where a tile finds its rows and panels
  const char* a;
  long a_row, a_step;  // bytes
  const char* b;
  long panel_bytes, steps, ahead;
};

// One tile: `out.init(i, column)` gives the start value, `out.put(i, column, value)` takes the sum.
template <class T, int MR, int NP, class Out>
__attribute__((noinline)) void tile(const Operand& o, const Out& out) {
  vf acc[MR][NP * PV];
  UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NP * PV; j++)
    acc[i][j] = out.init(i, j * W);
  accumulate<T, MR, NP>(acc, o.a, o.a_row, o.a_step, o.b, o.panel_bytes, o.steps, o.ahead);
  UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NP * PV; j++)
    out.put(i, j * W, acc[i][j]);
}

// Panels a tile of `rows` rows takes at once: few rows need more columns to hide latency.
INLINE constexpr int panels_at_once(int rows) {
  return rows * 4 * PV <= MAX_ACC ? 4 : rows * 2 * PV <= MAX_ACC ? 2 : 1;
}

template <class T, class Out, int MR = MAX_ROWS>
INLINE void tile_of(int rows, int panels, const Operand& o, const Out& out) {
  if constexpr (MR > 0) {
    if (rows != MR) return tile_of<T, Out, MR - 1>(rows, panels, o, out);
    if (panels == 1) return tile<T, MR, 1>(o, out);
    if constexpr (panels_at_once(MR) >= 2)
      if (panels == 2) return tile<T, MR, 2>(o, out);
    if constexpr (panels_at_once(MR) >= 4)
      if (panels == 4) return tile<T, MR, 4>(o, out);
  }
}
