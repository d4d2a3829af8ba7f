// Matrix products over panels of 32 columns: the inside of `linear` and of attention.
// b: panels of [steps][32] dwords, a dword being 2 bf16 or 1 float of one column.
// a: rows of dwords. Each output is ONE accumulator over the steps in order, whatever the tile:
// this is why a row's bits do not depend on how many rows are computed with it.
//
//     wide tile   few rows times whole panels: what streams b from memory
//     tall tile   more rows times a slice of a panel, for whose columns registers are left
#pragma once
#include <type_traits>

#include "simd.h"

constexpr int PANEL = 32;           // columns
constexpr int PV = PANEL / W;       // vectors in a step of a panel
#if defined(__AVX512F__)
constexpr int MAX_ACC = 28;         // of 32 registers: 2 hold the step of b, 1 the broadcast of a
#elif defined(__AVX2__)
constexpr int MAX_ACC = 12;         // of 16
#else
constexpr int MAX_ACC = 16;
#endif
constexpr int MAX_ROWS = MAX_ACC / PV;  // of a wide tile

// Up to FEW_ROWS, b comes from memory: wide tiles.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr long FEW_ROWS = 3;
constexpr bool SLICES = true;  // registers are few: tall tiles are of a slice of a panel
#else
constexpr long FEW_ROWS = 8;
constexpr bool SLICES = false;
#endif

// Panels of bf16 times rows in float32. The halves of a pair are multiplied one after the other, as
// dot_step<bf16> does without an instruction for it, but a number of a row is not widened by every tile.
struct WideRows {};

// Vectors of a tall tile's slice. A product of bf16 takes registers of its own: no tall tiles.
template <class T>
constexpr int slice_of() { return SLICES && !std::is_same_v<T, bf16> ? 2 : PV; }
template <class T>
constexpr int most_rows() { return MAX_ACC / slice_of<T>(); }

struct Operand {  // where tiles find their rows and panels
  const char* a;
  long a_row, a_step, a_tile;  // bytes; a_tile: from one tile's rows to the next one's
  const char* b;
  long panel_bytes, steps, ahead;  // ahead: how far in b to prefetch, bytes
  // What is read after this: tiles fetch a line a step. Wide ones half of it by the first tile, half
  // by the second; tall ones the slice that they multiply.
  const char* later;
};

template <class T>
INLINE vi broadcast(const char* p) {
  if constexpr (!std::is_same_v<T, bf16>) {
    float x;
    memcpy(&x, p, 4);
    return (vi)splat(x);
  }
  int32_t x;
  memcpy(&x, p, 4);
  return vi{} + x;
}

// The floats of a vector of pairs of bf16: of the first ones, or of the second.
template <bool SECOND>
INLINE vi widen_pairs(const char* p) {
  vi pairs;
  memcpy(&pairs, p, sizeof pairs);
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (SECOND) return (vi)_mm256_blend_epi16(_mm256_setzero_si256(), (__m256i)pairs, 0xaa);
#endif
  return SECOND ? pairs & (int32_t)0xffff0000 : pairs << 16;
}

// acc += a step of MR rows times NV vectors of columns.
template <class T, int MR, int NV, bool SECOND = false>
INLINE void add_step(vf (&acc)[MR][NV], const char* a, long a_row, const char* b, long panel_bytes) {
  using Dot = std::conditional_t<std::is_same_v<T, WideRows>, float, T>;
  vi column[NV];
  UNROLL for (int j = 0; j < NV; j++) {
    const char* at = b + j / PV * panel_bytes + j % PV * (W * 4);
    if constexpr (std::is_same_v<T, WideRows>)
      column[j] = widen_pairs<SECOND>(at);
    else
      memcpy(&column[j], at, sizeof(vi));
  }
  UNROLL for (int i = 0; i < MR; i++) {
    const vi row = broadcast<T>(a + i * a_row);
    UNROLL for (int j = 0; j < NV; j++) acc[i][j] = dot_step<Dot>(acc[i][j], row, column[j]);
  }
  if constexpr (std::is_same_v<T, WideRows> && !SECOND)
    add_step<T, MR, NV, true>(acc, a + 4, a_row, b, panel_bytes);
}

