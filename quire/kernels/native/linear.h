// linear, pack, embedding.
#pragma once
#include "thread_pool.h"
#include "panel_gemm.h"

struct Plan {
  bool parallel;
  long scratch;  // bytes, shared by the ranks
};

struct LinearArgs {
  const char* x;
  long x_row;  // bytes
  const char* w;
  const void* bias;
  void* y;
  long rows, inputs, outputs, dtype;
};

constexpr long AHEAD = 2048;  // bytes of a panel to prefetch
constexpr long ROW_BLOCK = MAX_ROWS * 72L;  // rows whose packed form the ranks share at a time
constexpr long TALL_BLOCK = 96;  // rows that stay in a cache while a panel is multiplied by them

INLINE long steps_of(long inputs, long dtype) { return dtype ? (inputs + 1) / 2 : inputs; }

// Tall tiles have few enough rows to read them where they are.
INLINE bool packs_rows(const LinearArgs& a) {
  const bool tall = !a.dtype && slice_of<float>() < PV;
  return (a.rows > FEW_ROWS && !tall) || (a.dtype && a.inputs % 2);
}

// Rows that are multiplied by a panel at a time; a rank has sums of so many times 4 panels.
INLINE long block_of(const LinearArgs& a) {
  const long most = packs_rows(a) ? ROW_BLOCK : TALL_BLOCK;
  return a.rows < most ? a.rows : most;
}

INLINE long sums_offset(const LinearArgs& a) {  // bytes of scratch before them: packed rows
  return packs_rows(a) ? (block_of(a) * steps_of(a.inputs, a.dtype) + 64) / 16 * 64 : 0;
}

// Rows [from, from + rows) as [steps][rows] dwords.
inline void pack_tile(const LinearArgs& a, long from, int rows, uint32_t* out) {
  long steps = steps_of(a.inputs, a.dtype), whole = a.dtype ? a.inputs / 2 : a.inputs;
  const uint32_t* at[16];
  for (int i = 0; i < 16; i++)
    at[i] = (const uint32_t*)(a.x + (from + (i < rows ? i : 0)) * a.x_row);
  long k = 0;
  for (; k + 16 <= whole; k += 16) {
    if (k + 32 <= whole) {  // what is too much lands in steps that come later
      transpose16(at, out + k * rows, rows);
    } else {
      uint32_t turned[16 * 16];
      transpose16(at, turned, 16);
      for (int s = 0; s < 16; s++) memcpy(out + (k + s) * rows, turned + s * 16, rows * 4);
    }
    for (int i = 0; i < 16; i++) at[i] += 16;
  }
  for (; k < steps; k++)
    for (int i = 0; i < rows; i++) {
      uint32_t x = 0;
      memcpy(&x, a.x + (from + i) * a.x_row + k * 4, k < whole ? 4 : 2);
      out[k * rows + i] = x;
    }
}

// fp32 results of a tile -> y, with the bias, in the dtype of y. Columns past the end are dropped.
template <class T>
void finish(const LinearArgs& a, const float* from, long stride, long row, long rows, long column,
            long columns) {
  const long end = a.outputs - column < columns ? a.outputs - column : columns;
  const T* bias = a.bias ? (const T*)a.bias + column : nullptr;
  for (long i = 0; i < rows; i++) {
    T* y = (T*)a.y + (row + i) * a.outputs + column;
    const float* x = from + i * stride;
    if (bias)
      each(end, [&](long c, long n) { put(y + c, load(x + c) + get(bias + c, n), n); });
    else
      each(end, [&](long c, long n) { put(y + c, load(x + c), n); });
  }
}

// Rows [first, first + rows), `block` of them at a time. packed: as pack_tile wrote them, or null.
template <class T>
void linear_block(const LinearArgs& a, const Team& team, const uint32_t* packed, long first,
                  long rows, long block) {
  const long steps = steps_of(a.inputs, a.dtype), panel_bytes = steps * PANEL * 4;
  const long panels = (a.outputs + PANEL - 1) / PANEL;
  const int wide = panels_at_once((int)(rows < MAX_ROWS ? rows : MAX_ROWS));
  const long grain = rows > 4 ? 1 : 65536 / (panel_bytes * wide) + 1;
  const long groups = (panels + wide - 1) / wide, items = (rows + block - 1) / block * groups;
  float* sums = (float*)(team.scratch + sums_offset(a)) + team.rank * block * wide * PANEL;
  for (long item = team.take(grain), after; item < items; item = after) {
    after = team.take(grain);
    const long from = item / groups * block, g = item % groups, next = after % groups;
    const Tiles<T> tiles(rows - from < block ? rows - from : block);
    const long end = (g + grain) * wide < panels ? (g + grain) * wide : panels;
    for (long p = g * wide; p < end;) {
      const int np = p + wide <= panels ? wide : 1;
      const long later = p + np < end ? p + np : after < items ? next * wide : p;
      const Operand o{packed ? (const char*)(packed + from * steps) : a.x + (first + from) * a.x_row,
                      packed ? 4 : a.x_row,
                      4,
                      0,
                      a.w + p * panel_bytes,
                      panel_bytes,
                      steps,
                      AHEAD,
                      a.w + later * panel_bytes};
      tiles.product(np, o, packed, sums, np * PANEL, false);
      finish<T>(a, sums, np * PANEL, first + from, tiles.rows, p * PANEL, np * PANEL);
      p += np;
    }
  }
}