// y[count * MR][NV vectors] (+)= a[count * MR][steps] . b[NV vectors][steps], in fp32.
template <class T, int MR, int NV>
__attribute__((noinline)) void tiles_of(const Operand& o, long count, float* y, long stride,
                                        bool add) {
  const long a_row = o.a_row, ahead = o.ahead;
  for (long t = 0; t < count; t++, y += MR * stride) {
    vf acc[MR][NV];
    UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NV; j++)
      acc[i][j] = add ? load(y + i * stride + j * W) : vf{};
    const char *a = o.a + t * o.a_tile, *b = o.b, *later = o.later + (NV >= PV ? (t & 1) * o.steps * 64 : 0);
    for (long k = o.steps; k > 0; k--, a += o.a_step, b += PANEL * 4) {
      __builtin_prefetch(later, 0, 2);
      later += NV >= PV ? 64 : PANEL * 4;
      UNROLL for (int j = 0; j < NV; j++)
        if (j * W * 4 % 64 == 0)
          __builtin_prefetch(b + j / PV * o.panel_bytes + j % PV * (W * 4) + ahead);
      add_step<T, MR, NV>(acc, a, a_row, b, o.panel_bytes);
    }
    UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NV; j++)
      store(y + i * stride + j * W, acc[i][j]);
  }
}

// Panels a tile of `rows` rows takes at once: few rows need more columns to hide latency.
constexpr int panels_at_once(int rows) {
  return rows * 4 * PV <= MAX_ACC ? 4 : rows * 2 * PV <= MAX_ACC ? 2 : 1;
}

// `count` tiles of `rows` rows times `panels` panels, a slice at a time if the tiles are tall.
template <class T, int MR = most_rows<T>()>
void tiles_of(int rows, int panels, Operand o, long count, float* y, long stride, bool add) {
  if constexpr (MR > 0) {
    if (rows != MR) return tiles_of<T, MR - 1>(rows, panels, o, count, y, stride, add);
    if constexpr (MR > MAX_ROWS) {
      constexpr int NV = slice_of<T>();
      for (int at = 0; at < panels * PANEL; at += NV * W, o.b += NV * W * 4, o.later += NV * W * 4)
        tiles_of<T, MR, NV>(o, count, y + at, stride, add);
      return;
    }
    if (panels == 1) return tiles_of<T, MR, PV>(o, count, y, stride, add);
    if constexpr (panels_at_once(MR) >= 2)
      if (panels == 2) return tiles_of<T, MR, 2 * PV>(o, count, y, stride, add);
    if constexpr (panels_at_once(MR) >= 4)
      if (panels == 4) return tiles_of<T, MR, 4 * PV>(o, count, y, stride, add);
  }
}

// `rows` cut into tiles of nearly equal height: first the taller ones.
template <class T>
struct Tiles {
  long rows, count, height, taller;
  explicit Tiles(long rows)
      : rows(rows), count((rows + most(rows) - 1) / most(rows)),
        height(count ? rows / count : 0), taller(count ? rows % count : 0) {}
  static long most(long rows) { return rows > FEW_ROWS ? most_rows<T>() : MAX_ROWS; }
  long start(long i) const { return i * height + (i < taller ? i : taller); }

  // y[rows][panels * 32] (+)= the product. packed: a tile's rows are [steps][height] dwords.
  void product(int panels, Operand o, bool packed, float* y, long stride, bool add) const {
    for (int tall = 1; tall >= 0; tall--) {
      const long high = height + tall, n = tall ? taller : count - taller;
      if (!n) continue;
      if (packed) o.a_step = high * 4;
      o.a_tile = packed ? high * 4 * o.steps : high * o.a_row;
      tiles_of<T>((int)high, panels, o, n, y, stride, add);
      o.a += n * o.a_tile;
      y += n * high * stride;
    }
  }
};