template <class T>
void linear_all(const LinearArgs& a, const Team& team) {
  if (!packs_rows(a)) return linear_block<T>(a, team, nullptr, 0, a.rows, TALL_BLOCK);
  const long steps = steps_of(a.inputs, a.dtype);
  uint32_t* scratch = (uint32_t*)team.scratch;
  for (long first = 0; first < a.rows; first += ROW_BLOCK) {
    const long rows = a.rows - first < ROW_BLOCK ? a.rows - first : ROW_BLOCK;
    const Tiles<T> tiles(rows);
    if (first) {
      team.barrier();
      if (team.rank == 0) team.next->store(0);
      team.barrier();
    }
    for (long i = team.rank; i < tiles.count; i += team.size)
      pack_tile(a, first + tiles.start(i), (int)(tiles.start(i + 1) - tiles.start(i)),
                scratch + tiles.start(i) * steps);
    team.barrier();
    linear_block<T>(a, team, scratch, first, rows, rows);
  }
}

#include "amx_linear.h"

inline Plan plan(const LinearArgs& a, int threads) {
  const long steps = steps_of(a.inputs, a.dtype);
  const bool parallel = a.rows * steps * a.outputs > 16384;
  if (a.dtype && has_tiles()) return {parallel, amx_scratch(a, threads)};
  return {parallel, sums_offset(a) + threads * block_of(a) * 4 * PANEL * 4};
}

inline void run(const LinearArgs& a, const Team& team) {
  if (a.dtype && has_tiles()) return amx_linear(a, team);
  a.dtype ? linear_all<bf16>(a, team) : linear_all<float>(a, team);
}

struct PackArgs {
  const char* w;
  long w_row;  // bytes
  uint32_t* out;
  long inputs, outputs, dtype;
};

inline Plan plan(const PackArgs&, int) { return {true, 0}; }

inline void run(const PackArgs& a, const Team& team) {
  const long steps = steps_of(a.inputs, a.dtype), whole = a.dtype ? a.inputs / 2 : a.inputs;
  const long panels = (a.outputs + PANEL - 1) / PANEL;
  for (long p; (p = team.take(1)) < panels;)
    for (long half = 0; half < PANEL; half += 16) {
      const long first = p * PANEL + half, left = a.outputs - first;
      uint32_t* out = a.out + p * steps * PANEL + half;
      const uint32_t* at[16];
      for (int i = 0; i < 16; i++) at[i] = (const uint32_t*)(a.w + (first + i) * a.w_row);
      long k = 0;
      if (left >= 16)
        for (; k + 16 <= whole; k += 16) {
          transpose16(at, out + k * PANEL, PANEL);
          for (int i = 0; i < 16; i++) at[i] += 16;
        }
      for (; k < steps; k++)
        for (long i = 0; i < 16; i++) {
          uint32_t x = 0;
          if (i < left) memcpy(&x, a.w + (first + i) * a.w_row + k * 4, k < whole ? 4 : 2);
          out[k * PANEL + i] = x;
        }
    }
}

struct EmbeddingArgs {
  const int32_t* ids;
  const char* w;
  char* y;
  long rows, outputs, inputs, dtype, packed;
  double scale;
};

inline Plan plan(const EmbeddingArgs& a, int) { return {a.rows * a.inputs > 16384, 0}; }

template <class T>
void embed(const EmbeddingArgs& a, const Team& team) {
  const long size = sizeof(T), steps = steps_of(a.inputs, a.dtype);
  long from, to;
  team.share(a.rows, from, to);
  for (long t = from; t < to; t++) {
    const long id = a.ids[t];
    char* y = a.y + t * a.inputs * size;
    if (id < 0 || id >= a.outputs) {  // never read outside; NaN shows up at once
      memset(y, 0xff, a.inputs * size);
      continue;
    }
    if (a.packed) {
      const char* w = a.w + (id / PANEL * steps * PANEL + id % PANEL) * 4;
      long bytes = a.inputs * size;
      for (long k = 0; k < steps; k++, bytes -= 4)
        memcpy(y + k * 4, w + k * PANEL * 4, bytes < 4 ? bytes : 4);
    } else {
      memcpy(y, a.w + id * a.inputs * size, a.inputs * size);
    }
    if (a.scale != 1.0)
      each(a.inputs, [&](long i, long n) {
        put((T*)y + i, get((T*)y + i, n) * (float)a.scale, n);
      });
  }
}

inline void run(const EmbeddingArgs& a, const Team& team) {
  a.dtype ? embed<bf16>(a, team) : embed<float>(a, team);
}
